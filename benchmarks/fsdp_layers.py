"""Whole training steps under FSDP2 on the GPUs of one host, each decoder layer sharded and compiled by itself.

    python -m benchmarks.fsdp_layers [--row qwen3-bf16] [--variants glue,flex,inductor,eager] [--processes 2]

Rows and sizes are those of ``benchmarks.end_to_end``: an unmodified model, loss and AdamW included, one row of packed
documents that differ each step and process. Variants run one after the other, each in processes of its own. The table
has the median milliseconds of a step of the slowest process, its peak memory, and the seconds until two steps were
done.

On a CPU sizes are tiny, to test the code: ``--device cpu --compiler aot_eager``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from benchmarks.end_to_end_rows import ROWS, Size

VARIANTS = {"glue": "sdpa", "flex": "flex_attention", "inductor": "sdpa", "eager": "sdpa"}
"""Name → transformers' name for the attention."""


def steps(row: str, variant: str, size: Size, device: str, compiler: str, number: int) -> Iterator[float]:
    """Seconds of each of ``number`` steps of this process."""
    torch.manual_seed(0)
    mesh = dist.init_device_mesh(device, (dist.get_world_size(),))
    workload = ROWS[row].build(size, device, VARIANTS[variant])
    for layer in workload.layers:
        fully_shard(layer, mesh=mesh)
        if variant == "glue":
            layer.compile(backend="glue", options={"compiler": compiler})
        elif variant != "eager":
            layer.compile(backend=compiler)
    fully_shard(workload.model, mesh=mesh)
    trained = [weight for weight in workload.model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=device == "cuda")
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(number):
        batch = workload.batch(size.tokens, generator)
        _wait(device)
        start = time.perf_counter()
        with workload.around():
            loss = workload.model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        _wait(device)
        yield time.perf_counter() - start


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def measure(rank: int, folder: str, arguments: argparse.Namespace, variant: str) -> None:
    """One process of one variant; writes its figures to ``folder``."""
    device = arguments.device
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=arguments.processes)
    tokens = arguments.tokens or (256 if device == "cpu" else ROWS[arguments.row].tokens)
    size = Size(tokens, tokens, arguments.layers, device == "cpu")
    start = time.perf_counter()
    ready, times = 0.0, []
    for index, seconds in enumerate(
        steps(arguments.row, variant, size, device, arguments.compiler, arguments.steps + 4)
    ):
        if index == 1:
            ready = time.perf_counter() - start
        if index >= 4:
            times.append(seconds)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    found = {"ms": statistics.median(times) * 1e3, "peak_gib": peak, "ready_s": ready}
    Path(folder, f"rank{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", default="qwen3-bf16", choices=list(ROWS))
    parser.add_argument("--variants", default=",".join(VARIANTS), help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--tokens", type=int, help="in a row; a row of the table has its own")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--steps", type=int, default=10, help="timed, after four others")
    parser.add_argument("--compiler", default="inductor", choices=("inductor", "aot_eager"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    arguments = parser.parse_args()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast over NVLink is not to be had in every virtual machine
    print("| | step ms | GiB | ready s |\n|---|---|---|---|", flush=True)
    for variant in arguments.variants.split(","):
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(measure, (folder, arguments, variant), nprocs=arguments.processes)
            found: list[dict[str, Any]] = [json.loads(path.read_text()) for path in Path(folder).glob("rank*.json")]
        worst = {name: max(each[name] for each in found) for name in found[0]}
        print(f"| {variant} | {worst['ms']:.1f} | {worst['peak_gib']:.1f} | {worst['ready_s']:.0f} |", flush=True)


if __name__ == "__main__":
    main()
