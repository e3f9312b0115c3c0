"""roll_loops: a loop of equal steps is one operator, however many steps there are.

``read.py`` proves that steps are equal, of which capture has traced two, ``body.py`` makes a graph of one, and
``write.py`` writes the operator.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import fx

from glue_compiler.capture.regions import Loops
from glue_compiler.fx import bodies
from glue_compiler.fx.flow import Refused
from glue_compiler.passes.roll_loops.body import Bodies
from glue_compiler.passes.roll_loops.read import loops_in, read
from glue_compiler.passes.roll_loops.write import write
from glue_compiler.pipeline.graph_pass import GraphPass, PassContext, PassResult
from glue_compiler.pipeline.results import Numerics, Skip


class RollLoops(GraphPass):
    """Keep a loop over chunks a loop, so that one graph serves all lengths and does not grow with them.

    Counts: ``loops_rolled``.
    """

    name: ClassVar[str] = "roll_loops"
    numerics: ClassVar[Numerics] = Numerics.CLOSE
    proves_loops: ClassVar[Loops] = Loops.COUNTED

    def run(self, graph: fx.GraphModule, context: PassContext) -> PassResult:
        skips: list[Skip] = []
        proved: list[Any] = []
        known = Bodies(context.effects)
        for module in bodies.graph_modules(graph):
            found = list(loops_in(module))
            for steps in found:
                try:
                    read(module, steps, context.effects)
                    body = known.of(module, steps)
                except Refused as refusal:
                    skips.append(Skip.at((*steps.first, *steps.second)[0], f"a loop of steps: {refusal.reason}"))
                    continue
                # Two steps stand for all in this graph: without fuel the frame is converted again.
                if context.fuel.take(f"roll the loop at {steps.first[0].name}"):
                    write(module, steps, body, context.effects)
                    proved.append(steps.loop)
            if found:
                module.recompile()
        return PassResult(bool(proved), {"loops_rolled": len(proved)}, tuple(skips), proved=tuple(proved))
