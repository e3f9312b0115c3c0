"""Finds loops over experts in one graph, and proves of each that it is one grouped computation. Changes nothing."""

from __future__ import annotations

import operator
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import fx

from glue_compiler.fx.effects import EffectAnalysis, Effects, Kind
from glue_compiler.fx.values import requires_grad, source_line, storage_of, storages_of, tensors_in, value_of
from glue_compiler.graph_pass import Skip
from glue_compiler.passes.group_experts.expert_bodies import BodyMatcher, Step
from glue_compiler.passes.group_experts.left_alone import LeftAlone
from glue_compiler.passes.group_experts.modes import Modes
from glue_compiler.passes.group_experts.row_sets import TOKEN, Index, RowSet, RowSets, same_size

_INDEX_ADD = {"index_add_"}
_ZEROS = {torch.zeros, torch.zeros_like, "new_zeros"}


@dataclass(frozen=True)
class Sink:
    """``accumulator.index_add_(0, token indices of one row set, added)``."""

    node: fx.Node
    accumulator: fx.Node
    index: Index
    added: fx.Node


@dataclass(frozen=True)
class ExpertLoop:
    """A loop that is proved to be one grouped computation.

    ``steps`` compute the body for all rows, in order; the result is the one of the last step.
    """

    selected: fx.Node
    num_experts: int
    top_k: int
    sinks: tuple[Sink, ...]
    steps: tuple[Step, ...]
    starts_at_zero: bool
    """Nothing but the loop has touched the accumulator, which was made of zeros."""
    absorbed: frozenset[fx.Node]
    """What the loop consists of; these nodes go once nothing uses them."""
    autocast: tuple[fx.Node, ...]
    """The nodes that opened the autocast regions around the loop."""

    @property
    def last(self) -> fx.Node:
        return self.sinks[-1].node

    @property
    def results(self) -> tuple[fx.Node, ...]:
        return tuple(sink.added for sink in self.sinks)

    @property
    def accumulator(self) -> fx.Node:
        return self.sinks[0].accumulator


@dataclass
class Plan:
    loops: list[ExpertLoop] = field(default_factory=list)
    skips: list[Skip] = field(default_factory=list)


def plan_grouping(gm: fx.GraphModule, numbers: dict[fx.Node, int], analysis: EffectAnalysis) -> Plan:
    """Plan for one graph (bodies of its higher-order operators are graphs of their own).

    Args:
        numbers: value numbers; nodes with one number compute the same value. May lack nodes.
    """
    sets = RowSets()
    if not any(sets.row_set(node) for node in gm.graph.nodes):
        return Plan()
    return _Planner(gm, numbers, analysis, sets).run()


class _Planner:
    def __init__(
        self, gm: fx.GraphModule, numbers: dict[fx.Node, int], analysis: EffectAnalysis, sets: RowSets
    ) -> None:
        self.nodes = list(gm.graph.nodes)
        self.position = {node: i for i, node in enumerate(self.nodes)}
        self.numbers = numbers
        self.sets = sets
        self.analysis = analysis
        self.effects: dict[fx.Node, Effects] = {node: analysis.of(gm, node) for node in self.nodes}
        self.modes = Modes(self.nodes, self.effects)

    def run(self) -> Plan:
        plan = Plan()
        claimed: set[fx.Node] = set()
        by_accumulator: dict[tuple[int, int], list[Sink]] = defaultdict(list)
        for node in self.nodes:
            if sink := self._sink(node):
                key = storage_of(value_of(sink.accumulator))
                by_accumulator[key, self._number(sink.index.rows.mask.selected)].append(sink)
        for sinks in by_accumulator.values():
            claimed.update(sink.index.rows.where for sink in sinks)
            loop = self._loop_or_skip(sinks)
            (plan.skips if isinstance(loop, Skip) else plan.loops).append(loop)  # type: ignore[arg-type]
        for node in self.nodes:
            if node not in claimed and self.sets.row_set(node):
                reason = "the rows of an expert are not added back with index_add_ on their token indices"
                plan.skips.append(Skip(reason, node.name, source_line(node)))
        return plan

    def _number(self, node: fx.Node) -> int:
        return self.numbers.get(node, -1 - self.position[node])

    def _sink(self, node: fx.Node) -> Sink | None:
        if node.op != "call_method" or node.target not in _INDEX_ADD or len(node.args) != 4 or node.kwargs:
            return None
        accumulator, dim, index, added = cast(Any, node.args)
        found = self.sets.index(index)
        if found is None or found.axis != TOKEN or not isinstance(accumulator, fx.Node):
            return None
        if dim != 0 or not isinstance(added, fx.Node) or not isinstance(value_of(accumulator), torch.Tensor):
            return None
        return Sink(node, accumulator, found, added)

    # -- one loop

    def _loop_or_skip(self, sinks: list[Sink]) -> ExpertLoop | Skip:
        try:
            return self._loop(sinks)
        except LeftAlone as left:
            node = left.node or sinks[0].node
            return Skip(left.reason, node.name, source_line(node))

    def _loop(self, sinks: list[Sink]) -> ExpertLoop:
        row_sets = [sink.index.rows for sink in sinks]
        mask = row_sets[0].mask
        experts = [rows.expert for rows in row_sets]
        if sorted(experts) != list(range(len(experts))):
            raise LeftAlone(f"its row sets are those of the experts {experts}, not of 0 to E-1, each once")
        if any(rows.mask.axes != mask.axes for rows in row_sets):
            raise LeftAlone("the experts select their rows in different ways")
        if len({sink.accumulator for sink in sinks}) != 1:
            raise LeftAlone("the experts add to different views of one tensor")
        selected = value_of(mask.selected)
        if selected.dtype not in (torch.int32, torch.int64) or selected.device != value_of(sinks[0].added).device:
            raise LeftAlone("the selected experts are no int32 or int64 tensor on the device of the rows")
        top_k = selected.shape[1] if selected.dim() == 2 else 1
        if not isinstance(top_k, int):
            raise LeftAlone("the number of slots of a token is not known when the graph is captured")
        in_order = sorted(sinks, key=lambda sink: sink.index.rows.expert)
        row_sets = [sink.index.rows for sink in in_order]
        all_routed = mask.classes == len(experts)
        if len(experts) == 1 and not all_routed:
            # One expert of many: grouping would compute its body for every row of the batch.
            raise LeftAlone("there is one expert, and not every slot is known to select it")
        matcher = BodyMatcher(row_sets, self.sets, self.effects, self.numbers, self.analysis, top_k)
        steps = matcher.match([sink.added for sink in in_order])
        self._check_accumulator_shape(sinks[0], steps[-1], selected)
        if not all_routed:
            self._check_sentinels(steps)
        absorbed = self._absorbed(matcher, sinks, row_sets)
        starts_at_zero = self._check_accumulator_uses(sinks)
        self._check_memory(sinks, absorbed)
        computed = sorted(matcher.body | matcher.peeled, key=self.position.__getitem__)
        self.modes.check_uniform([sinks[-1].node, *(node for node in computed if _is_float(node))])
        return ExpertLoop(
            selected=mask.selected,
            num_experts=len(experts),
            top_k=top_k,
            sinks=tuple(sinks),
            steps=steps,
            starts_at_zero=starts_at_zero,
            absorbed=frozenset(absorbed),
            autocast=self.modes.autocast_of(sinks[-1].node),
        )

    def _check_accumulator_shape(self, sink: Sink, result: Step, selected: torch.Tensor) -> None:
        accumulator = value_of(sink.accumulator)
        shape, width = accumulator.shape, result.tail
        if len(shape) != 2 or len(width) != 1 or shape[1] != width[0] or not isinstance(width[0], int):
            raise LeftAlone("the accumulator is not [tokens, width]", sink.node)
        if not accumulator.is_floating_point():
            raise LeftAlone("the accumulator is not floating point", sink.node)
        if not same_size(shape[0], selected.shape[0]):
            raise LeftAlone("the accumulator has another number of rows than there are routed tokens", sink.node)

    @staticmethod
    def _check_sentinels(steps: tuple[Step, ...]) -> None:
        """Rows of no expert have no effect on the result, but they would on the gradient of what all rows share."""
        for step in steps:
            for node in step.shared:
                if requires_grad(value_of(node)):
                    raise LeftAlone(
                        f"'{node.name}' needs a gradient from all experts' rows, and some slots may select no expert; "
                        "one_hot with exactly E classes would show that none does",
                        step.node,
                    )

    def _absorbed(self, matcher: BodyMatcher, sinks: list[Sink], row_sets: list[RowSet]) -> set[fx.Node]:
        """All nodes of the loop. Raises LeftAlone if one of them has a user outside."""
        sink_nodes = {sink.node for sink in sinks}
        inside = set(matcher.body) | sink_nodes
        for rows in row_sets:
            inside.add(rows.where)
            inside.update(user for user in rows.where.users if self.sets.index(user))
        droppable: set[fx.Node] = set()
        for node in sorted(inside - sink_nodes, key=self.position.__getitem__):
            for user in node.users:
                if user in inside or self._is_droppable(user, row_sets, inside, droppable):
                    continue
                if self.effects[user].writes:
                    raise LeftAlone("the body writes a tensor in place; out of place it would be grouped", user)
                raise LeftAlone(
                    f"'{node.name}', a value of one expert's rows, is used outside of the loop's body", user
                )
        masks = {node for rows in row_sets for node in rows.mask.nodes}
        return inside | droppable | masks | matcher.peeled

    def _is_droppable(
        self, node: fx.Node, row_sets: list[RowSet], inside: set[fx.Node], droppable: set[fx.Node]
    ) -> bool:
        """Something about the number of rows that nobody needs: a size, a check that cannot fail, a pure dead end."""
        if node in droppable:
            return True
        effects = self.effects[node]
        if effects.kind is Kind.ASSERT:
            if not is_trivial_check(node, row_sets):
                return False
        elif effects.kind is not Kind.PURE or effects.writes:
            return False
        # A size that a reshape of the body takes: the grouped form has sizes of its own.
        if not all(user in inside or self._is_droppable(user, row_sets, inside, droppable) for user in node.users):
            return False
        droppable.add(node)
        return True

    def _check_accumulator_uses(self, sinks: list[Sink]) -> bool:
        """Nobody looks at the accumulator while the loop runs; returns whether it starts from zeros."""
        accumulator = sinks[0].accumulator
        storage = storage_of(value_of(accumulator))
        mine = {sink.node for sink in sinks}
        begin, end = self.position[sinks[0].node], self.position[sinks[-1].node]
        touched_before = False
        for node in self.nodes[:end]:
            if node in mine or node is accumulator:
                continue
            uses = storages_of([value_of(node), *(value_of(arg) for arg in node.all_input_nodes)])
            if storage in uses:
                if self.position[node] > begin:
                    raise LeftAlone("the loop's accumulator is read or written between its experts", node)
                touched_before = True
        for sink in sinks[:-1]:
            if any(self.position[user] < end for user in sink.node.users):
                raise LeftAlone("the loop's accumulator is read between its experts", sink.node)
        return not touched_before and accumulator.target in _ZEROS

    def _check_memory(self, sinks: list[Sink], absorbed: set[fx.Node]) -> None:
        """The grouped form reads its operands where the loop ends, so nothing may write them before."""
        mine = {sink.node for sink in sinks}
        operands = {arg for node in absorbed for arg in (node, *node.all_input_nodes)}
        accumulator = storage_of(value_of(sinks[0].accumulator))
        read = {storage for node in operands for storage in storages_of(value_of(node))} - {accumulator}
        begin = min(self.position[node] for node in absorbed)
        for node in self.nodes[begin : self.position[sinks[-1].node]]:
            effects = self.effects[node]
            if effects.kind is Kind.BARRIER and node not in absorbed:
                raise LeftAlone(f"'{node.name}' runs between the experts, and what it does is not known", node)
            if effects.writes & read and node not in mine:
                raise LeftAlone("an operand of the loop is written while the loop runs", node)


def is_trivial_check(node: fx.Node, row_sets: list[RowSet]) -> bool:
    """An assertion that a row count lies between zero and the number of slots, which it does by its nature."""
    check: Any = node.args[0] if node.args else None
    if not isinstance(check, fx.Node) or len(check.args) != 2:
        return False
    size, bound = check.args
    if not isinstance(size, fx.Node) or not isinstance(value_of(size), torch.SymInt):
        return False
    counts = [value_of(rows.where)[0].shape[0] for rows in row_sets]
    if not any(same_size(value_of(size), n) for n in counts):
        return False
    limit = value_of(bound) if isinstance(bound, fx.Node) else bound
    if check.target in (operator.ge, torch.ge):
        return isinstance(limit, int) and limit <= 0
    if check.target is operator.le:
        selected = value_of(row_sets[0].mask.selected)
        return isinstance(limit, int | torch.SymInt) and same_size(limit, selected.numel())
    return False


def _is_float(node: fx.Node) -> bool:
    return any(tensor.is_floating_point() for tensor in tensors_in(value_of(node)))
