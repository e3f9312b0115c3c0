"""What observers are told and asked while Dynamo traces a frame, see ``dynamo_tracing.py``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from glue_compiler.compat import layer_calls, loop_tails
from glue_compiler.compat.harmless_values import touched


@dataclass(frozen=True)
class TracedInstruction:
    """An instruction that Dynamo has traced, and the stack before and after it, the lowest value first.

    ``nodes``: how many it has added to the graph. ``goes_on``: it is neither a return nor the end of a graph.
    """

    frame: Any
    at: int
    before: Sequence[Any]
    after: Sequence[Any]
    nodes: int
    goes_on: bool

    @property
    def instruction(self) -> Any:
        return self.frame.instructions[self.at]

    @property
    def pushed(self) -> list[Any]:
        """The values that were not on the stack before."""
        known = {id(value) for value in self.before}
        return [touched(value) for value in self.after if id(value) not in known]

    def taken(self, pushes: int) -> list[Any]:
        """The values that it took, if it pushes this many."""
        return [touched(value) for value in self.before[max(len(self.after) - pushes, 0) :]]


class TracingObserver:
    """Told and asked while Dynamo traces a frame. What a class does not override is left to Dynamo."""

    def begins(self) -> None:
        """Dynamo begins to trace, also again after a failed speculation: nothing told before holds any more."""

    def steps_of(self, frame: Any, count: Any) -> int | None:
        """How many steps to trace of a ``range`` of ``count``, an int or a SymInt; None: all, which may be a guard."""
        return None

    def length_of(self, frame: Any, iterated: fx.Node) -> int | None:
        """How many items a tensor of unknown length has; they are ``tensor([0])``, ``tensor([1])``, ... then."""
        return None

    def decide(self, frame: Any, at: int | None, node: fx.Node, expression: Any) -> bool | None:
        """The value of a condition that only exists at run time.

        Args:
            frame: Dynamo's translator.
            at: index of the conditional jump; None: Python asks for a bool elsewhere.
            node: of the condition. expression: its sympy expression, if it is a number.
        """
        return None

    def is_watching(self, frame: Any, at: int) -> bool:
        """Is ``stepped`` to be called after the instruction at ``at``? Asked of all sixty thousand of a large model."""
        return False

    def stepped(self, step: TracedInstruction) -> None:
        """Dynamo has traced an instruction."""

    def asks_for_gradient(self, node: fx.Node) -> bool:
        """Traced code calls ``requires_grad_()`` of a tensor that it has made: is the call left out of the graph?

        Dynamo's record of the tensor asks for a gradient from then on.
        """
        return False

    def created(self, token: Any) -> None:
        """Traced code made a Python object that can change; ``token`` stands for it."""

    def enters_inference_mode(self, bodies_of: Sequence[Any]) -> str | None:
        """Called before traced code enters inference mode; a text, if the graph has to end there: why.

        Args:
            bodies_of: the higher-order operators in whose bodies that is, as Dynamo names them, the innermost first.
        """
        return None

    def made(self, node: fx.Node, frame: Any, bodies_of: Sequence[Any], misuses_index: bool) -> None:
        """Dynamo has added a node to a graph; its value is on record when :meth:`traced` is called.

        Args:
            frame: the translator that traces the code that the node comes from.
            bodies_of: as in ``enters_inference_mode``.
            misuses_index: it takes an item of ``length_of``'s otherwise than to index a tensor with it.
        """

    def traced(self, frame: Any) -> None:
        """Called before each instruction: what came before is traced, and its values are on record."""

    def looks_into_container(self, frame: Any) -> None:
        """Called before a test for membership, of the two values on top of the stack."""

    def breaks(self, frame: Any) -> None:
        """Dynamo ends the graph: what is on the stack of ``frame`` is done by Python."""

    def calls(self, call: layer_calls.ModuleCall) -> str | None:
        """Called before a function of a module is inlined; a text, if Python is to make the call itself: why."""
        return None

    def called(self, call: layer_calls.ModuleCall) -> None:
        """What ``calls`` was called with has been inlined."""

    def leaves(self, frame: Any) -> loop_tails.Tail | None:
        """Called before Dynamo leaves the rest of a function to Python: what of it is a function of its own, if any."""
        return None
