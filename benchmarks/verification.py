"""What ``verify`` costs: step time and memory of a packed Qwen3 with it off and on, under glue, and that off is free.

    python3 -m benchmarks.verification --model qwen3-0.6b --tokens 4096          # a CUDA device
    python3 -m benchmarks.verification --model tiny --tokens 64 --device cpu

Each variant trains the same batches: forward, backward, no optimizer. Times are medians over the steps after two.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

from benchmarks.packed_metadata import build

VARIANTS: dict[str, dict[str, Any]] = {
    "inductor": {"backend": "inductor"},
    "glue": {"backend": "glue"},
    "glue, verify": {"backend": "glue", "options": {"verify": True}},
}


def batches(arguments: argparse.Namespace) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(arguments.steps):
        lengths: list[int] = []
        while sum(lengths) < arguments.tokens:
            lengths.append(int(torch.randint(arguments.tokens // 16, arguments.tokens // 2, (1,), generator=generator)))
        positions = torch.cat([torch.arange(n) for n in lengths])[None, : arguments.tokens]
        ids = torch.randint(0, 32000, positions.shape, generator=generator)
        made.append({"input_ids": ids.to(arguments.device), "position_ids": positions.to(arguments.device)})
    return made


def measure(how: dict[str, Any], arguments: argparse.Namespace) -> str:
    torch.compiler.reset()
    torch.manual_seed(0)
    model: Any = build(arguments.model, arguments.layers, arguments.device)
    model.config._attn_implementation = "benchmark_varlen_per_layer"
    call = torch.compile(model, **how)
    on_gpu = arguments.device == "cuda"
    times, losses = [], []
    for number, batch in enumerate(batches(arguments)):
        if on_gpu:
            torch.cuda.synchronize()
            if number == 2:
                torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        loss = call(**batch).last_hidden_state.float().square().mean()
        loss.backward()
        model.zero_grad()
        losses.append(loss.item())  # waits for the device
        times.append((time.perf_counter() - start) * 1e3)
    memory = f", peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB" if on_gpu else ""
    first, step = times[0] / 1e3, statistics.median(times[2:])
    return f"first step {first:.1f} s, step {step:.1f} ms{memory}, last loss {losses[-1]:.6f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    for name, how in VARIANTS.items():
        try:
            print(f"{name}: {measure(how, arguments)}", flush=True)
        except Exception as error:  # noqa: PERF203  one variant that fails must not stop the others
            print(f"{name}: {type(error).__name__}: {str(error)[:600]}", flush=True)


if __name__ == "__main__":
    main()
