"""The longest sequence that trains in a given amount of device memory."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import torch

from benchmarks.checkpoint_decoder import Shape
from benchmarks.checkpoint_rows import batch_for, clean_up, model_of, prepare, stepper

GRAIN = 1024
"""Lengths are multiples of so many tokens."""


def longest(trains: Callable[[int], bool], start: int, limit: int, steps: int = 4) -> int:
    """The largest multiple of GRAIN that ``trains``, which is true up to some length: by doubling, then by halving.

    0 when not even GRAIN tokens train. The result is less than ``2 ** -steps`` of itself, or one GRAIN, too short.
    """
    good, bad = 0, start
    while bad <= limit and trains(bad):
        good, bad = bad, 2 * bad
    for _ in range(steps):
        middle = (good + bad) // 2 // GRAIN * GRAIN
        if middle <= good:
            break
        if trains(middle):
            good = middle
        else:
            bad = middle
    return good


def print_longest(rows: Sequence[str], shape: Shape, budget: str, device: torch.device, model_name: str) -> None:
    """One line for each row: one sequence of so many tokens, in a process limited to ``budget`` bytes of the device.

    Raises:
        RuntimeError: without a GPU.
    """
    from glue_compiler.options import parse_bytes

    if device.type != "cuda":
        raise RuntimeError("the longest sequence is measured on a GPU")
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(parse_bytes(budget) / total, device)
    for row in rows:
        start = time.perf_counter()
        found = _longest_of(row, dataclasses.replace(shape, batch=1), device, model_name)
        print(f"{row:<12} {found:>8} tokens in {budget} ({time.perf_counter() - start:.0f} s of trying)", flush=True)
        clean_up(device)


def _longest_of(row: str, shape: Shape, device: torch.device, model_name: str) -> int:
    limit = 2**17  # one more, and Inductor would need 64-bit indices for the MLP, which is another compile
    model = model_of(model_name, dataclasses.replace(shape, tokens=limit), device)
    call, context = prepare(row, model, dynamic=True)

    def trains(tokens: int) -> bool:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        try:
            batch = batch_for(model_name, dataclasses.replace(shape, tokens=tokens), device)
            stepper(call, context, model, batch)()
        except torch.OutOfMemoryError:
            for p in model.parameters():
                p.grad = None
            print(f"  {tokens} tokens: out of memory", flush=True)
            return False
        print(f"  {tokens} tokens: {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB at the peak", flush=True)
        return True

    return longest(trains, shape.tokens, limit)
