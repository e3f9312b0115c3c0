"""Fake tensors of our own: a mode to run a captured graph in, and what Dynamo would record of its symbols."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def new_fake_mode(*, remembers_calls: bool) -> Any:
    """A FakeTensorMode with a ShapeEnv of its own.

    Args:
        remembers_calls: keep what an operator gave, for the next equal call in any graph of the process. That takes
            longer than the call where sizes are unbacked symbols, which no other graph has.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    mode.cache_enabled = remembers_calls
    return mode


def as_fake(mode: Any, tensor: torch.Tensor) -> Any:
    """Of the sizes that ``tensor`` has."""
    return mode.from_tensor(tensor, static_shapes=True)


def unbacked_bindings(mode: Any, value: Any) -> Mapping[Any, Any]:
    """Which unbacked symbols came into being with ``value``, and where in it they are."""
    from torch.fx.experimental.symbolic_shapes import compute_unbacked_bindings

    return compute_unbacked_bindings(mode.shape_env, value) or {}
