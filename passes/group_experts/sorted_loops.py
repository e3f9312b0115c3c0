"""Finds loops over pieces of rows that are sorted by expert, and proves of each that it is one computation.

The pieces are consecutive: expert ``e`` has the rows from the sum of the counts before it on, as many as its own count.
Their results stand in the same order, joined by ``cat`` or written to the same rows of a fresh tensor. Changes nothing.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import fx

from glue_compiler.compat import symbols
from glue_compiler.fx.effects import Kind
from glue_compiler.fx.operators import Call, Value
from glue_compiler.fx.reachable import reachable
from glue_compiler.fx.values import expression, storage_of, storages_of, value_of, values_of
from glue_compiler.passes.group_experts.checks import ReadGraph
from glue_compiler.passes.group_experts.copies import Fill, fill_of
from glue_compiler.passes.group_experts.counts import HostNumbers, Total, total_of
from glue_compiler.passes.group_experts.ends import joined
from glue_compiler.passes.group_experts.expert_bodies import BodyMatcher
from glue_compiler.passes.group_experts.permuted_rows import sort_of
from glue_compiler.passes.group_experts.pieces import ExpertPieces, Piece, Pieces, PieceWrite
from glue_compiler.passes.group_experts.plan import Concatenation, GroupedLoop, LeftAlone, Plan, SortedRows
from glue_compiler.passes.group_experts.steps import AllRows, Product, Step
from glue_compiler.pipeline.results import Skip

aten = torch.ops.aten


def read_sorted_loops(graph: ReadGraph) -> Plan:
    found = Pieces(graph.operators, graph.sums)
    pieces = [piece for node in graph.nodes if (piece := found.piece(node))]
    if not pieces:
        return Plan()
    writes = [write for node in graph.nodes if (write := found.write(node))]
    return _Reader(graph, pieces, writes).run()


class _Reader:
    def __init__(self, graph: ReadGraph, pieces: list[Piece], writes: list[PieceWrite]) -> None:
        self.graph = graph
        self.operators = graph.operators
        self.shape_env = graph.operators.analysis.shape_env
        self.pieces = {piece.node: piece for piece in pieces}
        self.equal_sizes: dict[Any, Any] = {}
        """Number of rows of a loop's result → that of its source, which is the same by the proof."""
        self.ends = self._ends(writes)
        self.end_nodes = {write.node for write in writes} | {end.place for end in self.ends}

    def _ends(self, writes: list[PieceWrite]) -> list[Concatenation]:
        """Every ``cat`` of rows, and every tensor that rows are written to."""
        found = [
            Concatenation(tuple(parts), node, ())
            for node in self.graph.nodes
            if (parts := joined(node, self.operators))
        ]
        into: dict[fx.Node, list[PieceWrite]] = defaultdict(list)
        for write in writes:
            into[write.into].append(write)
        found += [Concatenation(tuple(w.value for w in each), each[-1].node, tuple(each)) for each in into.values()]
        return found

    def run(self) -> Plan:
        plan = Plan()
        matched: set[fx.Node] = set()
        for end in self.ends:
            rows = [each for i, node in enumerate(end.results) if (each := self._rows(node, i)) is not None]
            if len(rows) < len(end.results):
                continue
            matched.update(node for each in rows for node in each.entries)
            try:
                plan.loops.append(self._loop(rows, end))
            except LeftAlone as left:
                plan.skips.append(left.skip_at(end.place))
                continue
            whole, source = (self._size(value_of(n).shape[0]) for n in (end.whole, rows[0].pieces[0].source))
            self.equal_sizes.setdefault(whole, source)
        left_over = {piece.source: piece for piece in self.pieces.values() if piece.node not in matched}
        for piece in left_over.values():
            if piece.split is not None or not piece.extent[0].is_constant:
                reason = "pieces of rows are not put together again in order, by cat or in a fresh tensor"
                plan.skips.append(Skip.at(piece.node, reason))
        return plan

    def _rows(self, result: fx.Node, expert: int) -> ExpertPieces | None:
        """The pieces that ``result`` is computed from; None if there are none, or of different extents."""

        def operands(node: fx.Node) -> list[fx.Node]:
            is_end = node in self.pieces or node in self.end_nodes
            return (
                node.all_input_nodes if not is_end and isinstance(value_of(node), torch.Tensor | tuple | list) else []
            )

        found = reachable([result], operands) & self.pieces.keys()
        pieces = tuple(self.pieces[node] for node in self.graph.in_order(found))
        return ExpertPieces(pieces, expert) if len({piece.extent for piece in pieces}) == 1 else None

    # -- one loop

    def _loop(self, rows: list[ExpertPieces], end: Concatenation) -> GroupedLoop:
        pieces = [piece for each in rows for piece in each.pieces]
        counted = self._counts(rows)
        counts = self.operators.node_of(counted)
        if counts is None:
            raise LeftAlone("no node holds the row counts")
        if end.writes and [write.extent for write in end.writes] != [each.extent for each in rows]:
            raise LeftAlone("an expert's result is written to other rows than it was computed from")
        if value_of(counts).device != value_of(end.results[0]).device:
            raise LeftAlone("the row counts are on another device than the rows", counts)
        all_rows = self._rows_of_sources(pieces)
        matcher = BodyMatcher(self.graph, rows, end.place, self.end_nodes)
        steps = matcher.match(end.results)
        total = self._total(counted, len(rows), all_rows)
        covers = total is not None and total.exact
        from_split = any(piece.split is not None for piece in pieces)
        must_check = not covers and (from_split or (total is not None and self._is_put_back(end.place, all_rows)))
        if not covers and not must_check:
            self._check_rows_beyond(steps, end, total)
        self._check_end(end, steps[-1], pieces, all_rows)

        numbers = HostNumbers(self.graph.sums, self.graph.effects, counts, all_rows, exact=covers or must_check)
        read = [node for piece in pieces for node in piece.numbers]
        trail = numbers.trail([*read, *(node for write in end.writes for node in write.numbers)])
        lengths = {piece.node: piece.length for piece in pieces}
        ends = {end.place, *(write.node for write in end.writes)}
        body = matcher.body | matcher.peeled | lengths.keys()
        body |= {piece.split for piece in pieces if piece.split is not None}
        inside = body | ends | numbers.dead_ends(body, lengths)
        self.graph.check_users(matcher.body | lengths.keys(), inside.__contains__)
        self.graph.check_unwritten(body, end.place, {write.node for write in end.writes})
        self._check_counts_unwritten(trail)
        self.graph.check_one_mode(ends, body)
        partition = SortedRows(
            counts,
            lengths=tuple(each.pieces[0].length for each in rows),
            source=pieces[0].source,
            must_check=must_check,
            has_rows=(covers or must_check) and symbols.lower_bound(all_rows, self.shape_env) > 0,
            numbers=frozenset(trail - {counts} | numbers.dead_ends(trail - {counts}, lengths)),
        )
        return GroupedLoop(partition, steps, end, frozenset(inside))

    def _total(self, counts: Value, experts: int, all_rows: Any) -> Total | None:
        """What the counts of the experts sum to, if it is at most all rows."""
        total = total_of(counts, self.graph.sets)
        if total is None or not bool(total.rows == all_rows):
            return None
        return Total(total.rows, total.exact and self.operators.shape(counts)[0] == experts)

    def _is_put_back(self, whole: fx.Node, all_rows: Any) -> bool:
        """``empty_like(whole)[order] = whole`` with all rows' ``order``: raises unless ``whole`` has all rows.

        ``order`` is an ``argsort``, so it holds the index of the last row.
        """
        operators = self.operators
        for user in whole.users:
            calls = operators.calls(user)
            match calls[-1] if calls else None:
                case Call(
                    aten.index_put,
                    {"self": Value() as into, "indices": (Value() as order,), "values": value, "accumulate": False},
                ) if value == operators.value(whole):
                    pass
                case _:
                    continue
            is_new = fill_of(operators, into) is not None
            same = is_new and operators.shape(into)[0] == expression(value_of(whole).shape[0])
            index = operators.meta(order)
            if (
                same
                and sort_of(operators, order) is not None
                and index.rank == 1
                and bool(self._size(index.shape[0]) == all_rows)
            ):
                return True
        return False

    def _counts(self, rows: list[ExpertPieces]) -> Value:
        """The vector whose items, in order, are the lengths of the pieces."""
        at: Any = 0
        vectors: set[Value] = set()
        for each in rows:
            start, stop = each.extent
            if start != at:
                where = (
                    "the first piece does not begin at row 0" if not each.expert else "the pieces are not consecutive"
                )
                raise LeftAlone(f"{where}, in the order in which the results are put together")
            vector, place = self.graph.sums.vector(each.pieces[0].length) or (None, None)
            if vector is None or place != each.expert or not vectors <= {vector}:
                raise LeftAlone("the numbers of rows of the experts are not the items of one vector, in order")
            vectors.add(vector)
            at = stop
        return vectors.pop()

    def _size(self, size: Any) -> Any:
        """A sympy expression, the same for sizes that are proved equal."""
        return self.equal_sizes.get(expression(size), expression(size))

    def _rows_of_sources(self, pieces: list[Piece]) -> Any:
        sizes = {self._size(value_of(piece.source).shape[0]) for piece in pieces}
        if len(sizes) != 1:
            raise LeftAlone("the pieces are those of tensors with different numbers of rows", pieces[0].node)
        return sizes.pop()

    def _check_rows_beyond(self, steps: tuple[Step, ...], end: Concatenation, total: Total | None) -> None:
        """The pieces may end before the rows do; then the rows beyond them must have no effect."""
        if total is None:
            raise LeftAlone(
                "the row counts are not known to be counts of the rows; counts that the same graph makes with one_hot "
                "and sum, or pieces made by split, would show that they are"
            )
        if not end.writes or fill_of(self.operators, self.operators.value(end.whole)) is not Fill.ZEROS:
            raise LeftAlone(
                "the pieces may end before the rows do, and the result has no zeros there; counts of topk's indices "
                "would show that they do not"
            )
        of_rows_alone = all(isinstance(step, Product | AllRows) for step in steps)
        if not of_rows_alone or not isinstance(steps[-1], Product):
            # Not-a-numbers and shared gradients could come out of rows that no expert has.
            raise LeftAlone("the pieces may end before the rows do, and the body is more than products")

    def _check_end(self, end: Concatenation, step: Step, pieces: list[Piece], all_rows: Any) -> None:
        result, whole = end.results[0], end.whole
        given, into = value_of(result), value_of(whole)
        if expression(given.shape[0]) != expression(value_of(pieces[0].node).shape[0]):
            raise LeftAlone("an expert's result does not have its rows in the first dimension", result)
        if storages_of(given) & {storage for piece in pieces for storage in storages_of(value_of(piece.source))}:
            raise LeftAlone("the body gives a view of its rows", result)
        if not given.is_floating_point():
            raise LeftAlone("an expert's result is not floating point", result)
        if not end.writes:
            return
        if fill_of(self.operators, self.operators.value(whole)) not in (Fill.ZEROS, Fill.EMPTY):
            raise LeftAlone("the results are written to a tensor that is not fresh, of zeros or empty", end.place)
        if not into.is_floating_point() or into.device != given.device:
            raise LeftAlone("the results are written to a tensor of integers, or on another device", end.place)
        if tuple(self._size(size) for size in into.shape) != (all_rows, *step.tail):
            reason = "the tensor that the results are written to has another shape than all rows' results"
            raise LeftAlone(reason, end.place)
        # Nobody has the tensor before the last is written.
        mine, storage = {write.node for write in end.writes} | {whole}, storage_of(into)
        for node in self.graph.nodes[: self.graph.position[end.place]]:
            uses = storages_of(values_of((node, *node.all_input_nodes)))
            if node not in mine and storage in uses:
                raise LeftAlone("the tensor that the results are written to is used before all are written", node)

    def _check_counts_unwritten(self, trail: set[fx.Node]) -> None:
        """Nothing writes the row counts, or what is made of them, until the last number was read from them."""
        memory = {storage for node in trail for storage in storages_of(value_of(node))}
        positions = sorted(self.graph.position[node] for node in trail)
        for node in self.graph.nodes[positions[0] + 1 : positions[-1]]:
            effects = self.graph.effects[node]
            if effects.kind is Kind.BARRIER or effects.writes & memory:
                raise LeftAlone("the row counts may change before all of them are read", node)
