"""What must hold of a graph after a pass: more than ``Graph.lint`` asks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from glue_compiler import compat
from glue_compiler.errors import GlueInvariantError
from glue_compiler.fx import bodies
from glue_compiler.fx.effects import EffectAnalysis, Kind
from glue_compiler.fx.values import Symbolic, expression, leaves, unbacked_in, value_of


def check_graph(gm: fx.GraphModule, effects: EffectAnalysis) -> None:
    """Check ``gm`` and every body in it.

    - ``Graph.lint``; every get_attr names something; a higher-order operator passes each body what it takes;
    - an unbacked symbol is bound by a node before it is used, in the graph itself or by an operand;
    - the metadata of each node is what its operator gives when run again on its operands' metadata.

    Raises:
        GlueInvariantError: names the node and what does not hold.
    """
    effects.read_modes(gm)
    for module in bodies.graph_modules(gm):
        module.graph.lint()
        metadata = _metadata(module, effects)
        for problem in (*_structure(module), *_unbound_symbols(module, effects), *metadata):
            raise GlueInvariantError(problem)


def _structure(gm: fx.GraphModule) -> Iterator[str]:
    for node in gm.graph.find_nodes(op="get_attr"):
        if bodies.attribute_of(gm, node) is None:
            yield f"'{node.name}' reads '{node.target}', which the module does not have"
    for call in bodies.run_once_calls(gm):
        given, taken = len(call.operands), len(call.placeholders)
        if given != taken and not call.node.kwargs:
            yield f"'{call.node.name}' passes {given} operands to a body that takes {taken}"


def _unbound_symbols(gm: fx.GraphModule, effects: EffectAnalysis) -> Iterator[str]:
    bound: set[object] = set()
    for node in gm.graph.nodes:
        used = {symbol for arg in node.all_input_nodes for symbol in unbacked_in(value_of(arg))}
        made = set(unbacked_in(value_of(node)))
        if not _may_bind(gm, node, effects):
            used |= made
        if missing := used - bound:
            yield f"'{node.name}' uses the unbacked symbol {next(iter(missing))}, which nothing before it binds"
        bound |= made


def _may_bind(gm: fx.GraphModule, node: fx.Node, effects: EffectAnalysis) -> bool:
    """Arithmetic makes no symbols; inputs, operators that read data, and what we cannot see into may."""
    if "unbacked_bindings" in node.meta or not node.op.startswith("call_"):
        return True
    found = effects.of(gm, node)
    return found.syncs or found.kind is not Kind.PURE


def _metadata(gm: fx.GraphModule, effects: EffectAnalysis) -> Iterator[str]:
    for node in gm.graph.nodes:
        again = effects.result_of(gm, node)
        if again is None:
            continue
        recorded, computed = list(leaves(value_of(node))), list(leaves(again))
        if len(recorded) != len(computed):
            yield f"'{node.name}' has {len(recorded)} results on record and {len(computed)} when run again"
        own = set(unbacked_in(again)) - {s for arg in node.all_input_nodes for s in unbacked_in(value_of(arg))}
        own |= (node.meta.get("unbacked_bindings") or {}).keys()
        for old, new in zip(recorded, computed, strict=False):
            if problem := _difference(old, new, own):
                yield f"'{node.name}' is on record as {_show(old)}, but its operands give {_show(new)} ({problem})"


def _difference(old: object, new: object, own: set[object]) -> str | None:
    if isinstance(old, torch.Tensor) != isinstance(new, torch.Tensor):
        return "a tensor or not"
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        return None if _same_number(old, new, own) else "value"
    if (old.dtype, old.device) != (new.dtype, new.device):
        return "dtype or device"
    if len(old.shape) != len(new.shape):
        return "number of dimensions"
    if not all(_same_number(a, b, own) for a, b in zip(old.shape, new.shape, strict=True)):
        return "shape"
    return None


def _same_number(old: object, new: object, own: set[object]) -> bool:
    """Equal as expressions. A symbol that comes into being at the node, in either run, stands for any number.

    (2.11 gives a slice of unknown length a symbol at first, and a known length once the assertions are known.)
    """
    if not isinstance(old, Symbolic) and not isinstance(new, Symbolic):
        return type(old) is not type(new) or not isinstance(old, int) or old == new
    first, second = expression(old), expression(new)
    symbols = {*getattr(first, "free_symbols", ()), *getattr(second, "free_symbols", ())}
    if symbols & own or first == second:
        return True
    # A number on record for what is now an expression was decided from a range.
    shape_env = (old if isinstance(old, Symbolic) else new).node.shape_env  # type: ignore[attr-defined]
    one_is_a_number = bool(getattr(first, "free_symbols", ())) != bool(getattr(second, "free_symbols", ()))
    return one_is_a_number and compat.may_be_equal(first, second, shape_env)


def _show(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{list(map(str, value.shape))} on {value.device}"
    return str(value)
