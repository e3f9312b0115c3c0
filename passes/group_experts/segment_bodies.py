"""Matches the bodies of experts whose rows are pieces of sorted tensors."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import fx

from glue_compiler.fx.effects import Effects
from glue_compiler.passes.group_experts.expert_bodies import BodyMatcher
from glue_compiler.passes.group_experts.expert_rows import dependents
from glue_compiler.passes.group_experts.left_alone import LeftAlone
from glue_compiler.passes.group_experts.pieces import PieceRows
from glue_compiler.passes.group_experts.row_sets import RowSets
from glue_compiler.passes.group_experts.steps import Nodes, Step


@dataclass(frozen=True, eq=False)
class Segment(Step):
    """All rows of ``source``, of which each expert has a piece."""

    source: fx.Node


class SegmentBodies(BodyMatcher):
    """Rows come in as pieces, in place of gathered ones."""

    def __init__(
        self,
        gm: fx.GraphModule,
        rows: Sequence[PieceRows],
        sets: RowSets,
        effects: dict[fx.Node, Effects],
        last: fx.Node,
        ends: Collection[fx.Node],
    ) -> None:
        self._rows_of = rows
        self._pieces = {piece.node: piece for each in rows for piece in each.pieces}
        super().__init__(gm, rows, sets, effects, last, ends, top_k=1)

    def _dependents(self) -> dict[fx.Node, set[fx.Node]]:
        return dependents({piece.node: each.root for each in self._rows_of for piece in each.pieces}, self.ends)

    def _leaf(self, nodes: Nodes) -> Step | None:
        first = self._pieces.get(nodes[0])
        if first is None:
            return None
        pieces = [self._pieces.get(node) for node in nodes]
        source = self._shared([piece.rows if piece is not None else None for piece in pieces])
        if source is None:
            raise LeftAlone("the experts take their rows from different tensors", first.node)
        return Segment(first.node, self._tail(first.node), source)
