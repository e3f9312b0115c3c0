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

from demo.varlen_attention import document_bounds
from glue_compiler.ops.batch_memo import PrologueResults, key_of, memoized

CALLS, ROUNDS = 2000, 15


def microseconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=8192)
    arguments = parser.parse_args()
    device = arguments.device
    torch.set_num_threads(1)
    positions = torch.arange(arguments.tokens, device=device).remainder(16)[None]
    x = torch.ones(4, 4, device=device)
    bounds = document_bounds(positions)

    def rest(x: torch.Tensor, positions: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int) -> torch.Tensor:
        return x

    hit = memoized(rest, document_bounds, (1,), PrologueResults())
    cases = {"call": lambda: rest(x, positions, *bounds), "hit": lambda: hit(x, positions)}
    cases["key"] = lambda: key_of([positions])
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(ROUNDS):  # in turn, so that a machine that drifts drifts for all
        for name, case in cases.items():
            times[name].append(microseconds(case))
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(f"torch {torch.__version__} on {device}: " + ", ".join(f"{name} {us:.2f} µs" for name, us in medians.items()))
    print(f"a hit adds {medians['hit'] - medians['call']:.2f} µs (median of {ROUNDS} rounds of {CALLS} calls)")


if __name__ == "__main__":
    main()
