"""Pieces of a graph as calls of a body would see them: what goes in, what comes out, and what is done between."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from glue_compiler.fx.storage_roots import storage_root
from glue_compiler.fx.values import Symbolic, expression, expressions_of, storages_of, value_of
from glue_compiler.passes.share_layers.borders import Span
from glue_compiler.passes.share_layers.steps import Steps, UnknownStep, is_item, is_symbol

aten = torch.ops.aten


@dataclass(frozen=True)
class Piece:
    """Steps that one call of a body can take the place of.

    Attributes:
        nodes: the steps, in order.
        operands: what they use of the graph's, in order of first use.
        constants: what else they use: tensors that are filled with a number, which the body makes itself.
        outputs: what others use of theirs: memory of their own, and no two share any.
        views: steps that others use, and that are made again outside, of operands and outputs.
        kind: equal for two pieces that one body can serve.
    """

    nodes: tuple[fx.Node, ...]
    operands: tuple[fx.Node, ...]
    constants: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    views: tuple[fx.Node, ...]
    kind: Hashable


def piece_of(steps: Steps, span: Span) -> Piece:
    """The steps of ``span`` as a piece.

    Raises:
        UnknownStep: no body can hold them.
    """
    first, last = span
    for place in range(first, last):
        if place in steps.closed:
            raise UnknownStep(steps.closed[place])
    nodes = steps.nodes[first:last]
    numbers: dict[fx.Node, int] = {node: i for i, node in enumerate(nodes)}
    operands: dict[fx.Node, int] = {}
    constants: dict[fx.Node, Hashable] = {}

    def reference(node: fx.Node) -> tuple[str, Hashable]:
        if node in numbers:
            return "step", numbers[node]
        if (filled := _filled_with(node, steps)) is not None:
            return "constant", constants.setdefault(node, filled)
        return "operand", operands.setdefault(node, len(operands))

    flow = tuple(tuple(map(reference, _operands(node))) for node in nodes)
    outputs, views = _outputs(nodes, numbers)
    if not outputs or not any(isinstance(value_of(operand), torch.Tensor) for operand in operands):
        raise UnknownStep  # nothing to say: it takes no tensor, or returns none
    for operand in operands:
        if not isinstance(value_of(operand), torch.Tensor | torch.SymInt | int):
            raise UnknownStep("a body would take what is no tensor and no number")
    for size in _sizes_not_told(steps, tuple(operands), nodes):
        operands[size] = len(operands)
    kind = (
        steps.local[first:last],
        flow,
        tuple(steps.kinds[operand] for operand in operands),
        tuple(numbers[node] for node in outputs),
    )
    return Piece(nodes, tuple(operands), tuple(constants), outputs, views, kind)


def _filled_with(node: fx.Node, steps: Steps) -> Hashable | None:
    """Equal for two tensors alike that are filled with the same number; None for all others.

    What all layers are handed is written to memory once, and stays there; made beside its use it is in none.
    """
    is_filled = node.op == "call_function" and node.target in _FILLED and not node.all_input_nodes
    if not is_filled or steps.kinds[node] is None or node in steps.symbols:
        return None
    return node.target, repr(node.args), repr(node.kwargs), steps.kinds[node]


_FILLED = {aten.full.default, aten.zeros.default, aten.ones.default, aten.scalar_tensor.default}


def _sizes_not_told(steps: Steps, operands: tuple[fx.Node, ...], nodes: tuple[fx.Node, ...]) -> list[fx.Node]:
    """Further operands: Inductor reads ``s0`` off an operand of that size, and not off one of ``2 * s0``."""
    asked = set[Any]().union(*(steps.symbols.get(node, ()) for node in (*operands, *nodes)))
    told = {n for each in operands if each in steps.symbols for n in expressions_of(value_of(each)) if is_symbol(n)}
    missing = sorted(asked - told, key=str)
    if unknown := [symbol for symbol in missing if symbol not in steps.sizes]:
        raise UnknownStep(f"a body would not know the size {unknown[0]}")
    return [steps.sizes[symbol] for symbol in missing]


def _operands(node: fx.Node) -> list[fx.Node]:
    """In the order of the arguments, once for each time that one is passed."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def _outputs(nodes: tuple[fx.Node, ...], inside: dict[fx.Node, int]) -> tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]:
    used = [node for node in nodes if any(user not in inside for user in node.users)]
    views: set[fx.Node] = set()
    outputs: set[fx.Node] = set()
    while used:
        node = used.pop()
        if node in views or node in outputs:
            continue
        if _shows_others(node):
            # A body returns memory of its own alone, as whoever plans memory outside takes for granted.
            views.add(node)
            used += [operand for operand in node.all_input_nodes if operand in inside]
        else:
            outputs.add(node)
    for node in outputs:
        if not isinstance(value_of(node), torch.Tensor):
            raise UnknownStep("a body would return what is no tensor")
    _check_memory(nodes, outputs, inside)
    return tuple(sorted(outputs, key=inside.__getitem__)), tuple(sorted(views, key=inside.__getitem__))


def _shows_others(node: fx.Node) -> bool:
    """May its memory be its operand's: a view, or a copy that a compiler leaves out, a number?"""
    if isinstance(value_of(node), (int, *Symbolic)) or storage_root(node) is not node:
        return True
    if is_item(node):
        return False
    if node.target not in _COPIES:
        return False
    made, given = value_of(node), value_of(node.all_input_nodes[0])
    return made.dtype == given.dtype and _layout(made) == _layout(given)


def _layout(tensor: torch.Tensor) -> list[Any]:
    return list(map(expression, (*tensor.shape, *tensor.stride())))


# Of a compiler that finds nothing to convert, the result may be the operand itself.
_COPIES = {
    aten.clone.default,
    aten._to_copy.default,
    torch.ops.prims.convert_element_type.default,
    torch.ops.prims.device_put.default,
}


def _check_memory(nodes: tuple[fx.Node, ...], outputs: set[fx.Node], inside: dict[fx.Node, int]) -> None:
    taken = {operand for node in nodes for operand in node.all_input_nodes if operand not in inside}
    seen: set[Any] = storages_of([value_of(operand) for operand in taken])
    for node in outputs:
        memory = storages_of(value_of(node))
        if memory & seen:
            raise UnknownStep("a body would return memory of something else, which no schema tells")
        seen |= memory
