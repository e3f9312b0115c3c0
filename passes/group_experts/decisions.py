"""Which loops of one graph are grouped: those that are proved, can be written, and that fuel allows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch import fx

from glue_compiler.capture.regions import SpeculativeRegion
from glue_compiler.fuel import Fuel
from glue_compiler.fx.operators import Operators
from glue_compiler.graph_pass import Skip
from glue_compiler.passes.group_experts.analysis import ExpertLoop, plan_grouping
from glue_compiler.passes.group_experts.drafts import Draft
from glue_compiler.passes.group_experts.left_alone import LeftAlone
from glue_compiler.passes.group_experts.planner import skip_at
from glue_compiler.passes.group_experts.rewrite import draft_group, erase_dead_counts
from glue_compiler.passes.group_experts.segment_rewrite import draft_segments, erase_numbers
from glue_compiler.passes.group_experts.segments import SegmentLoop, plan_segments
from glue_compiler.passes.group_experts.speculation import proved_regions

Loop = TypeVar("Loop", ExpertLoop, SegmentLoop)


class Decisions:
    """Of one graph; bodies of its higher-order operators are graphs of their own. Draws up drafts, puts nothing in."""

    def __init__(self, gm: fx.GraphModule, operators: Operators, fuel: Fuel) -> None:
        self.gm = gm
        self.operators = operators
        self.skips: dict[Skip, None] = {}
        self.proved: list[SpeculativeRegion] = []
        """Regions that do nothing for an expert without rows, if what is put in stays."""
        plan, segments = plan_grouping(gm, operators), plan_segments(gm, operators)
        self.alone = plan.alone
        self.skips.update(dict.fromkeys([*plan.skips, *segments.skips]))
        offsets: dict[Any, fx.Node] = {}
        self.loops = self._decided(plan.loops, lambda loop: draft_group(gm, loop, operators), fuel)
        self.segments = self._decided(segments.loops, lambda loop: draft_segments(gm, loop, operators, offsets), fuel)

    def _decided(self, loops: Iterable[Loop], draft: Callable[[Loop], Draft], fuel: Fuel) -> list[tuple[Loop, Draft]]:
        decided = []
        for loop in loops:
            try:
                drafted = draft(loop)
            except LeftAlone as left:
                self.skips[skip_at(left, loop.last)] = None
                continue
            if fuel.take(f"group {loop.num_experts} experts at {loop.last.name}"):
                decided.append((loop, drafted))
            else:
                drafted.erase()
        return decided

    @property
    def absorbed(self) -> set[fx.Node]:
        """Of the row sets' loops."""
        return {node for loop, _ in self.loops for node in loop.absorbed}

    def put_loops_in(self, counts: Counter[str]) -> bool:
        """Returns whether the graph has changed."""
        segments = [loop for loop, _ in self.segments]
        loops = [loop for loop, _ in self.loops]
        written = {node for _, draft in (*self.loops, *self.segments) for node in draft.nodes}
        proved, unproved = proved_regions(self.gm, [*loops, *self.alone], segments, written, self.operators)
        self.skips.update(dict.fromkeys(unproved))
        # Backwards: a loop that adds to the result of another finds it under the name that the plan has.
        for loop, draft in reversed(self.loops):
            draft.put_in()
            counts["loops_grouped"] += 1
            counts["experts_grouped"] += loop.num_experts
        erased = erase_dead_counts(self.gm, proved, self.operators.analysis)
        self.proved += proved
        return erased or bool(self.loops)

    def put_segments_in(self, counts: Counter[str]) -> bool:
        """Returns whether the graph has changed."""
        for loop, draft in self.segments:
            draft.put_in()
            counts["loops_grouped"] += 1
            counts["experts_grouped"] += loop.num_experts
        erase_numbers(self.gm, [loop for loop, _ in self.segments])
        return bool(self.segments)
