"""What the inputs of a captured graph take on a device. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import fx, nn

from glue_compiler.fx.values import most_bytes, tensors_in, value_of


class InputSizes(NamedTuple):
    """Bytes of all ``inputs``; of ``parameters``; and of what needs a gradient and is none: something in front of the
    graph has ``handed`` it over in the same step, and waits for its backward, too.

    Where sizes are dynamic, those of the trace.
    """

    inputs: int
    parameters: int
    handed: int


def sizes_of(placeholders: Iterable[fx.Node], device: torch.device) -> InputSizes:
    """Of those that lie on ``device``."""
    inputs, parameters, handed = 0, 0, 0
    for tensor in (tensor for node in placeholders for tensor in tensors_in(value_of(node))):
        if tensor.device == device:
            nbytes = most_bytes(tensor, getattr(getattr(tensor, "fake_mode", None), "shape_env", None)) or 0
            inputs += nbytes
            if isinstance(tensor, nn.Parameter):
                parameters += nbytes
            elif tensor.requires_grad:
                handed += nbytes
    return InputSizes(inputs, parameters, handed)
