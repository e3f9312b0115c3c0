"""ShapeEnv: assertions on sizes that depend on data, and whether an operator makes them in eager too."""

from __future__ import annotations

import contextlib
import itertools
import logging
import operator
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from glue_compiler.compat.branch_guards import outside_of_tracing
from glue_compiler.compat.operator_calls import call_of
from glue_compiler.compat.symbols import is_unbacked, unbacked_symbols

_ANY_SIZE = 6
_MOST_RUNS = 8


def assertion_count(frame: Any) -> int:
    """How many assertions the code that is being traced has to make at run time so far."""
    return int(frame.output.shape_env.num_deferred_runtime_asserts)


def assertions(frame: Any) -> list[tuple[Any, Any]]:
    """(a token that stays the same, the sympy expression) of each. Expressions change when torch simplifies them."""
    asserts = frame.output.shape_env.deferred_runtime_asserts
    return [(each.stack, each.expr) for several in asserts.values() for each in several]


def nodes_so_far(frame: Any) -> Iterator[fx.Node]:
    """Of the body that is being traced, then of what is around it."""
    tracer = frame.output.current_tracer
    while tracer is not None:
        yield from tracer.graph.nodes
        tracer = tracer.parent


def unbacked_in_expression(expression: Any) -> list[Any]:
    """The unbacked symbols in the order of their names."""
    return sorted(unbacked_symbols(expression), key=str)


def compares_with_a_known_size(assertion: Any) -> bool:
    """Is it an equation of a size that depends on data with one that does not?"""
    sides = assertion.args if isinstance(assertion, sympy.Eq) else ()
    return any(not unbacked_symbols(side) for side in sides)


def known_count(mask: torch.Tensor) -> Any | None:
    """How many elements of a fake mask are set, where an operator has given that number a symbol since it was written.

    A fake tensor keeps it, so that masks are of one size wherever they index.
    """
    memo = getattr(mask, "nonzero_memo", None)
    return None if memo is None else as_written(memo) if isinstance(memo, torch.SymInt) else memo


def as_written(number: Any) -> Any:
    """The expression of a symbolic number, before anything that was assumed later is put into it."""
    return number.node._expr


def place_of(symbol: Any, value: Any) -> int | None:
    """Where an operator's result says what an unbacked symbol is: -1 for the number itself, or a tensor's dimension."""
    if isinstance(value, torch.SymInt):
        return -1 if as_written(value) == symbol else None
    if not isinstance(value, torch.Tensor):
        return None
    shape: tuple[Any, ...] = tuple(value.shape)
    sizes = [as_written(size) if isinstance(size, torch.SymInt) else size for size in shape]
    return sizes.index(symbol) if symbol in sizes else None


def eager_raises(frame: Any, nodes: Sequence[fx.Node], assertion: Any) -> bool:
    """Does one of the operators of ``nodes`` itself refuse each tried size for which ``assertion`` is false?

    They run on fake tensors of such sizes. Also true if no such sizes are found, or nothing can run: what cannot be
    tried stays with the assertion that torch makes.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    operators = [node for node in nodes if _may_run(node, assertion)]
    if not operators:
        return True
    runs = itertools.islice(_violations(frame.output.shape_env, assertion), _MOST_RUNS)
    with _quiet(), outside_of_tracing(), FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
        return not any(all(_runs(node, values) for node in operators) for values in runs)


def _may_run(node: fx.Node, assertion: Any) -> bool:
    """Does it give tensors, or assign to one? Any other call may switch a mode.

    Rows that are assigned to a slice whose length depends on data too are left out: nothing else knows that length, and
    they may be those of experts, which a pass proves.
    """
    gives_tensors = node.op.startswith("call_") and _is_tensors(node.meta.get("example_value"))
    return gives_tensors or (node.target is operator.setitem and compares_with_a_known_size(assertion))


def _violations(shape_env: Any, assertion: Any) -> Iterator[_Sizes]:
    symbols = unbacked_in_expression(assertion)
    # The ragged size of a jagged nested tensor has no number.
    hints = {symbol: sympy.sympify(size) for symbol, size in shape_env.backed_var_to_val.items()}
    known = {symbol: sympy.Integer(int(size)) for symbol, size in hints.items() if size.is_number}
    # 1 is the size that eager treats as no other.
    choices = [dict.fromkeys(symbols, 1)]
    choices += [{each: 1 if each is symbol else _ANY_SIZE for each in symbols} for symbol in symbols]
    choices += [dict.fromkeys(symbols, size) for size in (0, _ANY_SIZE)]
    for choice in choices:
        values = _Sizes(known | {symbol: sympy.Integer(size) for symbol, size in choice.items()})
        if _value(assertion, values) is False:
            yield values


def _is_tensors(value: Any) -> bool:
    several = value if isinstance(value, tuple | list) else (value,)
    return bool(several) and all(isinstance(each, torch.Tensor) for each in several)


class _Sizes(dict[Any, Any]):
    def of(self, expression: Any) -> int:
        """A size, with a number for each symbol that nothing is known of."""
        value = sympy.sympify(sympy.sympify(expression).xreplace(self))
        return int(value.xreplace({symbol: _ANY_SIZE for symbol in value.free_symbols if is_unbacked(symbol)}))


def _runs(node: fx.Node, sizes: _Sizes) -> bool:
    """Does the operator run through, and was it tried?"""
    if node.op == "call_module" or isinstance(node.target, torch._ops.HigherOrderOperator):
        return False
    try:
        made = {each: _concrete(each.meta.get("example_value"), sizes) for each in node.all_input_nodes}
        arguments, named = fx.map_arg((node.args, node.kwargs), lambda each: made[each])
        call_of(node, arguments, named)
    except Exception:
        return False
    return True


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What does not run is an answer here; torch would log it as an error."""
    thread, logger = threading.get_ident(), logging.getLogger("torch._subclasses.fake_tensor")

    def is_of_another_thread(_: logging.LogRecord) -> bool:
        return threading.get_ident() != thread

    logger.addFilter(is_of_another_thread)
    try:
        yield
    finally:
        logger.removeFilter(is_of_another_thread)


def _concrete(value: Any, sizes: _Sizes) -> Any:
    """``value`` with numbers for symbols."""
    if isinstance(value, torch.SymInt):
        return sizes.of(as_written(value))
    if isinstance(value, torch.SymBool):
        return bool(as_written(value).xreplace(sizes))
    if isinstance(value, torch.Tensor):
        shape, stride = ([_concrete(each, sizes) for each in several] for several in (value.shape, value.stride()))
        return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
    if isinstance(value, tuple | list):
        return type(value)(_concrete(each, sizes) for each in value)
    if isinstance(value, torch.SymFloat):
        raise ValueError("a float that depends on data")
    return value


def holds(assertion: Any, values: Mapping[Any, Any]) -> bool:
    """Is an assertion true of these numbers?"""
    return _value(assertion, {symbol: sympy.Integer(int(value)) for symbol, value in values.items()}) is True


def _value(assertion: Any, values: Mapping[Any, Any]) -> bool | None:
    """None if it has none: it divides by zero, or holds other symbols."""
    try:
        value = assertion.xreplace(values)
    except ZeroDivisionError:
        return None
    return bool(value) if value in (sympy.true, sympy.false) else None
