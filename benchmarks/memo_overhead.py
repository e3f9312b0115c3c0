"""Host time that a hit in the batch memo adds to a call of a compiled layer.

    python -m benchmarks.memo_overhead [--device cuda] [--tokens 8192]

``call`` calls a Python function that is given ``cu_seqlens`` and ``max_seqlen``; ``hit`` has them looked up by
``position_ids``, of which ``key`` is the part that finds them. On a CPU it grows with ``--tokens``, which it compares.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from demo.varlen_attention import document_bounds
from glue_compiler.ops.batch_memo import PrologueResults, key_of, memoized

CALLS, ROUNDS = 2000, 15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=8192)
    arguments = parser.parse_args()
    device = arguments.device
    torch.set_num_threads(1)
    positions = torch.arange(arguments.tokens, device=device).remainder(16)[None]
    x = torch.ones(4, 4, device=device)
    # On a device, a layer that comes again begins a new pass.
    first, *layers = [torch.nn.Parameter(torch.ones(1, device=device)) for _ in range(CALLS + 1)]
    bounds = document_bounds(positions)
    computed = 0

    def rest(x: Tensor, weight: Tensor, positions: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        return x

    def prologue(positions: Tensor) -> tuple[Tensor, int]:
        nonlocal computed
        computed += 1
        return document_bounds(positions)

    def microseconds(call: Callable[[Tensor], object]) -> float:
        start = time.perf_counter()
        for weight in layers:
            call(weight)
        return (time.perf_counter() - start) / CALLS * 1e6

    times: dict[str, list[float]] = {"call": [], "hit": [], "key": []}
    for _ in range(ROUNDS):  # in turn, so that a machine that drifts drifts for all
        memoized_rest = memoized(rest, prologue, (2,), PrologueResults())
        memoized_rest(x, first, positions)
        times["call"].append(microseconds(lambda weight: rest(x, weight, positions, *bounds)))
        times["hit"].append(microseconds(lambda weight, call=memoized_rest: call(x, weight, positions)))
        times["key"].append(microseconds(lambda weight: key_of([positions])))
    assert computed == ROUNDS, "all but the first call of a round are hits"
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(f"torch {torch.__version__} on {device}: " + ", ".join(f"{name} {us:.2f} µs" for name, us in medians.items()))
    print(f"a hit adds {medians['hit'] - medians['call']:.2f} µs (median of {ROUNDS} rounds of {CALLS} calls)")


if __name__ == "__main__":
    main()
