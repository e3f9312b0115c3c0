"""The tokens of a padded batch that count, as rows behind each other, and back."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from glue_compiler.ops.composite import composite
from glue_compiler.ops.opaque import opaque
from glue_compiler.ops.page_locked import locked_copy

_waiting: deque[tuple[Tensor, torch.cuda.Event]] = deque()
"""Per row of a batch on a GPU whether its labels break the contract, on their way to the host."""


MOST_SPARE = 256
"""How many rows come at a time: libraries choose how to compute a product for each number of rows that they meet."""


@opaque("token_rows")
def token_rows(seen: Tensor) -> list[Tensor]:
    """Which tokens of a padded batch count. One host synchronisation on CUDA; an unbacked symbol in a graph.

    Spare rows bring their number to a multiple that grows with the batch; each is the first token that counts again, so
    that it has no number that others have not.

    Args:
        seen: bool ``[B, T]``: the token counts.

    Returns:
        int64 ``[rows]``: where each of them lies in the flattened ``B * T`` tokens, ascending, then spare rows; int64
        ``[B * T]``: which of them a token is, anything for those that do not count; int32 ``[B + 2]``: where rows of
        the batch begin in them, where spare rows do, then the number of all.

    Raises:
        ValueError: no token counts; or an earlier batch had labels that count at hidden tokens (``target_rows``).
    """
    flat = seen.reshape(-1)
    rows = torch.nonzero(flat).reshape(-1)
    _raise_what_is_known()
    if not len(rows):
        raise ValueError("options={'padding': 'drop'}: the padding mask of a batch hides all of its tokens")
    numbers = (flat.cumsum(0) - 1).clamp_(min=0)
    spare = _rounded(len(rows), *seen.shape) - len(rows)
    starts = torch.nn.functional.pad(seen.sum(1).cumsum(0), (1, 1), value=len(rows) + spare)
    starts[0] = 0
    return [torch.cat([rows, rows[:1].expand(spare)]), numbers, starts.to(torch.int32)]


def _rounded(count: int, batch: int, length: int) -> int:
    """The next multiple of a power of two: a sixteenth of all tokens at most, and of no more rows than a document."""
    most = min(MOST_SPARE, batch * length // 16, length)
    step = 1 << max(0, most.bit_length() - 1)
    return min(-(-count // step) * step, batch * length)


@token_rows.register_fake
def _(seen: Tensor) -> list[Tensor]:
    batch, length = seen.shape
    most = batch * length if isinstance(batch, int) and isinstance(length, int) else None
    rows = seen.new_empty(torch.library.get_ctx().new_dynamic_size(min=1, max=most), dtype=torch.int64)
    return [rows, rows.new_empty(batch * length), rows.new_empty(batch + 2, dtype=torch.int32)]


@composite("(Tensor self, Tensor rows, Tensor numbers, Tensor seen, Tensor starts) -> Tensor")
def take_rows(tokens: Tensor, *known: Tensor) -> Tensor:
    """The rows of tokens ``[B * T, ...]`` that count, and spare ones, ``[rows, ...]``; ``known``: of ``token_rows``.

    The gradient of the other tokens is zero, and that of spare rows is taken to be. Each of both directions reads by an
    index, and adds up nothing.
    """
    return _Take.apply(tokens, *known)


@composite("(Tensor self, Tensor rows, Tensor numbers, Tensor seen, Tensor starts) -> Tensor")
def put_rows(taken: Tensor, *known: Tensor) -> Tensor:
    """Tokens ``[B * T, ...]`` of which those that count are the rows ``taken``, and the others zeros."""
    return _Put.apply(taken, *known)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, *known: Tensor) -> Tensor:
        ctx.save_for_backward(*known)
        return tokens.index_select(0, known[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Put.apply(grad, *ctx.saved_tensors), None, None, None, None


class _Put(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, taken: Tensor, *known: Tensor) -> Tensor:
        _, numbers, seen, _ = known
        ctx.save_for_backward(*known)
        return torch.where(_of_rows(seen.reshape(-1), taken), taken.index_select(0, numbers), 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, _, _, starts = ctx.saved_tensors
        taken = _Take.apply(grad, *ctx.saved_tensors)
        return torch.where(_of_rows(_counts(rows, starts), taken), taken, 0), None, None, None, None


def _counts(rows: Tensor, starts: Tensor) -> Tensor:
    """bool ``[rows]``: it is no spare one."""
    return torch.arange(rows.shape[0], device=rows.device) < starts[-2]


def _of_rows(condition: Tensor, rows: Tensor) -> Tensor:
    return condition.reshape(-1, *[1] * (rows.dim() - 1))


@opaque("target_rows")
def target_rows(targets: Tensor, rows: Tensor, seen: Tensor, starts: Tensor, ignore_index: int) -> Tensor:
    """The rows of ``targets`` ``[B, T]`` that count, ``[rows]``, of which those at hidden tokens must be ignored, as
    spare ones are.

    Raises:
        ValueError: some of the others are not ``ignore_index``; names the row. On CUDA the next step's ``token_rows``
            raises it, so that nothing waits for the device here.
    """
    breaks = ((targets != ignore_index) & ~seen).any(1)
    if breaks.is_cuda:
        host = locked_copy(torch.empty(breaks.shape, dtype=torch.bool)).copy_(breaks, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        _waiting.append((host, event))
    else:
        _require_ignored(breaks)
    return torch.where(_counts(rows, starts), targets.reshape(-1).index_select(0, rows), ignore_index)


@target_rows.register_fake
def _(targets: Tensor, rows: Tensor, seen: Tensor, starts: Tensor, ignore_index: int) -> Tensor:
    return targets.new_empty(rows.shape)


def _raise_what_is_known() -> None:
    while _waiting and _waiting[0][1].query():
        _require_ignored(_waiting.popleft()[0])


def _require_ignored(breaks: Tensor) -> None:
    if breaks.any():
        row = int(breaks.nonzero()[0])
        raise ValueError(
            f"options={{'padding': 'drop'}}: row {row} of a batch has labels that count for tokens that its padding "
            "mask hides (if labels are shifted, so is that of the first token behind padding); set them to the loss's "
            "ignore_index, or compile without the option"
        )
