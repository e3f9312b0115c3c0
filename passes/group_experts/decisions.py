"""Which loops of one graph are written: those that are proved, can be written, and that fuel allows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import fx

from glue_compiler.fx.operators import Operators
from glue_compiler.passes.group_experts.checks import ReadGraph
from glue_compiler.passes.group_experts.plan import GroupedLoop, LeftAlone
from glue_compiler.passes.group_experts.read import read_loops, read_row_indices
from glue_compiler.passes.group_experts.speculation import proved_regions
from glue_compiler.passes.group_experts.write import Draft, LoopWriter, erase_dead_counts, erase_numbers
from glue_compiler.pipeline.fuel import Fuel
from glue_compiler.pipeline.results import Skip


class Decisions:
    """Of one graph; bodies of its higher-order operators are graphs of their own. Puts nothing in until it is told.

    Attributes:
        proved: regions that do nothing for an expert without rows, if what is put in stays.
    """

    def __init__(self, gm: fx.GraphModule, operators: Operators, fuel: Fuel) -> None:
        self.gm = gm
        self.operators = operators
        self.fuel = fuel
        self.writer = LoopWriter(gm, operators)
        self.graph = ReadGraph(gm, operators)
        plan = read_loops(self.graph)
        self.skips: dict[Skip, None] = dict.fromkeys(plan.skips)
        self.drafts = self._drafted(plan.loops)
        loops = [draft.loop for draft in self.drafts]
        written = {node for draft in self.drafts for node in draft.nodes}
        self.proved, unproved = proved_regions(self.graph, [*loops, *plan.alone], written)
        self.skips.update(dict.fromkeys(unproved))

    def add_row_indices(self) -> None:
        """Decide on the row sets of the loops that are not grouped."""
        self.drafts += self._drafted(read_row_indices(self.graph, [draft.loop for draft in self.drafts]))

    def _drafted(self, loops: Iterable[GroupedLoop]) -> list[Draft]:
        drafts = []
        for loop in loops:
            try:
                draft = self.writer.draft(loop)
            except LeftAlone as left:
                self.skips[left.skip_at(loop.place)] = None
                continue
            experts = f"{loop.num_experts} experts"
            what = f"group {experts} at {loop.place.name}" if loop.steps else f"slice the rows of {experts}"
            if self.fuel.take(what):
                drafts.append(draft)
            else:
                draft.erase()
        return drafts

    def put_in(self, counts: Counter[str]) -> bool:
        """Returns whether the graph has changed."""
        before = set(self.gm.graph.nodes)
        # Backwards: a loop that adds to the result of another finds it under the name that the plan has.
        for draft in reversed(self.drafts):
            draft.put_in()
            counts["loops_grouped" if draft.loop.steps else "loops_sliced"] += 1
            counts["experts_grouped"] += draft.loop.num_experts if draft.loop.steps else 0
        erase_dead_counts(self.gm, self.proved, self.operators.analysis)
        erase_numbers(self.gm, [draft.loop for draft in self.drafts])
        if self.drafts or set(self.gm.graph.nodes) != before:
            self.gm.recompile()
            return True
        return False
