"""Finds loops over pieces of rows that are sorted by expert, and proves of each that it is one grouped computation.

The pieces are consecutive: expert ``e`` has the rows from the sum of the counts before it on, as many as its own count.
Their results stand in the same order, joined by ``cat`` or written to the same rows of a fresh tensor. Changes nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from glue_compiler import compat
from glue_compiler.fx.effects import Kind
from glue_compiler.fx.operators import Call, Operators, Value
from glue_compiler.fx.values import expression, source_line, storage_of, storages_of, value_of
from glue_compiler.graph_pass import Skip
from glue_compiler.passes.group_experts.boundaries import Boundaries, Boundary
from glue_compiler.passes.group_experts.copies import Fill, fill_of
from glue_compiler.passes.group_experts.left_alone import LeftAlone
from glue_compiler.passes.group_experts.pieces import Extent, Piece, PieceRows, Pieces, Write
from glue_compiler.passes.group_experts.planner import LoopPlanner, Plan, skip_at
from glue_compiler.passes.group_experts.row_counts import RowCounts, Total
from glue_compiler.passes.group_experts.row_sets import RowSets
from glue_compiler.passes.group_experts.segment_bodies import Segment, SegmentBodies
from glue_compiler.passes.group_experts.segment_numbers import SegmentNumbers
from glue_compiler.passes.group_experts.steps import Product, Step

aten = torch.ops.aten


@dataclass(frozen=True)
class SegmentLoop:
    """A loop over pieces that is proved to be one grouped computation over all rows."""

    counts: fx.Node
    """Integer vector; its first ``num_experts`` items are the experts' row counts."""
    num_experts: int
    rows: tuple[PieceRows, ...]
    steps: tuple[Step, ...]
    results: tuple[fx.Node, ...]
    """What each expert's body gives."""
    writes: tuple[Write, ...]
    """Empty for a loop whose results ``last`` joins."""
    last: fx.Node
    """Where the grouped form is written."""
    checks_counts: bool
    """The counts are not proved to be those of all rows; what proves it at run time goes, so a check must stay."""
    absorbed: frozenset[fx.Node]
    """What the loop consists of; these nodes go once nothing uses them."""
    numbers: frozenset[fx.Node]
    """What was read from the counts, with checks of it that cannot fail: they go if nothing else needs one of them."""
    autocast: tuple[fx.Node, ...]
    row_counts: tuple[Boundary, ...]
    """The numbers of rows of the experts."""
    has_rows: bool
    """Some expert has a row, whatever the routing."""

    @property
    def first_expert(self) -> int:
        return self.rows[0].expert

    @property
    def source(self) -> fx.Node:
        return self.rows[0].pieces[0].source

    @property
    def result(self) -> fx.Node:
        """What holds the rows of all experts, in order."""
        return self.writes[0].into if self.writes else self.last


def plan_segments(gm: fx.GraphModule, operators: Operators) -> Plan[SegmentLoop]:
    """Plan for one graph (bodies of its higher-order operators are graphs of their own)."""
    boundaries = Boundaries(operators, gm.graph.nodes)
    found = Pieces(operators, boundaries)
    pieces = [piece for node in gm.graph.nodes if (piece := found.piece(node))]
    if not pieces:
        return Plan[SegmentLoop]()
    return _Planner(gm, operators, boundaries, found, pieces).run()


class _Planner(LoopPlanner):
    def __init__(
        self,
        gm: fx.GraphModule,
        operators: Operators,
        boundaries: Boundaries,
        found: Pieces,
        pieces: Sequence[Piece],
    ) -> None:
        super().__init__(gm, operators)
        self.sets = RowSets(operators)
        self.row_counts = RowCounts(self.sets)
        self.shape_env = getattr(operators.analysis.fake_mode, "shape_env", None)
        self.boundaries = boundaries
        self.pieces = {piece.node: piece for piece in pieces}
        self.equal_sizes: dict[Any, Any] = {}
        """Number of rows of a loop's result → that of its source, which is the same by the proof."""
        self.writes = [write for node in self.nodes if (write := found.write(node))]
        self.ends = {write.node for write in self.writes} | {node for node in self.nodes if self._joined(node)}

    def run(self) -> Plan[SegmentLoop]:
        plan = Plan[SegmentLoop]()
        matched: set[fx.Node] = set()
        for results, writes, last in self._candidates():
            rows = [self._rows(node, expert) for expert, node in enumerate(results)]
            if not all(rows):
                continue
            matched.update(piece.node for each in rows if each for piece in each.pieces)
            try:
                loop = self._loop(results, [each for each in rows if each], writes, last)
                plan.loops.append(loop)
                self.equal_sizes.setdefault(*(self._size(value_of(n).shape[0]) for n in (loop.result, loop.source)))
            except LeftAlone as left:
                plan.skips.append(skip_at(left, last))
        left_over = {piece.source: piece for piece in self.pieces.values() if piece.node not in matched}
        for piece in left_over.values():
            if piece.split is not None or not piece.extent[0].is_constant:
                reason = "pieces of rows are not put together again in order, by cat or in a fresh tensor"
                plan.skips.append(Skip(reason, piece.node.name, source_line(piece.node)))
        return plan

    def _joined(self, node: fx.Node) -> list[fx.Node]:
        """The tensors that a ``cat`` puts behind each other."""
        calls = self.operators.calls(node) if node.op.startswith("call_") else None
        match calls:
            case [Call(aten.cat | aten.concat | aten.concatenate, {"tensors": tensors, "dim": int(dim)})]:
                parts = [self.operators.node_of(each) if isinstance(each, Value) else None for each in tensors]
                found = [part for part in parts if part is not None]
                return found if dim in (0, -value_of(node).dim()) and len(found) == len(parts) else []
        return []

    def _candidates(self) -> list[tuple[list[fx.Node], list[Write], fx.Node]]:
        """(what each expert gives, the writes of it, the last node): of every cat of rows and every written tensor."""
        found: list[tuple[list[fx.Node], list[Write], fx.Node]] = [
            (joined, [], node) for node in self.nodes if (joined := self._joined(node))
        ]
        into: dict[fx.Node, list[Write]] = defaultdict(list)
        for write in self.writes:
            into[write.into].append(write)
        found += [([w.value for w in writes], writes, writes[-1].node) for writes in into.values()]
        return found

    def _rows(self, result: fx.Node, expert: int) -> PieceRows | None:
        """The pieces that ``result`` is computed from; None if there are none, or of different extents."""
        found: set[fx.Node] = set()
        waiting, seen = [result], {result}
        while waiting:
            node = waiting.pop()
            if node in self.pieces:
                found.add(node)
            elif node not in self.ends and isinstance(value_of(node), torch.Tensor | tuple | list):
                new = [arg for arg in node.all_input_nodes if arg not in seen]
                seen.update(new)
                waiting += new
        pieces = tuple(self.pieces[node] for node in sorted(found, key=self.position.__getitem__))
        return PieceRows(pieces, expert) if len({piece.extent for piece in pieces}) == 1 else None

    # -- one loop

    def _loop(self, results: list[fx.Node], rows: list[PieceRows], writes: list[Write], last: fx.Node) -> SegmentLoop:
        extents = [each.pieces[0].extent for each in rows]
        counted = self._counts(extents)
        counts = self.operators.node_of(counted)
        if counts is None:
            raise LeftAlone("no node holds the row counts")
        if writes and [write.extent for write in writes] != extents:
            raise LeftAlone("an expert's result is written to other rows than it was computed from")
        if value_of(counts).device != value_of(results[0]).device:
            raise LeftAlone("the row counts are on another device than the rows", counts)
        all_rows = self._rows_of_sources(rows)
        matcher = SegmentBodies(self.gm, rows, self.sets, self.effects, last, self.ends)
        steps = matcher.match(results)
        pieces = [piece for each in rows for piece in each.pieces]
        total = self._total(counted, len(rows), all_rows)
        covers = total is not None and total.exact
        from_split = any(piece.split is not None for piece in pieces)
        is_checked = not covers and (from_split or (total is not None and self._is_put_back(last, all_rows)))
        if not covers and not is_checked:
            self._check_rows_beyond(steps, writes, total)
        self._check_result(steps[-1], results, writes, last, pieces, all_rows)

        numbers = SegmentNumbers(self.boundaries, self.effects, counts, all_rows, exact=covers or is_checked)
        read = [node for piece in pieces for node in piece.numbers]
        trail = numbers.trail([*read, *(node for write in writes for node in write.numbers)])
        ends = {last, *(write.node for write in writes)}
        body = matcher.body | matcher.peeled | {piece.node for piece in pieces}
        body |= {piece.split for piece in pieces if piece.split is not None}
        sizes = numbers.dead_ends(body, pieces)
        inside = body | ends | sizes
        self.check_users(matcher.body | {piece.node for piece in pieces}, inside.__contains__)
        self.check_unwritten(body, last, {write.node for write in writes})
        self._check_counts_unwritten(trail)
        self.check_one_mode(ends, matcher.body | matcher.peeled)
        return SegmentLoop(
            counts=counts,
            num_experts=len(rows),
            rows=tuple(rows),
            steps=steps,
            results=tuple(results),
            writes=tuple(writes),
            last=last,
            checks_counts=is_checked,
            absorbed=frozenset(inside),
            numbers=frozenset(trail - {counts} | numbers.dead_ends(trail - {counts}, pieces)),
            autocast=self.modes.autocast_of(last),
            row_counts=tuple(stop.plus(start, -1) for start, stop in extents),
            has_rows=(covers or is_checked) and compat.lower_bound(all_rows, self.shape_env) > 0,
        )

    def _total(self, counts: Value, experts: int, all_rows: Any) -> Total | None:
        """What the counts of the experts sum to, if it is at most all rows."""
        total = self.row_counts.total(counts)
        if total is None or not bool(total.rows == all_rows):
            return None
        return Total(total.rows, total.exact and self.operators.meta(counts).shape[0] == experts)

    def _is_put_back(self, joined: fx.Node, all_rows: Any) -> bool:
        """``empty_like(joined)[order] = joined`` with all rows' ``order``: raises unless ``joined`` has all rows.

        ``order`` is an ``argsort``, so it holds the index of the last row.
        """
        for user in joined.users:
            calls = self.operators.calls(user) if user.op.startswith("call_") else None
            match calls[-1] if calls else None:
                case Call(
                    aten.index_put_,
                    {"self": Value() as into, "indices": (Value() as order,), "values": value, "accumulate": False},
                ) if value == self.operators.value(joined):
                    pass
                case _:
                    continue
            same = self._fill(into) and self.operators.meta(into).shape[0] == expression(value_of(joined).shape[0])
            call, index = self.operators.does(order), self.operators.meta(order)
            sorts = call is not None and (
                call.operator is aten.argsort or (call.operator is aten.sort and order.leaf == 1)
            )
            if same and sorts and index.rank == 1 and bool(self._size(index.shape[0]) == all_rows):
                return True
        return False

    def _fill(self, value: Value) -> Fill | None:
        return fill_of(self.operators, value)

    @staticmethod
    def _counts(extents: list[Extent]) -> Value:
        """The vector whose items, in order, are the lengths of the pieces."""
        at = Boundary()
        vectors: list[Value] = []
        for expert, (start, stop) in enumerate(extents):
            if start != at:
                where = "the first piece does not begin at row 0" if not expert else "the pieces are not consecutive"
                raise LeftAlone(f"{where}, in the order in which the results are put together")
            length = stop.plus(start, -1)
            item = next(iter(length.items), None)
            if length.constant or len(length.items) != 1 or item is None or item[1] != 1 or item[0][1] != expert:
                raise LeftAlone("the numbers of rows of the experts are not the items of one vector, in order")
            vectors.append(item[0][0])
            at = stop
        if len(set(vectors)) != 1:
            raise LeftAlone("the numbers of rows of the experts are not the items of one vector, in order")
        return vectors[0]

    def _size(self, size: Any) -> Any:
        """A sympy expression, the same for sizes that are proved equal."""
        return self.equal_sizes.get(expression(size), expression(size))

    def _rows_of_sources(self, rows: Sequence[PieceRows]) -> Any:
        sizes = {self._size(value_of(piece.source).shape[0]) for each in rows for piece in each.pieces}
        if len(sizes) != 1:
            raise LeftAlone("the pieces are those of tensors with different numbers of rows", rows[0].root)
        return sizes.pop()

    def _check_rows_beyond(self, steps: tuple[Step, ...], writes: list[Write], total: Total | None) -> None:
        """The pieces may end before the rows do; then the rows beyond them must have no effect."""
        if total is None:
            raise LeftAlone(
                "the row counts are not known to be counts of the rows; counts that the same graph makes with one_hot "
                "and sum, or pieces made by split, would show that they are"
            )
        if not writes or self._fill(self.operators.value(writes[0].into)) is not Fill.ZEROS:
            raise LeftAlone(
                "the pieces may end before the rows do, and the result has no zeros there; counts of topk's indices "
                "would show that they do not"
            )
        of_rows_alone = all(isinstance(step, Product | Segment) for step in steps)
        if not of_rows_alone or not isinstance(steps[-1], Product):
            # Not-a-numbers and shared gradients could come out of rows that no expert has.
            raise LeftAlone("the pieces may end before the rows do, and the body is more than products")

    def _check_result(
        self,
        step: Step,
        results: list[fx.Node],
        writes: list[Write],
        last: fx.Node,
        pieces: list[Piece],
        all_rows: Any,
    ) -> None:
        given = value_of(results[0])
        if expression(given.shape[0]) != expression(value_of(pieces[0].node).shape[0]):
            raise LeftAlone("an expert's result does not have its rows in the first dimension", results[0])
        if storages_of(given) & {storage for piece in pieces for storage in storages_of(value_of(piece.source))}:
            raise LeftAlone("the body gives a view of its rows", results[0])
        if not given.is_floating_point():
            raise LeftAlone("an expert's result is not floating point", results[0])
        if not writes:
            return
        into = value_of(writes[0].into)
        filled = self._fill(self.operators.value(writes[0].into))
        if filled not in (Fill.ZEROS, Fill.EMPTY):
            raise LeftAlone("the results are written to a tensor that is not fresh, of zeros or empty", last)
        if not into.is_floating_point() or into.device != given.device:
            raise LeftAlone("the results are written to a tensor of integers, or on another device", last)
        shape = tuple(self._size(size) for size in into.shape)
        if shape != (all_rows, *step.tail):
            raise LeftAlone("the tensor that the results are written to has another shape than all rows' results", last)
        self._check_uses(writes)

    def _check_uses(self, writes: list[Write]) -> None:
        """Nobody has the tensor that the results are written to before the last is written."""
        into = writes[0].into
        storage = storage_of(value_of(into))
        mine = {write.node for write in writes} | {into}
        for node in self.nodes[: self.position[writes[-1].node]]:
            uses = storages_of([value_of(node), *(value_of(arg) for arg in node.all_input_nodes)])
            if node not in mine and storage in uses:
                raise LeftAlone("the tensor that the results are written to is used before all are written", node)

    def _check_counts_unwritten(self, trail: set[fx.Node]) -> None:
        """Nothing writes the row counts, or what is made of them, until the last number was read from them."""
        memory = {storage for node in trail for storage in storages_of(value_of(node))}
        positions = sorted(self.position[node] for node in trail)
        for node in self.nodes[positions[0] + 1 : positions[-1]]:
            effects = self.effects[node]
            if effects.kind is Kind.BARRIER or effects.writes & memory:
                raise LeftAlone("the row counts may change before all of them are read", node)
