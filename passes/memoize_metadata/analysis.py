"""Which part of a captured graph depends on the batch's metadata alone, and what the rest needs of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

import glue_compiler.ops  # noqa: F401  registers torch.ops.glue
from glue_compiler.fx.effects import Effects, Kind
from glue_compiler.fx.reachable import reachable
from glue_compiler.fx.value_numbering import Numbering, Occurrence
from glue_compiler.fx.values import (
    expression,
    is_plain,
    makes_tensor,
    most_bytes,
    own_storages,
    producer_of,
    requires_grad,
    storages_of,
    tensors_in,
    unbacked_in,
    value_of,
    values_of,
)
from glue_compiler.pipeline.results import Skip

# Where the run-time memo knows what a stream is.
DEVICES = ("cpu", "cuda")

_READ_MASKS = {torch.ops.glue.mask_blocks.default, torch.ops.glue.mask_in_whole_blocks.default}
_OF_MASKS = {torch.ops.glue.mask_documents.default, torch.ops.glue.token_rows.default}
"""What each layer computes of the mask that it is given."""
_WAITING = {torch.ops.glue.exact_document_offsets.default, torch.ops.glue.token_rows.default}
"""Wait for the device, and depend on their operands alone."""
_COPY = torch.ops.glue.materialized.default

_FLOATING = (
    "it depends on a floating-point input; a prologue reads integers and booleans, and masks for their blocks alone"
)


@dataclass(frozen=True)
class SizeResult:
    """The size of ``tensor`` (a node of the prologue) in ``dimension``: how the rest learns an unbacked symbol."""

    tensor: fx.Node
    dimension: int


@dataclass(frozen=True)
class ProloguePlan:
    """What moves into the prologue. Nodes are in the graph's order.

    Attributes:
        inputs: placeholders that the prologue reads.
        nodes: what it computes. Those that the rest of the graph computes again, because that costs nothing (views,
            arithmetic on host numbers), are in ``nodes`` too.
        results: the nodes that become inputs of the rest: tensors that own their memory, and host integers.
        sizes: further results.
        returned: results whose memory the graph returns; the rest copies them first.
        syncs: host syncs of one forward that move.
    """

    inputs: tuple[fx.Node, ...] = ()
    nodes: tuple[fx.Node, ...] = ()
    results: tuple[fx.Node, ...] = ()
    sizes: tuple[SizeResult, ...] = ()
    returned: frozenset[fx.Node] = frozenset()
    syncs: int = 0
    skips: tuple[Skip, ...] = field(default=(), compare=False)

    @property
    def is_empty(self) -> bool:
        return not self.results


def plan_prologue(numbering: Numbering, threshold: int, shape_env: Any) -> ProloguePlan:
    """Plan for the captured graph itself (bodies of higher-order operators stay). Reads only.

    Args:
        threshold: bytes; a prologue without a host sync pays when it reads or makes a tensor at least so large.
        shape_env: for the sizes of tensors with symbolic shapes; None when the graph has none.
    """
    return _Planner(numbering, threshold, shape_env).run()


class _Planner:
    def __init__(self, numbering: Numbering, threshold: int, shape_env: Any) -> None:
        self.numbering = numbering
        self.threshold = threshold
        self.shape_env = shape_env
        self.nodes = list(numbering.root.graph.nodes)
        self.occurrences: dict[fx.Node, Occurrence] = {
            o.node: o for group in numbering.occurrences.values() for o in group if o.scope is numbering.root
        }
        self.reasons: dict[fx.Node, str] = {}
        self.masks: set[fx.Node] = set()
        """Floating-point inputs, their views and copies, of which nothing moves but what reads them as masks."""

    def run(self) -> ProloguePlan:
        excluded: dict[fx.Node, str] = {}
        while True:
            self._find_eligible(excluded)
            chosen = self._choose()
            results = self._results(chosen)
            refused = {node: reason for node in results if (reason := self._cannot_be_passed(node))}
            sizes, unknown = self._sizes(chosen, results) if not refused else ((), {})
            refused.update(unknown)
            if not refused:
                return self._plan(chosen, results, sizes)
            excluded.update(refused)

    # -- what may move

    def _find_eligible(self, excluded: dict[fx.Node, str]) -> None:
        """Fills ``reasons``: why a node cannot move; nodes without one can."""
        self.reasons, self.masks = {}, set()
        for node in self.nodes:
            if node in excluded:
                self.reasons[node] = excluded[node]
            elif reason := self._reason_to_stay(node):
                self.reasons[node] = reason

    def _reason_to_stay(self, node: fx.Node) -> str | None:
        value = value_of(node)
        if node.op == "placeholder":
            return self._reason_of_input(node, value)
        if node.op not in ("call_function", "call_method"):
            return "not an operator"
        for arg in node.all_input_nodes:
            if arg in self.reasons:
                return self.reasons[arg]
        if self.masks.intersection(node.all_input_nodes) and node.target not in _READ_MASKS:
            if producer_of(node).target is not _COPY and (own_storages(node) or self._effects(node).syncs):
                return _FLOATING
            if not isinstance(value, int | torch.SymInt):  # the size of a mask is known without it
                self.masks.add(node)
        effects, occurrence = self._effects(node), self.occurrences[node]
        if effects.kind not in (Kind.PURE, Kind.ASSERT) and node.target not in _WAITING:
            return f"it depends on '{node.name}', which is not a pure operator"
        if occurrence.last_write:
            return "memory that it reads is written before it, or something that is not understood runs before it"
        if occurrence.mode:
            return "it is computed inside of autocast or another context of the graph"
        if requires_grad(value):
            return f"it depends on '{node.name}', which needs a gradient"
        if not all(is_plain(tensor) for tensor in tensors_in(value)):
            return "a tensor subclass, or inside of a functorch transform"
        if any(tensor.device.type not in DEVICES for tensor in tensors_in(value)):
            return "it is on a device other than CPU and CUDA"
        if storages_of(value) & self.numbering.written:
            return "its memory is written in the graph, or may be by something that is not understood"
        return None

    def _reason_of_input(self, node: fx.Node, value: Any) -> str | None:
        if isinstance(value, int | torch.SymInt):
            return None
        if not isinstance(value, torch.Tensor) or not is_plain(value):
            return "it depends on an input that is not a plain tensor or an integer"
        if isinstance(value, torch.nn.Parameter):
            return "it depends on a parameter, which is no batch's and lives on"
        if value.is_complex() or (value.is_floating_point() and value.requires_grad):
            return _FLOATING
        if value.is_floating_point():
            self.masks.add(node)
        if value.device.type not in DEVICES:
            return "it depends on an input on a device other than CPU and CUDA"
        if storages_of(value) & self.numbering.written:
            return "an input that it depends on is written in the graph, or may be by something that is not understood"
        return None

    # -- what pays

    def _choose(self) -> set[fx.Node]:
        """Costly nodes, what follows from them, and what all those are computed from; inputs not included."""
        chosen: set[fx.Node] = set()
        for node in self.nodes:
            if node.op != "placeholder" and node not in self.reasons:
                follows = any(arg in chosen for arg in node.all_input_nodes)
                if (follows or self._is_costly(node)) and self._reads_a_tensor(node):
                    chosen.add(node)
        for node in reversed(self.nodes):
            if node in chosen:
                chosen.update(arg for arg in node.all_input_nodes if arg.op != "placeholder")
        return chosen

    def _is_costly(self, node: fx.Node) -> bool:
        if self._effects(node).syncs or node.target in _OF_MASKS:
            return True
        if not own_storages(node):
            return False
        touched = tensors_in(values_of((node, *node.all_input_nodes)))
        sizes = (most_bytes(tensor, self.shape_env) for tensor in touched)
        return any(size is not None and size >= self.threshold for size in sizes)

    def _reads_a_tensor(self, node: fx.Node) -> bool:
        """Does the node depend on a tensor input? A batch is known by its tensors; without one nothing ends it."""
        read = reachable([node], lambda each: each.all_input_nodes)
        return any(each.op == "placeholder" and makes_tensor(each) for each in read)

    # -- what the rest needs

    def _results(self, chosen: set[fx.Node]) -> list[fx.Node]:
        needed: set[fx.Node] = set()
        for node in reversed(self.nodes):
            if node not in chosen or (node in needed and self._is_free(node)):
                needed.update(arg for arg in node.all_input_nodes if arg in chosen)
        return [node for node in self.nodes if node in needed and not self._is_free(node)]

    def _is_free(self, node: fx.Node) -> bool:
        """Costs nothing to compute again: a view, arithmetic on host numbers.

        A length that an operator has found is handed over, so that its tensor need not be.
        """
        return not self._effects(node).syncs and not own_storages(node) and not _is_unbacked_symbol(value_of(node))

    def _cannot_be_passed(self, node: fx.Node) -> str | None:
        value = value_of(node)
        if isinstance(value, torch.Tensor | torch.SymInt):
            return None
        return f"'{node.name}' is neither a tensor nor an integer, so it cannot be an input of the rest"

    def _sizes(self, chosen: set[fx.Node], results: list[fx.Node]) -> tuple[tuple[SizeResult, ...], dict[fx.Node, str]]:
        """How the rest learns each unbacked symbol in the shapes of ``results``; and results for which it cannot."""
        known = {expression(value_of(node)) for node in results if isinstance(value_of(node), torch.SymInt)}
        sizes: list[SizeResult] = []
        for result in results:
            for symbol in unbacked_in(value_of(result)):
                if symbol in known:
                    continue
                size = self._size_equal_to(symbol, chosen)
                if size is None:
                    return (), {result: f"nothing gives the length {symbol} of '{result.name}' by itself"}
                sizes.append(size)
                known.add(symbol)
        return tuple(sizes), {}

    def _size_equal_to(self, symbol: Any, chosen: set[fx.Node]) -> SizeResult | None:
        for node in self.nodes:
            value = value_of(node)
            if node in chosen and isinstance(value, torch.Tensor):
                for dimension, size in enumerate(value.shape):
                    if expression(size) == symbol:
                        return SizeResult(node, dimension)
        return None

    # -- the plan

    def _plan(self, chosen: set[fx.Node], results: list[fx.Node], sizes: tuple[SizeResult, ...]) -> ProloguePlan:
        stays = {node for node in self.nodes if node in self.occurrences and self._effects(node).syncs} - chosen
        skips = tuple(
            Skip.at(node, f"computed in every call: {self.reasons.get(node, 'no tensor input')}")
            for node in self.nodes
            if node in stays
        )
        if not results:
            return ProloguePlan(skips=skips)
        read = {arg for node in chosen for arg in node.all_input_nodes if arg.op == "placeholder"}
        returned = [node for node in results if storages_of(value_of(node)) & self.numbering.returned]
        return ProloguePlan(
            inputs=tuple(node for node in self.nodes if node in read),
            nodes=tuple(node for node in self.nodes if node in chosen),
            results=tuple(results),
            sizes=sizes,
            returned=frozenset(returned),
            syncs=sum(self._effects(node).syncs for node in chosen),
            skips=skips,
        )

    def _effects(self, node: fx.Node) -> Effects:
        return self.numbering.effects.get(node, Effects(Kind.NOTHING))


def _is_unbacked_symbol(value: Any) -> bool:
    return isinstance(value, torch.SymInt) and unbacked_in(value) == [expression(value)]
