"""Is ``torch.utils.checkpoint`` saving a region's input? The same frames in torch 2.11 to 2.15."""

from __future__ import annotations

import sys

import torch.utils.checkpoint


def is_saving_an_input(depth: int = 1) -> bool:
    """In a saved-tensor hook: is the tensor an argument of a checkpointed region?

    torch.utils.checkpoint saves those with an autograd.Function of its own (a different one for each use_reentrant),
    applied in its module: the frame behind that of ``Function.apply``. ``depth``: frames between the hook and here.
    """
    frame = sys._getframe(depth + 1)
    while frame is not None and frame.f_globals.get("__name__") == "torch.autograd.function":
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and frame.f_globals is vars(torch.utils.checkpoint)
