"""Hooks on saved tensors: are some at work, or may none be, and what they do not see. Private in torch 2.11 to 2.15."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def are_active() -> bool:
    """Does this thread have a pair of ``torch.autograd.graph.saved_tensors_hooks``?"""
    # The argument: those that are set while Dynamo traces count too.
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def move_to_pinned_memory() -> bool:
    """Are this thread's innermost hooks those of ``torch.autograd.graph.save_on_cpu(pin_memory=True)``?"""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None or not inspect.isfunction(hooks[0]):
        return False
    known: Any = torch.autograd.graph.save_on_cpu().pack_hook
    return hooks[0].__code__ is known.__code__ and bool(inspect.getclosurevars(hooks[0]).nonlocals.get("pin_memory"))


def are_forbidden() -> bool:
    """Is this thread in ``torch.autograd.graph.disable_saved_tensors_hooks``?"""
    return not torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]


@contextlib.contextmanager
def out_of_sight() -> Iterator[None]:
    """What autograd saves in here goes through no hook of outside, such as those of a checkpoint."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(RuntimeError):  # hooks are forbidden here, so there are none
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_identity, _identity))
        yield


def _identity(tensor: Tensor) -> Tensor:
    return tensor
