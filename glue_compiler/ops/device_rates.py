"""How fast a device computes, reads and copies: measured once, and kept in a file for the processes that follow."""

from __future__ import annotations

import contextlib
import functools
import getpass
import tempfile
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from glue_compiler.compat.wrapper_tensors import out_of_modes
from glue_compiler.ops import cards
from glue_compiler.ops.measured_book import MeasuredBook
from glue_compiler.ops.page_locked import locked_copy

_GUESSED = (1e11, 1e10, 1e10)
"""For devices whose speed is not measured, CPUs among them: plans then depend on sizes alone."""

_LOAD_SIZE = 4096
"""Of products that run in front of what is measured."""
_LOAD_SECONDS, _QUEUE_SECONDS = 0.1, 5e-3
"""Before the first run, and in front of each."""
_MOST_RUNS, _AGREE = 16, 1.03
"""Of what is measured; and how far apart two may be that agree."""


@dataclass(frozen=True)
class Rates:
    """Floating-point operations and bytes of its own memory a second; bytes a second to or from the host."""

    flops: float
    memory: float
    link: float


@dataclass(frozen=True)
class Sized:
    """A tensor's sizes, strides and dtype."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return (1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))) * self.dtype.itemsize


@functools.cache
def rates_of(device: torch.device) -> Rates:
    """The rates of a CUDA device by three short measurements, a product of bf16 or fp16 among them; others: a guess."""
    if device.type != "cuda":
        return Rates(*_GUESSED)
    return Rates(*_remembered("rates under load", device, lambda: astuple(_measured_rates(device))))


class Measured(NamedTuple):
    """One call of an operator: its time, and all bytes that it allocates, those of its results among them."""

    seconds: float
    allocated: int


def measured_call(operator: torch._ops.OpOverload, args: Any, kwargs: Any, device: torch.device) -> Measured | None:
    """What one call takes on a CUDA device, on random tensors in the place of each :class:`Sized`.

    None where random operands may be wrong ones (whole numbers, but for states of random generators), there is little
    memory, or the call fails.
    """
    leaves, structure = tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Sized)]
    if any(0 in t.shape or not (t.dtype.is_floating_point or len(t.shape) == 0) for t in tensors):
        return None
    if operator._schema.is_mutable or sum(t.nbytes for t in tensors) > torch.cuda.mem_get_info(device)[0] / 8:
        return None

    def measure() -> tuple[float, int] | None:
        with torch.random.fork_rng([device]), contextlib.suppress(RuntimeError):  # out of memory is one too
            filled = [_random(leaf, device) if isinstance(leaf, Sized) else leaf for leaf in leaves]
            args, kwargs = tree_unflatten(filled, structure)
            seconds = _seconds_under_load(lambda: operator(*args, **kwargs), device)
            before = _ever_allocated(device)
            operator(*args, **kwargs)
            return seconds, max(1, _ever_allocated(device) - before)
        return None

    found = _remembered(f"call under load of {operator} {leaves}", device, measure)
    return None if found is None else Measured(*found)


def _ever_allocated(device: torch.device) -> int:
    """A count that only grows: peaks are the user's, who may reset them."""
    return int(torch.cuda.memory_stats(device)["allocated_bytes.all.allocated"])


def _measured_rates(device: torch.device) -> Rates:
    size = 4096
    a = torch.randn(size, size, device=device, dtype=_dtype_of_products(device))
    b, out = torch.randn_like(a), torch.empty_like(a)
    product = _seconds_under_load(lambda: torch.mm(a, b, out=out), device)
    # As much as stays clear of the caches, and of what a small card has left.
    nbytes = min(2**28, max(2**26, torch.cuda.mem_get_info(device)[0] // 16))
    large = torch.empty(nbytes, device=device, dtype=torch.uint8)
    other = torch.empty_like(large)
    copy = _seconds_under_load(lambda: other.copy_(large), device)
    host = locked_copy(torch.empty(2**26, dtype=torch.uint8))
    link = min(_seconds(lambda: large[: 2**26].copy_(host, non_blocking=True), 2) for _ in range(3))
    return Rates(2 * size**3 / product, 2 * nbytes / copy, 2**26 / link)


def _seconds_under_load(run: Callable[[], object], device: torch.device) -> float:
    """As in a training step: of a card that computes all the time, which lowers its clock, and behind work that was
    given to it before, so that a host that is busy with other things does not count.

    The least of several runs, of which two agree: other programs on the card take turns with this one.
    """
    a, out = torch.randn(2, _LOAD_SIZE, _LOAD_SIZE, device=device, dtype=_dtype_of_products(device))

    def load() -> None:
        torch.mm(a, a, out=out)

    product = _seconds(load, 1)
    run()
    _seconds(load, _times(_LOAD_SECONDS, product))
    found: list[float] = []
    while len(found) < _MOST_RUNS and not (len(found) > 2 and found[1] <= _AGREE * found[0]):
        for _ in range(_times(_QUEUE_SECONDS, product)):
            load()
        found = sorted([*found, _seconds(run, 1, warm=True)])
    return found[0]


def _dtype_of_products(device: torch.device) -> torch.dtype:
    """That the card is fast in: those before bf16 emulate it."""
    card = cards.of_device(device)
    return torch.bfloat16 if card is None or card.multiplies else torch.float16


def _times(seconds: float, product: float) -> int:
    return min(1000, max(1, round(seconds / product)))


def _random(sized: Sized, device: torch.device) -> torch.Tensor:
    made = torch.empty_strided(sized.shape, sized.stride, dtype=sized.dtype, device=device)
    return made.normal_() if sized.dtype.is_floating_point else made.zero_()


def _seconds(run: Callable[[], object], times: int, *, warm: bool = False) -> float:
    """Of one run, behind one that is not counted, or, if it is ``warm``, none."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if not warm:
        run()
    start.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / times


def _remembered(key: str, device: torch.device, measure: Callable[[], Any]) -> Any:
    def alone() -> Any:
        with out_of_modes(), torch.no_grad(), torch.cuda.device(device):
            return measure()

    return _book_of(torch.cuda.get_device_name(device), torch.__version__).remembered(key, alone)


@functools.cache
def _book_of(device: str, version: str) -> MeasuredBook:
    folder = Path(tempfile.gettempdir()) / f"glue_{getpass.getuser()}"
    name = "".join(letter if letter.isalnum() else "_" for letter in f"{device}_{version}")
    return MeasuredBook(folder / f"rates_{name}.json")
