"""Writes loops over experts that were proved to be one computation as one.

The new form is drawn up beside the loop, which stays until all of the graph is decided.
"""

from __future__ import annotations

import dataclasses
import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

import glue_compiler.ops  # noqa: F401  registers torch.ops.glue
from glue_compiler.capture.regions import HITS, NonEmptyBranch, SpeculativeRegion
from glue_compiler.compat import equal_sizes
from glue_compiler.fx.effects import EffectAnalysis, Kind
from glue_compiler.fx.node_maker import NodeMaker
from glue_compiler.fx.operators import Operators
from glue_compiler.fx.reachable import reachable
from glue_compiler.fx.values import expression, expressions, makes_tensor, requires_grad, value_of
from glue_compiler.passes.group_experts.checks import cannot_fail
from glue_compiler.passes.group_experts.grouped_body import GroupedBody, after, saved_weights
from glue_compiler.passes.group_experts.plan import (
    Combination,
    Concatenation,
    GroupedLoop,
    LeftAlone,
    RoutedRows,
    RowIndices,
    SortedRows,
)
from glue_compiler.passes.group_experts.row_sets import SLOT, TOKEN, RowSet

_glue = torch.ops.glue
aten = torch.ops.aten


@dataclass(frozen=True)
class Draft:
    """Nodes that nothing uses yet. ``put_in`` makes the graph use them, in place of what they stand for."""

    loop: GroupedLoop
    graph: fx.Graph
    nodes: tuple[fx.Node, ...]
    replace: Callable[[], None]

    def put_in(self) -> None:
        self.replace()
        for node in reversed(self.graph.nodes):
            if node in self.loop.absorbed and not node.users:
                self.graph.erase_node(node)

    def erase(self) -> None:
        for node in reversed(self.nodes):
            self.graph.erase_node(node)


class LoopWriter:
    """Writes the loops of one graph. Loops over the same counts share where each expert's rows end."""

    def __init__(self, gm: fx.GraphModule, operators: Operators) -> None:
        self.gm = gm
        self.graph = gm.graph
        self.operators = operators
        self.make = NodeMaker(operators.analysis.fake_mode)
        self.offsets: dict[tuple[fx.Node, int], fx.Node] = {}

    def draft(self, loop: GroupedLoop) -> Draft:
        """Raises LeftAlone, and leaves the graph as it was, if the loop cannot be written.

        A proof reads what operators do to rows, and not every size and dtype of what they give for all rows: that is
        seen here, where each new node is run on fake tensors.
        """
        before, offsets = set(self.graph.nodes), dict(self.offsets)
        has_gradient = any(requires_grad(value_of(node)) for node in (*loop.end.results, loop.place))
        mode = dataclasses.replace(self.operators.mode(loop.place), grad=has_gradient)
        try:
            with self.make.before(loop.place, mode, loop.place):
                replace = self._written(loop)
        except Exception as failure:
            self.offsets = offsets
            for node in reversed([node for node in self.graph.nodes if node not in before]):
                self.graph.erase_node(node)
            if isinstance(failure, LeftAlone):
                raise
            raise LeftAlone(f"its grouped form cannot be written ({type(failure).__name__}: {failure})") from failure
        return Draft(loop, self.graph, tuple(node for node in self.graph.nodes if node not in before), replace)

    def _written(self, loop: GroupedLoop) -> Callable[[], None]:
        """Returns what makes the graph use what was written."""
        match loop.partition, loop.end:
            case RoutedRows() as rows, Combination() as end:
                return self._combined(loop, rows, end)
            case SortedRows() as rows, Concatenation() as end:
                return self._concatenated(loop, rows, end)
            case RoutedRows() as rows, RowIndices() as end:
                return self._indexed(rows, end)
        raise TypeError(f"{loop} has an end that its partition does not have")

    # -- rows that are put back at their tokens

    def _combined(self, loop: GroupedLoop, rows: RoutedRows, end: Combination) -> Callable[[], None]:
        order, inverse, _, offsets = self._sorted(rows, range(4))
        body = GroupedBody(self.make, self.operators, loop, offsets, order, inverse)
        computed, scale = body.compute(end.summed.step), None
        if end.weights is not None:
            scale = body.weights_by_slot(end.weights)
            scale = saved_weights(self.make, self.operators, scale, loop.place) if self.make.mode.grad else scale
        # The sum over slots is taken in fp32 and rounded once, which the loop did after each expert.
        arguments = (computed, order, inverse, offsets, rows.top_k, scale, value_of(end.accumulator).dtype)
        combined = self.make.call(_glue.expert_combine.default, *arguments)
        replaces = end.starts_at_zero and _is_alike(
            value_of(combined), value_of(end.accumulator if end.in_place else end.place)
        )
        if not replaces and not end.adds:
            raise LeftAlone("the tensor that is assigned to has another layout than what would replace it")
        return lambda: self._put_back(end, combined, replaces)

    def _put_back(self, end: Combination, combined: fx.Node, replaces: bool) -> None:
        accumulator, result = end.accumulator, combined
        if not replaces:
            with self.make.before(end.place, self.operators.mode(end.place), end.place):
                value = value_of(accumulator if end.in_place else end.place)
                result = self.make.known(value, "add_" if end.in_place else "add", accumulator, combined)
        for sink in reversed(end.sinks):
            is_result = not end.in_place or sink.node is end.place
            sink.node.replace_all_uses_with(result if is_result else accumulator)
            self.graph.erase_node(sink.node)
        if replaces and end.in_place:
            accumulator.replace_all_uses_with(result)
            self.graph.erase_node(accumulator)

    # -- rows that stay in order

    def _concatenated(self, loop: GroupedLoop, rows: SortedRows, end: Concatenation) -> Callable[[], None]:
        offsets = self._offsets(rows)
        if rows.must_check:
            self._check_counts(rows)
        result = GroupedBody(self.make, self.operators, loop, offsets).compute(len(loop.steps) - 1)
        wanted = value_of(end.whole)
        if value_of(result).dtype != wanted.dtype:
            result = self.make.method("to", result, wanted.dtype)
        got = value_of(result)
        if (got.dim(), *map(expression, got.stride())) != (wanted.dim(), *map(expression, wanted.stride())):
            raise LeftAlone("the rows of all experts have another layout than what they would replace")
        shape_env = self.operators.analysis.shape_env
        if shape_env is not None:
            equal_sizes.assume_equal(shape_env, *(expression(value_of(n).shape[0]) for n in (end.whole, rows.source)))

        def replace() -> None:
            for write in end.writes:
                self.graph.erase_node(write.node)
            end.whole.replace_all_uses_with(result)
            self.graph.erase_node(end.whole)

        return replace

    def _offsets(self, rows: SortedRows) -> fx.Node:
        """Where each expert's rows end; written as early as can be, for the loops that follow."""
        key = (rows.counts, rows.num_experts)
        if key not in self.offsets:
            with self.make.before(after(rows.counts), self.make.mode, rows.counts):
                counts = rows.counts
                if value_of(counts).shape[0] != rows.num_experts:
                    counts = self.make.method("narrow", counts, 0, 0, rows.num_experts)
                self.offsets[key] = self.make.call(torch.cumsum, counts, 0, dtype=torch.int32)
        return self.offsets[key]

    # -- bodies that stay, and find the indices of their rows

    def _indexed(self, rows: RoutedRows, end: RowIndices) -> Callable[[], None]:
        order, counts = self._sorted(rows, (0, 2), end.axes[0] == SLOT)
        columns = self._columns(order, rows, end.axes)
        sizes = self._sizes(counts, columns[0], end.rows)
        found = [self._pieces(column, sizes) for column in columns]

        def replace() -> None:
            for row_set, *indices in zip(end.rows, *found, strict=True):
                self._replace_indices(row_set.root, indices)

        return replace

    def _replace_indices(self, root: fx.Node, columns: list[fx.Node]) -> None:
        if makes_tensor(root):
            with self.graph.inserting_before(root):
                pairs = self.graph.call_function(torch.stack, (columns, 1))
            pairs.meta.update({key: value for key, value in root.meta.items() if key != "unbacked_bindings"})
            root.replace_all_uses_with(pairs)
        else:
            for user in list(root.users):
                user.replace_all_uses_with(columns[user.args[1]])  # type: ignore[index]
                self.graph.erase_node(user)
        self.graph.erase_node(root)

    def _sorted(self, rows: RoutedRows, items: Iterable[int], *k_major: bool) -> list[fx.Node]:
        """Of ``items`` order of the slots, its inverse, each expert's number of rows, and where its rows end."""
        selected = rows.selected
        if rows.first_expert:
            selected = self.make.call(torch.sub, selected, rows.first_expert)
        sort = self.make.call(_glue.expert_sort.default, selected, rows.num_experts, *k_major)
        return [self.make.call(operator.getitem, sort, i) for i in items]

    def _check_counts(self, rows: SortedRows) -> None:
        """What ``split``, or the assignment of all rows, checked on the host is checked on the device."""
        counts = self.make.proxy(rows.counts)
        is_right = (counts.sum() == self.make.size(rows.source, 0)).logical_and((counts >= 0).all())
        message = "the experts' numbers of rows must not be negative, and sum to the number of rows"
        self.make.call(aten._assert_async.msg, is_right.node, message)

    def _columns(self, order: fx.Node, rows: RoutedRows, axes: Sequence[str]) -> list[fx.Node]:
        """The sorted rows as indices, one vector for each axis."""
        slots = self.make.method("to", order, torch.int64)
        if len(axes) == 1:
            return [slots]
        top_k = self.make.size(rows.selected, 1)
        by_axis: dict[str, Callable[..., Any]] = {SLOT: torch.remainder, TOKEN: torch.floor_divide}
        return [self.make.call(by_axis[axis], slots, top_k) for axis in axes]

    def _sizes(self, counts: fx.Node, column: fx.Node, row_sets: Sequence[RowSet]) -> list[fx.Node]:
        """The number of rows of each expert, and of none, as numbers: read from the device once."""
        if value_of(counts).device.type != "cpu":
            counts = self.make.method("to", counts, "cpu")
        sizes = []
        total = self.make.size(column, 0)
        for expert, rows in enumerate(row_sets):
            # The row sets' own number: all that is computed from them is on record with it.
            value = value_of(rows.root)
            number = (value[0] if isinstance(value, tuple | list) else value).shape[0]
            size = self.make.known(number, "item", self.make.call(operator.getitem, counts, expert))
            size.meta["unbacked_bindings"] = {number.node.expr: ()}
            sizes.append(size)
        sizes.append(self.make.call(operator.sub, total, self.make.call(torch.sym_sum, list(sizes))))
        for size in sizes:
            # Says to tracing that a number is a size, as Dynamo does.
            is_size = self.make.call(operator.ge, size, 0)
            self.make.call(aten._assert_scalar.default, is_size, "an expert has a number of rows")
        return sizes

    def _pieces(self, column: fx.Node, sizes: list[fx.Node]) -> list[fx.Node]:
        """Of each expert; the rows of none, which are the last, are left out."""
        pieces = self.make.method("split", column, sizes)
        return [self.make.call(operator.getitem, pieces, expert) for expert in range(len(sizes) - 1)]


def _is_alike(first: torch.Tensor, second: torch.Tensor) -> bool:
    described = [
        (t.dtype, t.device, t.dim(), expression(t.shape[-1]), expressions(t.stride())) for t in (first, second)
    ]
    return described[0] == described[1]


# -- what is left over


def erase_dead_counts(gm: fx.GraphModule, proved: Collection[SpeculativeRegion], analysis: EffectAnalysis) -> None:
    """Erase what only the loops over hit experts and the branches used, with what it was counted from."""
    present = set(gm.graph.nodes)
    for region in proved:
        if isinstance(region, NonEmptyBranch) and region.condition:
            for node in (region.condition.node, region.condition.number):
                if node in present:
                    _erase_unused(gm, node, analysis)
                    present = set(gm.graph.nodes)
    for hits in [node for node in gm.graph.nodes if node.meta.get(HITS) in proved]:
        # Sizes of the nonzero, and the checks that it has between no and all rows.
        made = reachable([hits], lambda node: node.users)
        if all(node is hits or _is_check_of_size(node, hits) for node in made):
            counts = hits.args[0]
            for node in sorted(made, reverse=True):
                gm.graph.erase_node(node)
            _erase_unused(gm, counts, analysis)


def _is_check_of_size(node: fx.Node, hits: fx.Node) -> bool:
    """The size of a nonzero, or a check that it lies between zero and the number of elements."""
    if node.target is aten._assert_scalar.default:
        elements = expression(value_of(hits.args[0]).numel())  # type: ignore[arg-type]
        return cannot_fail(node, [expression(value_of(hits).shape[0])], elements)
    return node.target in (operator.ge, operator.le, aten.sym_size.int)


def _erase_unused(gm: fx.GraphModule, node: Any, analysis: EffectAnalysis) -> None:
    """The comparison, the sum and the mask behind a number of rows, or a vector of them."""
    while isinstance(node, fx.Node) and not node.users and analysis.of(gm, node).kind is Kind.PURE:
        source = node.args[0] if node.args else None
        gm.graph.erase_node(node)
        node = source


def erase_numbers(gm: fx.GraphModule, loops: Iterable[GroupedLoop]) -> None:
    """All numbers read from one vector of counts, unless something else needs one of them.

    Then the checks stay too: tracing needs to know that the numbers are sizes.
    """
    by_counts: dict[fx.Node, set[fx.Node]] = defaultdict(set)
    for loop in loops:
        if isinstance(loop.partition, SortedRows):
            by_counts[loop.partition.counts] |= loop.numbers
    present = set(gm.graph.nodes)
    for numbers in by_counts.values():
        left = numbers & present
        if all(user in left for node in left for user in node.users):
            for node in sorted(left, reverse=True):
                gm.graph.erase_node(node)
