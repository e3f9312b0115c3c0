"""Finds loops over experts that select their rows from routing, and proves of each that it is one computation.

Each expert's rows are gathered, computed, and put back at their tokens. Changes nothing.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torch import fx

from glue_compiler.capture.regions import REGIONS
from glue_compiler.fx.effects import Kind
from glue_compiler.fx.reachable import reachable
from glue_compiler.fx.values import is_call, requires_grad, storage_of, storages_of, tensors_in, value_of, values_of
from glue_compiler.passes.group_experts.checks import ReadGraph, cannot_fail
from glue_compiler.passes.group_experts.copies import Fill, fill_of
from glue_compiler.passes.group_experts.ends import ENDS, Sink, chain_starts, find_sink
from glue_compiler.passes.group_experts.expert_bodies import BodyMatcher
from glue_compiler.passes.group_experts.plan import Combination, GroupedLoop, LeftAlone, Plan, RoutedRows
from glue_compiler.passes.group_experts.row_sets import (
    IDS,
    SLOT,
    RowSet,
    are_distinct,
    as_many_rows,
    names_a_token_once,
)
from glue_compiler.passes.group_experts.steps import Step, weighted_sum
from glue_compiler.pipeline.results import Skip


def read_routed_loops(graph: ReadGraph) -> Plan:
    if any(graph.sets.row_set(node) for node in graph.nodes):
        return _Reader(graph).run()
    return Plan(skips=_unread(graph))


class _Reader:
    def __init__(self, graph: ReadGraph) -> None:
        self.graph = graph
        self.operators = graph.operators
        self.sets = graph.sets
        self.position = graph.position
        self.sinks = [sink for node in graph.nodes if (sink := find_sink(node, graph.sets))]
        self.sink_nodes = {sink.node for sink in self.sinks}
        self.starts = chain_starts(self.sinks)

    def run(self) -> Plan:
        plan = Plan()
        by_accumulator: dict[tuple[int, Any], list[Sink]] = defaultdict(list)
        for sink in self.sinks:
            key = storage_of(value_of(self.starts[sink.node]))
            by_accumulator[key, self.operators.number(sink.rows.mask.selected)].append(sink)
        for same in by_accumulator.values():
            whole = self._loop_or_skip(same)
            families = self._families(same) if isinstance(whole, Skip) else []
            parts = [self._loop_or_skip(family) for family in families] if len(families) > 1 else [whole]
            # Some experts grouped beside a loop over the others would save no sync.
            loops = [part for part in parts if isinstance(part, GroupedLoop)]
            if len(loops) == len(parts):
                plan.loops += loops
            elif isinstance(whole, Skip):
                plan.skips.append(whole)
                if any(REGIONS in sink.node.meta for sink in same):
                    alone = [self._loop_or_skip([sink], alone=True) for sink in same]
                    plan.alone += [each for each in alone if isinstance(each, GroupedLoop)]
        plan.skips += _unread(self.graph)
        claimed = {sink.rows.root for sink in self.sinks}
        left = [rows for node in self.graph.nodes if node not in claimed and (rows := self.sets.row_set(node))]
        experts = {(self.operators.number(rows.mask.selected), rows.expert) for rows in left}
        for rows in left:
            number = self.operators.number(rows.mask.selected)
            # A comparison with one number alone is no loop over experts.
            if sum(selected == number for selected, _ in experts) > 1:
                reason = "the rows of an expert are not put back with index_add or an assignment on their token indices"
                plan.skips.append(Skip.at(rows.root, reason))
        return plan

    def _families(self, sinks: Sequence[Sink]) -> list[list[Sink]]:
        """Runs of experts whose rows go through the same operators: some models have experts that compute nothing."""
        return [list(family) for _, family in itertools.groupby(sinks, self._operators)]

    def _operators(self, sink: Sink) -> list[Any]:
        """What is called between a row set and its sink, in graph order."""
        first = self.position[sink.rows.root]

        def operands(node: fx.Node) -> list[fx.Node]:
            return [arg for arg in node.all_input_nodes if self.position[arg] > first]

        inside = reachable([sink.added], operands)
        return [(node.op, node.target) for node in sorted(inside) if is_call(node)]

    # -- one loop

    def _loop_or_skip(self, sinks: list[Sink], alone: bool = False) -> GroupedLoop | Skip:
        try:
            return self._loop(sinks, alone)
        except LeftAlone as left:
            return left.skip_at(sinks[0].node)

    def _loop(self, sinks: list[Sink], alone: bool) -> GroupedLoop:
        self._check_alike(sinks)
        accumulator = self.starts[sinks[0].node] if sinks[0].in_place else sinks[0].accumulator
        last = sinks[-1].node
        partition = self._routed(sinks)
        self._check_tokens(sinks, partition.top_k)
        in_order = sorted(sinks, key=lambda sink: sink.rows.expert)
        row_sets = [sink.rows for sink in in_order]
        all_routed = row_sets[0].mask.classes == len(sinks)
        if len(sinks) == 1 and not all_routed and not alone:
            # One expert of many: grouping would compute its body for every row of the batch.
            raise LeftAlone("there is one expert, and not every slot is known to select it")
        matcher = BodyMatcher(self.graph, row_sets, last, self.sink_nodes)
        steps = matcher.match([sink.added for sink in in_order])
        self._check_accumulator_shape(sinks[0], steps[-1], partition)
        if not all_routed and not alone:
            self._check_sentinels(steps)
        absorbed = self._absorbed(matcher, sinks, row_sets)
        starts_at_zero = self._check_accumulator_uses(sinks, accumulator)
        writers = matcher.body.union(*(sink.nodes for sink in sinks))
        accumulators = storages_of(values_of((accumulator, *(sink.node for sink in sinks))))
        self.graph.check_unwritten(absorbed, last, writers, accumulators)
        self.graph.check_one_mode([last], matcher.body | matcher.peeled)
        summed, weights = weighted_sum(steps, value_of(accumulator).dtype, self.operators)
        end = Combination(tuple(sinks), accumulator, starts_at_zero, summed, weights)
        return GroupedLoop(partition, steps, end, frozenset(absorbed))

    def _check_alike(self, sinks: list[Sink]) -> None:
        """The experts are a range, and select and put back their rows in one way."""
        experts, mask = [sink.rows.expert for sink in sinks], sinks[0].rows.mask
        first = min(experts)
        if self.sets.written:
            written = min(self.sets.written)
            raise LeftAlone("a mask of experts is written while the loop runs, or before it", written)
        if first < 0 or sorted(experts) != list(range(first, first + len(experts))):
            raise LeftAlone(f"its row sets are those of the experts {experts}, not of a range of them, each once")
        masks = [sink.rows.mask for sink in sinks]
        if any((each.axes, each.any_slot) != (mask.axes, mask.any_slot) for each in masks):
            raise LeftAlone("the experts select their rows in different ways")
        if len({self.starts[sink.node] for sink in sinks}) != 1 or len({sink.in_place for sink in sinks}) != 1:
            raise LeftAlone("the experts add to different views of one tensor")
        if len({sink.adds for sink in sinks}) != 1:
            raise LeftAlone("some experts add their rows and some assign them")

    def _routed(self, sinks: list[Sink]) -> RoutedRows:
        routing = sinks[0].rows.mask.selected
        selected = self.operators.operand(routing, sinks[-1].node)
        if selected is None:
            raise LeftAlone("the selected experts are written while the loop runs")
        value = value_of(selected)
        if value.dtype not in IDS or value.device != value_of(sinks[0].added).device:
            raise LeftAlone("the selected experts are no int32 or int64 tensor on the device of the rows")
        rows = RoutedRows(selected, routing, min(sink.rows.expert for sink in sinks), len(sinks))
        if not isinstance(rows.top_k, int):
            raise LeftAlone("the number of slots of a token is not known when the graph is captured")
        return rows

    def _check_tokens(self, sinks: list[Sink], top_k: int) -> None:
        """A token that is twice in a row set is added once by ``out[rows] += ...``, and once by a mask of tokens."""
        for sink in sinks:
            once = names_a_token_once(sink.rows, self.operators)
            if sink.rows.mask.any_slot and not are_distinct(self.operators, sink.rows.mask.selected):
                raise LeftAlone("a token may select an expert twice; that topk selected them would show it cannot")
            if sink.parts and not once:
                raise LeftAlone("an assignment adds a token once that may select an expert twice", sink.node)
            if not sink.adds and top_k != 1:
                raise LeftAlone("one expert's assignment may overwrite what another has assigned", sink.node)

    def _check_accumulator_shape(self, sink: Sink, result: Step, partition: RoutedRows) -> None:
        accumulator = value_of(sink.accumulator)
        shape, width = accumulator.shape, result.tail
        if len(shape) != 2 or len(width) != 1 or shape[1] != width[0] or not isinstance(width[0], int):
            raise LeftAlone("the accumulator is not [tokens, width]", sink.node)
        if not accumulator.is_floating_point():
            raise LeftAlone("the accumulator is not floating point", sink.node)
        if not as_many_rows(shape[0], value_of(partition.selected).shape[0]):
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
        inside = matcher.body.union(*(sink.nodes for sink in sinks))
        masks = {node for rows in row_sets for node in rows.mask.nodes}
        for rows in row_sets:
            inside.add(rows.root)
            inside.update(user for user in rows.root.users if self._indexes(user))
        droppable: set[fx.Node] = set()
        self.graph.check_users(
            inside - sink_nodes - masks,
            lambda user: user in inside or self._is_droppable(user, row_sets, inside, droppable),
        )
        return inside | droppable | masks | matcher.peeled

    def _indexes(self, node: fx.Node) -> bool:
        return is_call(node) and self.sets.index(self.operators.value(node)) is not None

    def _is_droppable(
        self, node: fx.Node, row_sets: list[RowSet], inside: set[fx.Node], droppable: set[fx.Node]
    ) -> bool:
        """Something about the number of rows that nobody needs: a size, a check that cannot fail, a pure dead end."""
        if node in droppable:
            return True
        effects = self.graph.effects[node]
        if effects.kind is Kind.ASSERT:
            mask = row_sets[0].mask
            sizes = self.operators.shape(mask.selected)
            most = sizes[0] if SLOT not in mask.axes else math.prod(sizes)
            if not cannot_fail(node, [rows.count for rows in row_sets], most):
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
        mine = {node for sink in sinks for node in sink.nodes}
        begin, end = self.position[sinks[0].node], self.position[sinks[-1].node]
        touched_before = False
        for node in self.graph.nodes[:end]:
            if node in mine or node is accumulator:
                continue
            uses = storages_of(values_of((node, *node.all_input_nodes)))
            if storage in uses and (sinks[0].in_place or storage in self.graph.effects[node].writes):
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


def _unread(graph: ReadGraph) -> list[Skip]:
    """Of what looks like a loop over experts, but for its masks: rows found by several, and put back by index."""
    roots: dict[fx.Node, set[fx.Node]] = {}
    ends: set[fx.Node] = set()
    for node in graph.nodes:
        if graph.sets.is_unread(node):
            roots[node] = {node}
        elif not any(tensor.is_floating_point() for tensor in tensors_in(value_of(node))):
            roots[node] = set().union(*(roots.get(arg, ()) for arg in node.all_input_nodes))
        elif graph.operators.dispatches(node, ENDS):
            ends.update(*(roots.get(arg, ()) for arg in node.all_input_nodes))
    if len(ends) < 2:
        return []
    first = min(ends)
    reason = "the rows of an expert are selected by what is not read as a comparison of the selected experts"
    return [Skip.at(first, reason)]
