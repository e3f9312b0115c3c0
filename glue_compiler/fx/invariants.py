"""What must hold of a graph after a pass: more than ``Graph.lint`` asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import fx

from glue_compiler.compat.symbols import may_be_equal
from glue_compiler.errors import GlueInvariantError
from glue_compiler.fx import bodies
from glue_compiler.fx.effects import EffectAnalysis, Kind
from glue_compiler.fx.values import Symbolic, expression, is_call, leaves, unbacked_in, value_of, values_of


@dataclass(frozen=True)
class Fault:
    """``what`` does not hold of ``node``; it does not name the node, so that a copy of one has the same fault."""

    node: str
    what: str


def check_graph(
    gm: fx.GraphModule, effects: EffectAnalysis, earlier: Callable[[], Iterable[Fault]] = tuple[Fault]
) -> None:
    """``Graph.lint``, and no fault in ``gm`` and the bodies in it but those that were there before.

    Args:
        earlier: the faults from before, asked for if there are any now. (2.11 records some shapes wrongly when it
            captures a frame again for dynamic sizes; passes are not to blame for them.)

    Raises:
        GlueInvariantError: names the node and what does not hold.
    """
    for module in bodies.graph_modules(gm):
        module.graph.lint()
    if faults := find_faults(gm, effects):
        known = {fault.what for fault in earlier()}
        for fault in faults:
            if fault.what not in known:
                raise GlueInvariantError(f"'{fault.node}' {fault.what}")


def find_faults(gm: fx.GraphModule, effects: EffectAnalysis) -> list[Fault]:
    """What does not hold of a graph and the bodies in it.

    - Every get_attr names something; a higher-order operator passes each body what it takes;
    - an unbacked symbol is bound by a node before it is used, in the graph itself or by an operand;
    - the metadata of each node is what its operator gives when run again on its operands' metadata.
    """
    found: list[Fault] = []
    effects.read_modes(gm)
    for module in bodies.graph_modules(gm):
        found += _structure(module)
        found += _unbound_symbols(module, effects)
        found += _metadata(module, effects)
    return found


def _structure(gm: fx.GraphModule) -> Iterator[Fault]:
    for node in gm.graph.find_nodes(op="get_attr"):
        if bodies.attribute_of(gm, node) is None:
            yield Fault(node.name, f"reads '{node.target}', which the module does not have")
    for call in bodies.run_once_calls(gm):
        given, taken = len(call.operands), len(call.placeholders)
        if given != taken and not call.node.kwargs:
            yield Fault(call.node.name, f"passes {given} operands to a body that takes {taken}")


def _unbound_symbols(gm: fx.GraphModule, effects: EffectAnalysis) -> Iterator[Fault]:
    bound: set[object] = set()
    symbols = {node: set(unbacked_in(value_of(node))) for node in gm.graph.nodes}
    if not any(symbols.values()):
        return
    for node, made in symbols.items():
        used = {symbol for arg in node.all_input_nodes for symbol in symbols[arg]}
        if made and not _may_bind(gm, node, effects):
            used |= made
        if missing := used - bound:
            what = f"uses the unbacked symbol {next(iter(missing))}, which nothing before it binds"
            yield Fault(node.name, what)
        bound |= made


def _may_bind(gm: fx.GraphModule, node: fx.Node, effects: EffectAnalysis) -> bool:
    """Arithmetic makes no symbols; inputs, operators that read data, and what we cannot see into may."""
    if "unbacked_bindings" in node.meta or not is_call(node):
        return True
    found = effects.of(gm, node)
    return found.syncs or found.kind is not Kind.PURE


def _metadata(gm: fx.GraphModule, effects: EffectAnalysis) -> Iterator[Fault]:
    for node in gm.graph.nodes:
        again = effects.result_of(gm, node)
        if again is None:
            continue
        recorded, computed = list(leaves(value_of(node))), list(leaves(again))
        if len(recorded) != len(computed):
            yield Fault(node.name, f"has {len(recorded)} results on record and {len(computed)} when run again")
        own = set(unbacked_in(again))
        if own:
            own -= set(unbacked_in(values_of(node.all_input_nodes)))
        own |= (node.meta.get("unbacked_bindings") or {}).keys()
        for old, new in zip(recorded, computed, strict=False):
            if problem := _difference(old, new, own):
                what = f"is on record as {_show(old)}, but its operands give {_show(new)} ({problem})"
                yield Fault(node.name, what)


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
    return one_is_a_number and may_be_equal(first, second, shape_env)


def _show(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{list(map(str, value.shape))} on {value.device}"
    return str(value)
