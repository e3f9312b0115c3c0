"""Branches on what a batch of integers says, such as "is this batch packed?", without a graph break.

Dynamo ends a graph where Python code branches on a tensor's value. Where the condition is a pure function of one
integer input, it is evaluated for the call that is being traced, and the branch that this call takes is traced. A guard
evaluates it again in each later call, so a call that would take the other branch gets code of its own. Eager code
reads the condition at each branch; the guard reads it once a call, whatever the number of layers that ask.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from glue_compiler.capture.input_functions import Limits, input_function
from glue_compiler.capture.traced_writes import TracedWrites
from glue_compiler.compat import branch_guards, dynamo_frames, dynamo_tracing
from glue_compiler.fx.values import Symbolic, makes_tensor, value_of

MOST_GUARDS = 2
"""Conditions of one graph that become guards: each doubles the variants that a frame may be compiled to."""
LIMITS = Limits(operators=32, data_dependent=False)


@dataclass
class GuardedBranches(dynamo_tracing.TracingObserver):
    """The decisions for one graph that is being traced. ``writes``: of the frame, told before this."""

    writes: TracedWrites
    _decided: dict[Any, bool] = field(default_factory=dict)

    def begins(self) -> None:
        self._decided = {}

    def decide(self, frame: Any, at: int | None, node: fx.Node, expression: Any) -> bool | None:
        if not branch_guards.BRANCHES.is_available() or (at is not None and dynamo_frames.is_assertion(frame, at)):
            return None
        found = input_function(frame, [node], LIMITS, self.writes) if _is_one_boolean(node) else None
        if found is None:
            return None
        condition, example = found
        if condition.key not in self._decided:
            if len(self._decided) == MOST_GUARDS:
                return None
            value = bool(condition.values(example)[0])
            if condition.source is not None:
                text = f"glue: what the code asks about the contents of {condition.source.name} is {value}"
                check = condition.guard(lambda values: bool(values[0]) == value)
                branch_guards.install_guard(condition.source, check, text)
            self._decided[condition.key] = value
        return self._decided[condition.key]


def _is_one_boolean(node: fx.Node) -> bool:
    value = value_of(node)
    if isinstance(value, torch.Tensor):
        return value.dtype == torch.bool and value.dim() == 0
    if not isinstance(value, torch.SymBool):
        return False
    while isinstance(value_of(node), Symbolic) and node.op == "call_function" and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    read = node.args[0] if node.target == "item" else None
    return isinstance(read, fx.Node) and makes_tensor(read) and value_of(read).dtype == torch.bool
