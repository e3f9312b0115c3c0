"""ShapeEnv as plain data, and back: symbols with hints, ranges and sources, and what is known about them.

Torch has no public form of any of it; the attributes used here are the same in torch 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sympy
import torch

Plain = Any
"""What JSON can hold."""

_ASSUMPTIONS = ("integer", "positive", "nonnegative", "real")
_KINDS: dict[str, tuple[type, type]] = {
    "int": (torch.SymInt, int),
    "float": (torch.SymFloat, float),
    "bool": (torch.SymBool, bool),
}


def encode_expression(expression: Any) -> Plain:
    """A sympy expression: numbers as they are, symbols by name, everything else as ``[function, *arguments]``."""
    expression = sympy.sympify(expression)
    if isinstance(expression, sympy.Symbol):
        return expression.name
    if expression in (sympy.true, sympy.false):
        return bool(expression)
    if isinstance(expression, sympy.Integer):
        return int(expression)
    if isinstance(expression, sympy.Float):
        return ["float", repr(float(expression))]
    if isinstance(expression, sympy.Rational):
        return ["rational", int(expression.p), int(expression.q)]
    # Both have a Max. Constants such as oo and int_oo are classes without arguments.
    library = type(expression).__module__.partition(".")[0]
    return [f"{library}.{type(expression).__name__}", *map(encode_expression, expression.args)]


def decode_expression(plain: Plain, symbols: dict[str, sympy.Symbol]) -> Any:
    if isinstance(plain, str):
        return symbols[plain]
    if isinstance(plain, bool | int):
        return sympy.sympify(plain)
    name, *arguments = plain
    if name == "float":
        return sympy.Float(float(arguments[0]))
    if name == "rational":
        return sympy.Rational(*arguments)
    return _function(name)(*(decode_expression(argument, symbols) for argument in arguments))


def _function(name: str) -> Any:
    from torch.utils._sympy import functions, numbers

    library, _, function = name.partition(".")
    for module in (functions, numbers) if library == "torch" else (sympy, sympy.core.numbers):
        if hasattr(module, function):
            return getattr(module, function)
    raise ValueError(f"no function '{name}' to build an expression with; another torch or sympy wrote it")


def encode_number(number: Any) -> Plain:
    """A symbolic number: the kind, and its expression as it was written, before anything was replaced in it."""
    kind = next(kind for kind, (symbolic, _) in _KINDS.items() if isinstance(number, symbolic))
    return [kind, encode_expression(number.node._expr)]


def decode_number(plain: Plain, shape_env: Any, symbols: dict[str, sympy.Symbol]) -> Any:
    from torch.fx.experimental.sym_node import SymNode

    kind, expression = plain
    symbolic, python = _KINDS[kind]
    decoded = decode_expression(expression, symbols)
    known = decoded.xreplace(shape_env.backed_var_to_val)
    hint = python(known) if not known.free_symbols else None
    return symbolic(SymNode(decoded, shape_env, python, hint))


def encode_symbols(shape_env: Any, names: Iterable[str]) -> Plain:
    """What ``shape_env`` knows about the symbols of these names, and about those that stand for them."""
    by_name = {
        symbol.name: symbol
        for table in (shape_env.var_to_range, shape_env.backed_var_to_val, shape_env.replacements)
        for symbol in table
    }
    wanted: dict[str, None] = {}
    waiting = [name for name in names if name in by_name]
    replaced: list[Plain] = []
    for name in waiting:  # grows
        if name in wanted:
            continue
        wanted[name] = None
        replacement = shape_env.replacements.get(by_name[name])
        if replacement is not None:
            replaced.append([name, encode_expression(replacement)])
            waiting += sorted(symbol.name for symbol in replacement.free_symbols)
    known = {by_name[name] for name in wanted}
    facts = [guard.expr for guard in shape_env.guards]
    facts += [item.expr for asserts in shape_env.deferred_runtime_asserts.values() for item in asserts]
    renamed = [[old.name, new.name] for old, new in shape_env.unbacked_renamings.items() if {old, new} <= known]
    return {
        "symbols": [_encode_symbol(shape_env, by_name[name]) for name in sorted(wanted)],
        "replacements": replaced,
        "renamings": renamed,
        "facts": [encode_expression(fact) for fact in dict.fromkeys(facts) if fact.free_symbols <= known],
    }


def _encode_symbol(shape_env: Any, symbol: sympy.Symbol) -> Plain:
    value_range = shape_env.var_to_range.get(symbol)
    hint = shape_env.backed_var_to_val.get(symbol)
    sources = [_name_of(source) for source in shape_env.var_to_sources.get(symbol, ())]
    return {
        "name": symbol.name,
        "assumptions": {key: symbol.assumptions0[key] for key in _ASSUMPTIONS if key in symbol.assumptions0},
        "hint": None if hint is None else encode_expression(hint),
        "range": None if value_range is None else [*map(encode_expression, (value_range.lower, value_range.upper))],
        "size_like": symbol in shape_env.size_like,
        "sources": sources,
    }


def _name_of(source: Any) -> str:
    return source.name() if callable(source.name) else source.name  # a property since 2.12


def decode_symbols(plain: Plain) -> tuple[Any, dict[str, sympy.Symbol]]:
    """A new ShapeEnv that knows what :func:`encode_symbols` wrote; and its symbols by name."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    from torch.utils._sympy.value_ranges import ValueRanges

    shape_env = ShapeEnv()
    symbols = {each["name"]: sympy.Symbol(each["name"], **each["assumptions"]) for each in plain["symbols"]}
    for each in plain["symbols"]:
        symbol = symbols[each["name"]]
        if each["hint"] is not None:
            shape_env.backed_var_to_val[symbol] = decode_expression(each["hint"], symbols)
        if each["range"] is not None:
            shape_env.var_to_range[symbol] = ValueRanges(*(decode_expression(end, symbols) for end in each["range"]))
            _set_where_known(shape_env, symbol)
        if each["size_like"]:
            shape_env.size_like.add(symbol)
        if each["sources"]:
            shape_env.var_to_sources[symbol] = [ConstantSource(name) for name in each["sources"]]
        _reserve(shape_env, each["name"])
    for name, expression in plain["replacements"]:
        shape_env.replacements[symbols[name]] = decode_expression(expression, symbols)
    for old, new in plain["renamings"]:
        shape_env.unbacked_renamings[symbols[old]] = symbols[new]
    for fact in plain["facts"]:
        shape_env.axioms.update(shape_env.get_implications(decode_expression(fact, symbols)))
    return shape_env, symbols


def _set_where_known(shape_env: Any, symbol: sympy.Symbol) -> None:
    """Where a range was found, which narrowing it asks for."""
    from torch.fx.experimental.symbolic_shapes import ValueRangesSLoc

    place = shape_env._get_sloc()
    shape_env.var_to_range_sloc[symbol] = ValueRangesSLoc(place, place)
    shape_env.var_to_stack[symbol] = torch.utils._traceback.CapturedTraceback.extract(skip=1)


def _reserve(shape_env: Any, name: str) -> None:
    """A symbol that an operator makes later must not get this name."""
    number = name[1:]
    if name.startswith("u") and number.isdigit():
        shape_env.unbacked_symint_counter = max(shape_env.unbacked_symint_counter, int(number) + 1)


def make_fake_tensor(
    fake_mode: Any, storage: Any, dtype: torch.dtype, device: str, size: Any, stride: Any, offset: Any
) -> torch.Tensor:
    """A fake tensor over ``storage``, a storage on the meta device that other fake tensors may share."""
    from torch._subclasses.fake_tensor import FakeTensor

    with torch.no_grad(), fake_mode.shape_env.suppress_guards():
        meta = torch.empty(0, dtype=dtype, device="meta")
        meta.set_(storage, offset, size, stride)
        made: torch.Tensor = FakeTensor(fake_mode, meta, torch.device(device))
        return made


def fake_mode_for(shape_env: Any) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)


def shape_env_in(values: Iterable[Any]) -> Any | None:
    """The ShapeEnv of the first symbolic number among ``values``, or of the first fake tensor's mode."""
    for value in values:
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return value.node.shape_env
        mode = getattr(value, "fake_mode", None)
        if mode is not None and mode.shape_env is not None:
            return mode.shape_env
    return None


def hint_of(number: Any) -> int:
    """What a symbolic size was when it was recorded.

    Raises:
        ValueError: for one that depends on data.
    """
    value = number.node.expr.xreplace(number.node.shape_env.backed_var_to_val)
    if value.free_symbols:
        raise ValueError(f"the size {value} depends on data")
    return int(value)
