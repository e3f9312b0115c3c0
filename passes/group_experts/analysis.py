"""Finds loops over experts in one graph, and proves of each that it is one grouped computation. Changes nothing."""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from glue_compiler.capture.regions import REGIONS
from glue_compiler.fx.effects import Kind
from glue_compiler.fx.operators import Operators, Value
from glue_compiler.fx.values import (
    expression,
    requires_grad,
    source_line,
    storage_of,
    storages_of,
    value_of,
)
from glue_compiler.graph_pass import Skip
from glue_compiler.passes.group_experts.copies import Fill, fill_of
from glue_compiler.passes.group_experts.expert_bodies import BodyMatcher
from glue_compiler.passes.group_experts.left_alone import LeftAlone
from glue_compiler.passes.group_experts.planner import LoopPlanner, Plan, skip_at
from glue_compiler.passes.group_experts.row_sets import (
    IDS,
    SLOT,
    RowSet,
    RowSets,
    as_many_rows,
    names_a_token_once,
    same_size,
)
from glue_compiler.passes.group_experts.selected_experts import are_distinct
from glue_compiler.passes.group_experts.sinks import Sink, chain_starts, find_sink
from glue_compiler.passes.group_experts.steps import Step


@dataclass(frozen=True)
class ExpertLoop:
    """A loop that is proved to be one grouped computation.

    ``steps`` compute the body for all rows, in order; the result is the one of the last step.
    """

    selected: fx.Node
    routing: Value
    """What ``selected`` holds."""
    num_experts: int
    top_k: int
    first_expert: int
    """The loop is over the experts from this one on, ``num_experts`` of them."""
    sinks: tuple[Sink, ...]
    accumulator: fx.Node
    """What the first sink adds to."""
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
    def in_place(self) -> bool:
        return self.sinks[0].in_place

    @property
    def results(self) -> tuple[fx.Node, ...]:
        return tuple(sink.added for sink in self.sinks)


@dataclass
class ExpertPlan(Plan[ExpertLoop]):
    """``alone``: experts that cannot be grouped with the others of their loop, each a loop of its own.

    That is enough to show that one without rows does nothing.
    """

    alone: list[ExpertLoop] = field(default_factory=list)


def plan_grouping(gm: fx.GraphModule, operators: Operators) -> ExpertPlan:
    """Plan for one graph (bodies of its higher-order operators are graphs of their own)."""
    sets = RowSets(operators)
    if not any(sets.row_set(node) for node in gm.graph.nodes):
        return ExpertPlan()
    return _Planner(gm, sets).run()


class _Planner(LoopPlanner):
    def __init__(self, gm: fx.GraphModule, sets: RowSets) -> None:
        super().__init__(gm, sets.operators)
        self.sets = sets
        self.sink_nodes: set[fx.Node] = set()
        self.starts: dict[fx.Node, fx.Node] = {}

    def run(self) -> ExpertPlan:
        plan = ExpertPlan()
        sinks = [sink for node in self.nodes if (sink := find_sink(node, self.sets))]
        self.sink_nodes = {sink.node for sink in sinks}
        self.starts = chain_starts(sinks)
        by_accumulator: dict[tuple[int, Any], list[Sink]] = defaultdict(list)
        for sink in sinks:
            key = storage_of(value_of(self.starts[sink.node]))
            by_accumulator[key, self._number(sink.rows.mask.selected)].append(sink)
        for same in by_accumulator.values():
            whole = self._loop_or_skip(same)
            families = self._families(same) if isinstance(whole, Skip) else []
            parts = [self._loop_or_skip(family) for family in families] if len(families) > 1 else [whole]
            # Some experts grouped beside a loop over the others would save no sync.
            loops = [part for part in parts if isinstance(part, ExpertLoop)]
            if len(loops) == len(parts):
                plan.loops += loops
            elif isinstance(whole, Skip):
                plan.skips.append(whole)
                if any(REGIONS in sink.node.meta for sink in same):
                    alone = [self._loop_or_skip([sink], alone=True) for sink in same]
                    plan.alone += [each for each in alone if isinstance(each, ExpertLoop)]
        claimed = {sink.rows.root for sink in sinks}
        left = [rows for node in self.nodes if node not in claimed and (rows := self.sets.row_set(node))]
        experts = {(self._number(rows.mask.selected), rows.expert) for rows in left}
        for rows in left:
            number = self._number(rows.mask.selected)
            # A comparison with one number alone is no loop over experts.
            if sum(selected == number for selected, _ in experts) > 1:
                reason = "the rows of an expert are not put back with index_add or an assignment on their token indices"
                plan.skips.append(Skip(reason, rows.root.name, source_line(rows.root)))
        return plan

    def _families(self, sinks: list[Sink]) -> list[list[Sink]]:
        """Runs of experts whose rows go through the same operators: some models have experts that compute nothing."""
        families: list[list[Sink]] = []
        bodies: list[list[Any]] = []
        for sink in sinks:
            body = self._operators(sink)
            if bodies and body == bodies[-1]:
                families[-1].append(sink)
            else:
                families.append([sink])
                bodies.append(body)
        return families

    def _operators(self, sink: Sink) -> list[Any]:
        """What is called between a row set and its sink, in graph order."""
        inside: set[fx.Node] = set()
        waiting = [sink.added]
        while waiting:
            node = waiting.pop()
            if (
                node not in inside
                and node is not sink.rows.root
                and self.position[node] > self.position[sink.rows.root]
            ):
                inside.add(node)
                waiting.extend(node.all_input_nodes)
        return [(node.op, node.target) for node in sorted(inside) if node.op.startswith("call_")]

    def _number(self, value: Value) -> Any:
        return self.operators.number(value)

    # -- one loop

    def _loop_or_skip(self, sinks: list[Sink], alone: bool = False) -> ExpertLoop | Skip:
        try:
            return self._loop(sinks, alone)
        except LeftAlone as left:
            return skip_at(left, sinks[0].node)

    def _loop(self, sinks: list[Sink], alone: bool) -> ExpertLoop:
        row_sets = [sink.rows for sink in sinks]
        mask = row_sets[0].mask
        experts = [rows.expert for rows in row_sets]
        first = min(experts)
        for node in self.sets.written:
            raise LeftAlone("a mask of experts is written while the loop runs, or before it", node)
        if first < 0 or sorted(experts) != list(range(first, first + len(experts))):
            raise LeftAlone(f"its row sets are those of the experts {experts}, not of a range of them, each once")
        if any((rows.mask.axes, rows.mask.any_slot) != (mask.axes, mask.any_slot) for rows in row_sets):
            raise LeftAlone("the experts select their rows in different ways")
        accumulator = self.starts[sinks[0].node] if sinks[0].in_place else sinks[0].accumulator
        if len({self.starts[sink.node] for sink in sinks}) != 1 or len({sink.in_place for sink in sinks}) != 1:
            raise LeftAlone("the experts add to different views of one tensor")
        if len({sink.adds for sink in sinks}) != 1:
            raise LeftAlone("some experts add their rows and some assign them")
        last = sinks[-1].node
        selected_node = self.operators.operand(mask.selected, last)
        if selected_node is None:
            raise LeftAlone("the selected experts are written while the loop runs")
        selected = value_of(selected_node)
        if selected.dtype not in IDS or selected.device != value_of(sinks[0].added).device:
            raise LeftAlone("the selected experts are no int32 or int64 tensor on the device of the rows")
        top_k = selected.shape[1] if selected.dim() == 2 else 1
        if not isinstance(top_k, int):
            raise LeftAlone("the number of slots of a token is not known when the graph is captured")
        self._check_row_sets(sinks, top_k)
        in_order = sorted(sinks, key=lambda sink: sink.rows.expert)
        row_sets = [sink.rows for sink in in_order]
        all_routed = mask.classes == len(experts)
        if len(experts) == 1 and not all_routed and not alone:
            # One expert of many: grouping would compute its body for every row of the batch.
            raise LeftAlone("there is one expert, and not every slot is known to select it")
        matcher = BodyMatcher(self.gm, row_sets, self.sets, self.effects, last, self.sink_nodes, top_k)
        steps = matcher.match([sink.added for sink in in_order])
        self._check_accumulator_shape(sinks[0], steps[-1], selected)
        if not all_routed and not alone:
            self._check_sentinels(steps)
        absorbed = self._absorbed(matcher, sinks, row_sets)
        starts_at_zero = self._check_accumulator_uses(sinks, accumulator)
        own = {node for sink in sinks for node in (sink.node, *sink.parts)}
        accumulators = storages_of([value_of(node) for node in (accumulator, *(sink.node for sink in sinks))])
        self.check_unwritten(absorbed, last, matcher.body | own, accumulators)
        self.check_one_mode([last], matcher.body | matcher.peeled)
        return ExpertLoop(
            selected=selected_node,
            routing=mask.selected,
            num_experts=len(experts),
            top_k=top_k,
            first_expert=first,
            sinks=tuple(sinks),
            accumulator=accumulator,
            steps=steps,
            starts_at_zero=starts_at_zero,
            absorbed=frozenset(absorbed),
            autocast=self.modes.autocast_of(last),
        )

    def _check_row_sets(self, sinks: list[Sink], top_k: int) -> None:
        """A token that is twice in a row set is added once by ``out[rows] += ...``, and once by a mask of tokens."""
        for sink in sinks:
            once = names_a_token_once(sink.rows, self.operators)
            if sink.rows.mask.any_slot and not are_distinct(self.operators, sink.rows.mask.selected):
                raise LeftAlone("a token may select an expert twice; that topk selected them would show it cannot")
            if sink.parts and not once:
                raise LeftAlone("an assignment adds a token once that may select an expert twice", sink.node)
            if not sink.adds and top_k != 1:
                raise LeftAlone("one expert's assignment may overwrite what another has assigned", sink.node)

    def _check_accumulator_shape(self, sink: Sink, result: Step, selected: torch.Tensor) -> None:
        accumulator = value_of(sink.accumulator)
        shape, width = accumulator.shape, result.tail
        if len(shape) != 2 or len(width) != 1 or shape[1] != width[0] or not isinstance(width[0], int):
            raise LeftAlone("the accumulator is not [tokens, width]", sink.node)
        if not accumulator.is_floating_point():
            raise LeftAlone("the accumulator is not floating point", sink.node)
        if not as_many_rows(shape[0], selected.shape[0]):
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
        inside = set(matcher.body) | sink_nodes | {part for sink in sinks for part in sink.parts}
        masks = {node for rows in row_sets for node in rows.mask.nodes}
        for rows in row_sets:
            inside.add(rows.root)
            inside.update(user for user in rows.root.users if self._indexes(user))
        droppable: set[fx.Node] = set()
        self.check_users(
            inside - sink_nodes - masks,
            lambda user: user in inside or self._is_droppable(user, row_sets, inside, droppable),
        )
        return inside | droppable | masks | matcher.peeled

    def _indexes(self, node: fx.Node) -> bool:
        return node.op.startswith("call_") and self.sets.index(self.operators.value(node)) is not None

    def _is_droppable(
        self, node: fx.Node, row_sets: list[RowSet], inside: set[fx.Node], droppable: set[fx.Node]
    ) -> bool:
        """Something about the number of rows that nobody needs: a size, a check that cannot fail, a pure dead end."""
        if node in droppable:
            return True
        effects = self.effects[node]
        if effects.kind is Kind.ASSERT:
            if not is_trivial_check(node, row_sets, self.operators):
                return False
        elif effects.kind is not Kind.PURE or effects.writes:
            return False
        # A size that a reshape of the body takes: the grouped form has sizes of its own.
        if not all(user in inside or self._is_droppable(user, row_sets, inside, droppable) for user in node.users):
            return False
        droppable.add(node)
        return True

    def _check_accumulator_uses(self, sinks: list[Sink], accumulator: fx.Node) -> bool:
        """Nobody looks at the accumulator while the loop runs; returns whether it starts from zeros."""
        storage = storage_of(value_of(accumulator))
        mine = {node for sink in sinks for node in (sink.node, *sink.parts)}
        begin, end = self.position[sinks[0].node], self.position[sinks[-1].node]
        touched_before = False
        for node in self.nodes[:end]:
            if node in mine or node is accumulator:
                continue
            uses = storages_of([value_of(node), *(value_of(arg) for arg in node.all_input_nodes)])
            if storage in uses and (sinks[0].in_place or storage in self.effects[node].writes):
                if self.position[node] > begin:
                    raise LeftAlone("the loop's accumulator is read or written between its experts", node)
                touched_before = True
        for sink in sinks[:-1]:
            # In place, what follows the loop may use any of them: they are one tensor.
            if any(user not in mine and (self.position[user] < end or not sink.in_place) for user in sink.node.users):
                raise LeftAlone("the loop's accumulator is read between its experts", sink.node)
        filled = fill_of(self.operators, self.operators.value(accumulator))
        # Zeros that get a gradient of their own are no leaf to write in place, and cannot go out of place.
        fresh = not touched_before and (sinks[0].in_place or not requires_grad(value_of(accumulator)))
        made_for_it = fresh and filled is Fill.ZEROS
        if not sinks[0].adds and not made_for_it and not (fresh and filled is Fill.EMPTY):
            raise LeftAlone("tokens of no expert keep what was in the tensor that is assigned to", sinks[0].node)
        return made_for_it or not sinks[0].adds


def is_trivial_check(node: fx.Node, row_sets: list[RowSet], operators: Operators) -> bool:
    """An assertion that a row count lies between zero and the number of slots, which it does by its nature."""
    check: Any = node.args[0] if node.args else None
    if not isinstance(check, fx.Node) or len(check.args) != 2:
        return False
    size, bound = check.args
    if not isinstance(size, fx.Node) or not isinstance(value_of(size), torch.SymInt):
        return False
    counts = [rows.count for rows in row_sets]
    if not any(expression(value_of(size)) == n for n in counts):
        return False
    limit = value_of(bound) if isinstance(bound, fx.Node) else bound
    if check.target in (operator.ge, torch.ge):
        return isinstance(limit, int) and limit <= 0
    if check.target is operator.le:
        mask = row_sets[0].mask
        sizes = operators.meta(mask.selected).shape
        most = sizes[0] if SLOT not in mask.axes else math.prod(sizes)
        return isinstance(limit, int | torch.SymInt) and same_size(limit, most)
    return False
