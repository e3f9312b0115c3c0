"""Are hooks on saved tensors at work? Private in torch 2.11 to 2.15."""

from __future__ import annotations

import torch


def are_active() -> bool:
    """Does this thread have a pair of ``torch.autograd.graph.saved_tensors_hooks``?"""
    # The argument: those that are set while Dynamo traces count too.
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
