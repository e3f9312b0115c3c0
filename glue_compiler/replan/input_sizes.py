"""What the inputs of a captured graph take on a device. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import fx, nn

from glue_compiler.fx.values import most_bytes, tensors_in, value_of


class InputSizes(NamedTuple):
    """Bytes of all ``inputs``, and of these of ``parameters``; where sizes are dynamic, those of the trace."""

    inputs: int
    parameters: int


def sizes_of(placeholders: Iterable[fx.Node], device: torch.device) -> InputSizes:
    """Of those that lie on ``device``."""
    inputs, parameters = 0, 0
    for tensor in (tensor for node in placeholders for tensor in tensors_in(value_of(node))):
        if tensor.device == device:
            nbytes = most_bytes(tensor, getattr(getattr(tensor, "fake_mode", None), "shape_env", None)) or 0
            inputs += nbytes
            if isinstance(tensor, nn.Parameter):
                parameters += nbytes
    return InputSizes(inputs, parameters)


def is_in_the_middle(placeholders: Iterable[fx.Node]) -> bool:
    """Does an input that is no parameter need a gradient? Then earlier graphs of the step wait for theirs, too."""
    values = (tensor for node in placeholders for tensor in tensors_in(value_of(node)))
    return any(value.requires_grad and not isinstance(value, nn.Parameter) for value in values)
