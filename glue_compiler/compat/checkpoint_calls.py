"""Who saves a tensor for backward: a checkpointed region or a compiled graph, by the frames of torch 2.11 to 2.15."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType

import torch.utils.checkpoint
from torch import Tensor


@dataclass(frozen=True)
class SavingCall:
    """``arguments``: of the compiled graph that saves; None for a checkpointed region, which saves nothing else."""

    arguments: Sequence[object] | None

    def is_given(self, tensor: Tensor) -> bool:
        """Is ``tensor`` an argument, and not a value that a compiled graph made?"""
        return self.arguments is None or any(argument is tensor for argument in self.arguments)


def saving_call(depth: int = 1) -> SavingCall | None:
    """In a saved-tensor hook: the call for which the tensor is saved. ``depth``: frames between the hook and here.

    Both are an autograd.Function of torch's own (a checkpoint has a different one for each use_reentrant), applied in a
    module of torch: its frame is behind that of ``Function.apply``, which is none in torch 2.15.
    """
    frame: FrameType | None = sys._getframe(depth + 1)
    while frame is not None and frame.f_globals.get("__name__") == "torch.autograd.function":
        frame = frame.f_back
    if frame is None:
        return None
    if frame.f_globals is vars(torch.utils.checkpoint):
        return SavingCall(None)
    # AOTAutograd's call of a compiled forward: g(args) calls CompiledFunction.apply(*args).
    if frame.f_globals.get("__name__") == "torch._functorch._aot_autograd.utils" and "args" in frame.f_locals:
        return SavingCall(frame.f_locals["args"])
    return None
