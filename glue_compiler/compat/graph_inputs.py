"""Inputs that a pass gives a graph: what AOTAutograd wants to know of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def set_sourceless(placeholder: fx.Node) -> None:
    """Mark a placeholder that no value of the user's stands behind; AOTAutograd asks every placeholder for its source.

    None is what the DDP optimizer leaves on the inputs of its pieces (2.11 to 2.15).
    """
    placeholder._dynamo_source = None


def example_input(value: Any) -> Any:
    """A fake tensor (or a symbol) of a captured graph as an example input for the compiler.

    Must be called while a backend runs. AOTAutograd then works in another FakeTensorMode than the nodes' own, with the
    same ShapeEnv; it would give a tensor of a foreign mode new symbols (2.13), or refuse it (2.11).
    """
    context = torch._guards.TracingContext.try_get()
    if not isinstance(value, torch.Tensor) or context is None or context.fake_mode is None:
        return value
    with context.fake_mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
