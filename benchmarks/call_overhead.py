"""Host time of one call of a compiled module, glue against the same compiler without glue.

    python -m benchmarks.call_overhead

The module is one small linear layer handed to AOTAutograd's eager operators, so that the call itself is what is timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

CALLS, ROUNDS = 2000, 15


def microseconds(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        call(x)
    return (time.perf_counter() - start) / CALLS * 1e6


def main() -> None:
    torch.set_num_threads(1)
    x, times = torch.ones(4, 4), {"aot_eager": [], "glue": []}
    with torch.no_grad():
        layers = {name: torch.nn.Linear(4, 4) for name in times}
        layers["aot_eager"].compile(backend="aot_eager")
        layers["glue"].compile(backend="glue", options={"compiler": "aot_eager"})
        for layer in layers.values():
            microseconds(layer, x)
        for _ in range(ROUNDS):  # in turn, so that a machine that drifts drifts for both
            for name, layer in layers.items():
                times[name].append(microseconds(layer, x))
    medians = {name: statistics.median(values) for name, values in times.items()}
    difference = statistics.median(b - a for a, b in zip(*times.values(), strict=True))
    print(f"torch {torch.__version__}: " + ", ".join(f"{name} {us:.1f} µs a call" for name, us in medians.items()))
    print(f"glue adds {difference:+.2f} µs (median of {ROUNDS} paired rounds of {CALLS} calls)")


if __name__ == "__main__":
    main()
