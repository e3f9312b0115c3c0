"""What a call of a compiled graph runs in: modes, transforms, streams."""

from __future__ import annotations

import sys

import torch


def in_dispatch_mode() -> bool:
    """Is a ``TorchDispatchMode`` (selective checkpointing, fake tensors, tracing) active in this thread?"""
    return torch._C._len_torch_dispatch_stack() > 0


def in_transform() -> bool:
    """Is a functorch transform (``vmap``, ``grad``) active in this thread?"""
    return torch._C._functorch.peek_interpreter_stack() is not None


def in_dual_level() -> bool:
    """Is a ``dual_level`` of forward-mode gradients entered?"""
    return torch.autograd.forward_ad._current_level >= 0


def backward_id() -> int | None:
    """A number for each run of autograd's engine; None in threads that it does not run in."""
    task = torch._C._current_graph_task_id()
    return None if task < 0 else task


def backward_is_compiled() -> bool:
    """Does torch compile whatever autograd runs (``torch._dynamo.config.compiled_autograd``)?"""
    found = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(torch._dynamo.config.compiled_autograd or getattr(found, "compiled_autograd_enabled", False))


def stream_id(device: torch.device) -> int:
    """The current stream of a CUDA device in this thread, as a number that tells streams of one device apart."""
    return torch._C._cuda_getCurrentRawStream(device.index)


def is_capturing() -> bool:
    """Is the current stream being captured into a CUDA graph?"""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
