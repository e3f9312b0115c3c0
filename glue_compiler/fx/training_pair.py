"""The forward and the backward graph of a training step, and what must hold between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from glue_compiler.compat.rng_states import is_rng_state
from glue_compiler.errors import GlueInvariantError
from glue_compiler.fx.values import inputs_of, value_of


@dataclass(frozen=True)
class TrainingPair:
    """The two graphs of one training step.

    The forward's outputs from ``num_outputs`` on are the saved values. Each goes to the backward's placeholder of its
    name (but for the states of random generators, which are not in ``saved``); saved tensors are in the same order in
    both.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    num_outputs: int

    @property
    def outputs(self) -> tuple[Any, ...]:
        """What the forward returns to the caller: nodes and constants."""
        return self.returned[: self.num_outputs]

    @property
    def saved(self) -> tuple[fx.Node, ...]:
        values = self.returned[self.num_outputs :]
        return tuple(value for value in values if isinstance(value, fx.Node) and not is_rng_state(value))

    @property
    def returned(self) -> tuple[Any, ...]:
        """All that the forward returns: outputs, then what backward takes."""
        values = self.forward.graph.output_node().args[0]
        assert isinstance(values, tuple | list)
        return tuple(values)


def check_pair(pair: TrainingPair) -> None:
    """``Graph.lint`` on both graphs, and each saved value meets a placeholder of its kind, in the same order.

    Raises:
        GlueInvariantError: says what does not hold.
    """
    for module in (pair.forward, pair.backward):
        module.graph.lint()
    saved = {node.name: value_of(node) for node in pair.saved}
    taken = {node.name: value_of(node) for node in inputs_of(pair.backward.graph)}
    tensors = [name for name, value in saved.items() if isinstance(value, torch.Tensor)]
    for name in saved:
        if name not in taken:
            raise GlueInvariantError(f"forward saves '{name}', which backward does not take")
        if _kind(saved[name]) != _kind(taken[name]):
            raise GlueInvariantError(
                f"forward saves '{name}' as {_kind(saved[name])}, backward takes {_kind(taken[name])}"
            )
    if [name for name in taken if name in tensors] != tensors:
        raise GlueInvariantError("backward does not take the saved tensors in the order in which forward returns them")


def _kind(value: Any) -> tuple[object, ...]:
    # Sizes may be symbols, and comparing those would add guards.
    return (value.device, value.dtype, value.dim()) if isinstance(value, torch.Tensor) else (type(value),)
