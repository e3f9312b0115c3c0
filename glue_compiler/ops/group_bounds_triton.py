"""Where groups of rows start and end, as kernels of other packages read it, and zeros behind the last group."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glue_compiler.ops.kernel_support import next_power_of_two, processor_count

_BLOCK = 1024


@triton.jit(do_not_specialize=["rows"])
def _bounds_kernel(
    offsets, bounds, out, rows, num_experts, width, GROUPS: tl.constexpr, CLEARS: tl.constexpr, BLOCK: tl.constexpr
):
    if tl.program_id(0) == 0:
        group = tl.arange(0, GROUPS)
        ends = tl.load(offsets + group - 1, mask=(group > 0) & (group <= num_experts), other=0)
        tl.store(bounds + group, tl.minimum(ends, rows), mask=group <= num_experts)
    if CLEARS:
        column = tl.arange(0, BLOCK)
        zeros = tl.zeros((BLOCK,), dtype=out.dtype.element_ty)
        used = tl.minimum(tl.load(offsets + num_experts - 1), rows)
        for row in range(used + tl.program_id(0), rows, tl.num_programs(0)):
            places = out + tl.cast(row, tl.int64) * width
            for first in range(0, width, BLOCK):
                tl.store(places + first + column, zeros, mask=first + column < width)


def bounds(offsets: Tensor, rows: int, clear: Tensor | None = None) -> Tensor:
    """0 and the ``offsets`` (int32 ``[E]``, inclusive cumulative row counts), at most ``rows``: int32 ``[E + 1]``.

    ``clear``: contiguous ``[rows, width]``, whose rows from ``offsets[-1]`` on become zero.
    """
    experts = offsets.shape[0]
    result = torch.empty(experts + 1, dtype=torch.int32, device=offsets.device)
    programs = 1 if clear is None else max(1, min(rows, 2 * processor_count(offsets.device.index)))
    _bounds_kernel[(programs,)](
        offsets.contiguous(), result, result if clear is None else clear, rows, experts,
        0 if clear is None else clear.shape[1],
        GROUPS=next_power_of_two(experts + 1), CLEARS=clear is not None, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return result
