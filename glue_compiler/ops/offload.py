"""Operators that move a tensor to the host and back while the device computes.

A graph holds them in pairs, ``offload_start``/``offload_wait`` in forward and ``reload_start``/``reload_wait`` in
backward. They are functional, and their schemas say what aliases what: a wait returns its first operand, so whoever
plans memory sees that the buffer lives on. ``after`` is read by nobody: it is a data dependency that keeps a compiler
from moving the operator in front of whatever computes it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from glue_compiler.compat import saved_tensor_hooks
from glue_compiler.ops.copy_engine import engine

# torch.library.custom_op cannot express a result that aliases an operand.
_library = torch.library.Library("glue", "FRAGMENT")
# Any strides will do: with those of the trace, Inductor would copy what it has laid out differently.
_TAGS = (torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag)
_library.define("offload_start(Tensor source, Tensor? after, int pinned_limit) -> Tensor", tags=_TAGS)
_library.define("offload_wait(Tensor(a) host, Tensor source, Tensor? after) -> Tensor(a)", tags=_TAGS)
_library.define("reload_start(Tensor host, Tensor? after, Device device) -> Tensor", tags=_TAGS)
_library.define("reload_wait(Tensor(a) buffer, Tensor? after) -> Tensor(a)", tags=_TAGS)


def offload_start(source: Tensor, after: Tensor | None, pinned_limit: int) -> Tensor:
    """Start a copy of ``source`` to the host.

    Args:
        source: any sizes, dtype and strides, on any device.
        after: any tensor, or None.
        pinned_limit: bytes of page-locked memory that the pool may hold; negative: no limit.

    Returns:
        A contiguous host tensor of the same sizes and dtype, whatever a compiler made of the source's strides: it would
        copy other ones, on the host, before they are there. Four sizes and more have one of 1 in front of them: near
        convolutions Inductor turns results of four dimensions into channels-last ones. On an accelerator it may be read
        only by ``reload_start``; ``source`` must live until ``offload_wait``.
    """
    host = engine.start_offload(source.contiguous(), None if pinned_limit < 0 else pinned_limit)
    return host.unsqueeze(0) if host.dim() >= 4 else host


def offload_wait(host: Tensor, source: Tensor, after: Tensor | None) -> Tensor:
    """Make the current stream wait for the copy that fills ``host``; the operand ``source`` is alive until here.

    Where saved-tensor hooks are at work, the copy has ended on return: a hook may read ``host``.
    """
    event = engine.wait_offload(host)
    if event is not None and saved_tensor_hooks.are_active():
        event.synchronize()
    return torch.ops.aten.alias(host)


def reload_start(host: Tensor, after: Tensor | None, device: torch.device) -> Tensor:
    """Start a copy of ``host`` to ``device``, of the sizes that ``offload_start`` was given.

    The result may be read after ``reload_wait`` only.
    """
    return engine.start_reload(host.squeeze(0) if host.dim() > 4 else host, device)


def reload_wait(buffer: Tensor, after: Tensor | None) -> Tensor:
    """Make the current stream wait for the copy that fills ``buffer``."""
    engine.wait_reload(buffer)
    return torch.ops.aten.alias(buffer)


for _operator in (offload_start, offload_wait, reload_start, reload_wait):
    _library.impl(_operator.__name__, _operator, "CompositeExplicitAutograd")

TRANSFERS = frozenset(
    getattr(torch.ops.glue, name).default for name in ("offload_start", "offload_wait", "reload_start", "reload_wait")
)


@torch.library.register_fake("glue::offload_start", lib=_library)
def _(source: Tensor, after: Tensor | None, pinned_limit: int) -> Tensor:
    sizes = (1, *source.shape) if source.dim() >= 4 else source.shape
    return source.new_empty(sizes, device="cpu")


@torch.library.register_fake("glue::reload_start", lib=_library)
def _(host: Tensor, after: Tensor | None, device: torch.device) -> Tensor:
    sizes, strides = (host.shape[1:], host.stride()[1:]) if host.dim() > 4 else (host.shape, host.stride())
    return torch.empty_strided(sizes, strides, dtype=host.dtype, device=device)


@torch.library.register_fake("glue::offload_wait", lib=_library)
def _(host: Tensor, source: Tensor, after: Tensor | None) -> Tensor:
    return torch.ops.aten.alias(host)


@torch.library.register_fake("glue::reload_wait", lib=_library)
def _(buffer: Tensor, after: Tensor | None) -> Tensor:
    return torch.ops.aten.alias(buffer)
