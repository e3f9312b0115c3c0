"""A projection to the vocabulary and its cross entropy on a CPU, by how many labels count: time and multiplications.

    python -m benchmarks.ignored_labels [--tokens 2048] [--hidden 512] [--classes 8192] [--rounds 4]

Forward and backward of the mean loss in float32, every second label ignored for "1/2", and so on; one thread, the least
processor time of some runs in turn. Multiplications are those of the products that the profiler saw.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import glue_compiler.ops  # noqa: F401  registers torch.ops.glue

SHARES = (1, 2, 4)
PRODUCTS = {"aten::mm": slice(2), "aten::addmm": slice(1, 3), "aten::addmm_": slice(1, 3)}


def eager(rows: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(rows, weight), target)


def glue(rows: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    needs_grad = [True, weight.requires_grad, False]
    how = "mean", -100, 0.0, 1.0, 0.0, torch.float32
    return torch.ops.glue.linear_cross_entropy([rows], [weight], None, target, None, *how, needs_grad, False)[0]


def multiplications(run: Callable[[], object]) -> int:
    with torch.profiler.profile(record_shapes=True) as profile:
        run()
    found = (event.input_shapes[PRODUCTS[event.name]] for event in profile.events() if event.name in PRODUCTS)
    return sum(left[0] * left[1] * right[1] for left, right in found)


def least(functions: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    times = dict.fromkeys(functions, float("inf"))
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.process_time()
            function()
            times[name] = min(times[name], time.process_time() - start)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"tokens": 2048, "hidden": 512, "classes": 8192, "rounds": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rows = torch.randn(given.tokens, given.hidden, requires_grad=True)
    weight = torch.randn(given.classes, given.hidden) / given.hidden**0.5
    labels = torch.randint(given.classes, (given.tokens,))
    for trained in (True, False):
        weight.requires_grad_(trained)
        functions: dict[str, Callable[[], object]] = {}
        for name, loss in (("eager", eager), ("glue", glue)):
            for share in SHARES:
                target = torch.where(torch.arange(given.tokens) % share == 0, labels, -100)

                def step(loss: Callable[..., Tensor] = loss, target: Tensor = target) -> None:
                    rows.grad = weight.grad = None
                    loss(rows, weight, target).backward()

                functions[f"{name} 1/{share}"] = step
        times = least(functions, given.rounds)
        print(f"{'trained' if trained else 'frozen'} head, {given.tokens} x {given.hidden} x {given.classes}")
        for name, function in functions.items():
            whole = f"{name.split()[0]} 1/1"
            relative = multiplications(function) / multiplications(functions[whole])
            print(
                f"  {name:<10} {times[name] * 1e3:8.0f} ms {times[name] / times[whole]:6.2f} x"
                f"  {relative:5.2f} x the multiplications",
                flush=True,
            )


if __name__ == "__main__":
    main()
