"""Whole training steps on the GPUs of one host, with torch's engines, beside the same on one of them.

    python -m benchmarks.several_gpus [--rows qwen3-bf16,llama-8b-lora] [--engines fsdp-layers,ddp]
        [--variants glue,inductor,flex] [--processes 1,2]
    python -m benchmarks.several_gpus --engines ddp --variants glue --varying --steps 1000

Rows and sizes are those of ``benchmarks.end_to_end``: an unmodified model, loss and AdamW included, one row of packed
documents that differ each step and process. A row that ends in ``+offload`` keeps the inputs of checkpointed layers in
host memory: with glue by ``offload_checkpoints()``, with the others by torch's ``save_on_cpu``. Each line of the table
comes from processes of its own, one after the other.

Engines: ``fsdp-layers`` shards and compiles each decoder layer by itself, ``fsdp-regions`` shards each and compiles
the model with glue's ``regions="auto"``, as does ``ddp-regions``; ``ddp`` compiles what is wrapped, in one graph;
``ddp-layers`` compiles each layer; ``ddp-cut`` is torch's default, which cuts the graph for each bucket (it
takes no checkpoints). ``flex`` is Inductor with transformers' flex_attention, the others have sdpa.

The table has the median milliseconds of a step of the slowest process and its peak memory, the seconds until two steps
were done, how much of one process's speed each of several has, and under DDP whether all end with the same weights.
``--varying`` draws the total of tokens anew for each step and process.

On a CPU sizes are tiny, to test the code: ``--device cpu --compiler aot_eager --processes 1,2``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import glue_compiler
from benchmarks.end_to_end_rows import ROWS, Size, Workload

ENGINES = ("fsdp-layers", "fsdp-regions", "ddp", "ddp-regions", "ddp-layers", "ddp-cut")
VARIANTS = {"glue": "sdpa", "inductor": "sdpa", "flex": "flex_attention", "eager": "sdpa"}
"""Name → transformers' name for the attention."""
OFFLOAD = "+offload"
WARM_UP = 4
COLUMNS = ("step ms", "GiB", "ready s", "scaling", "equal weights")


def prepared(workload: Workload, engine: str, variant: str, compiler: str, device: str) -> Any:
    """What is called: the model, wrapped and compiled."""
    how: dict[str, Any] = {"backend": compiler}
    if variant == "glue":
        regions = "auto" if engine.endswith("-regions") else "whole"
        how = {"backend": "glue", "options": {"compiler": compiler, "regions": regions}}
    elif engine.endswith("-regions"):
        raise ValueError(f"'{variant}' has no regions")
    compiles = variant != "eager"
    torch._dynamo.config.optimize_ddp = engine == "ddp-cut"
    if compiles and engine.endswith("-layers"):
        for layer in workload.layers:
            layer.compile(**how)
    if engine.startswith("fsdp"):
        mesh = dist.init_device_mesh(device, (dist.get_world_size(),))
        for layer in workload.layers:
            fully_shard(layer, mesh=mesh)
        sharded = fully_shard(workload.model, mesh=mesh)
        return torch.compile(sharded, **how) if engine == "fsdp-regions" else sharded
    wrapped = DistributedDataParallel(workload.model)
    return torch.compile(wrapped, **how) if compiles and not engine.endswith("-layers") else wrapped


def offloading(variant: str, device: str) -> contextlib.AbstractContextManager[Any]:
    if variant == "glue":
        return glue_compiler.offload_checkpoints()
    return torch.autograd.graph.save_on_cpu(pin_memory=device == "cuda")


def steps(row: str, engine: str, variant: str, arguments: argparse.Namespace) -> Iterator[tuple[float, nn.Module]]:
    """Seconds of each of this process's steps, and the model."""
    device: str = arguments.device
    torch.manual_seed(0)
    name = row.removesuffix(OFFLOAD)
    tokens = arguments.tokens or (256 if device == "cpu" else ROWS[name].tokens)
    size = Size(tokens, tokens * 6000 // 8192, arguments.layers, device == "cpu")
    workload = ROWS[name].build(size, device, VARIANTS[variant])
    call = prepared(workload, engine, variant, arguments.compiler, device)
    trained = [weight for weight in workload.model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=device == "cuda")
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(WARM_UP + arguments.steps):
        drawn = torch.randint(size.least, size.tokens, (), generator=generator)
        batch = workload.batch(int(drawn) if arguments.varying else size.tokens, generator)
        _wait(device)
        start = time.perf_counter()
        with offloading(variant, device) if row.endswith(OFFLOAD) else contextlib.nullcontext(), workload.around():
            loss = call(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        _wait(device)
        yield time.perf_counter() - start, workload.model


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def measure(rank: int, folder: str, processes: int, which: tuple[str, str, str], arguments: argparse.Namespace) -> None:
    """One process of one line; writes its figures to ``folder``."""
    device = arguments.device
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=processes)
    start = time.perf_counter()
    ready, times = 0.0, []
    for index, step in enumerate(steps(*which, arguments)):
        if index == 1:
            ready = time.perf_counter() - start
        if index == WARM_UP - 1 and device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        if index >= WARM_UP:
            times.append(step[0])
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    found = {"ms": statistics.median(times) * 1e3, "peak_gib": peak, "ready_s": ready, "sums": _sums(step[1])}
    Path(folder, f"rank{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _sums(model: nn.Module) -> list[float]:
    """Of each weight; those of shards are not compared."""
    weights = (weight.detach() for weight in model.parameters() if weight.requires_grad)
    return [weight.double().sum().item() for weight in weights if not hasattr(weight, "to_local")]


def run(processes: int, which: tuple[str, str, str], arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of one line; ``failed`` says why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            torch.multiprocessing.spawn(measure, (folder, processes, which, arguments), nprocs=processes)
        except Exception as error:  # of one process; the others were ended
            lines = [line for line in str(error).splitlines() if line and not line.startswith(" ")]
            return {"failed": lines[-1][:300]}
        found: list[dict[str, Any]] = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank*"))]
    worst = {name: max(each[name] for each in found) for name in ("ms", "peak_gib", "ready_s")}
    sums = [each["sums"] for each in found]
    are_equal = all(each == sums[0] for each in sums) if sums[0] and processes > 1 else None
    return {**worst, "equal": are_equal}


def line(processes: int, which: tuple[str, str, str], found: dict[str, Any], alone: dict[str, Any] | None) -> str:
    if "failed" in found:
        cells = [found["failed"]]
    else:
        scaling = f"{alone['ms'] / found['ms']:.3f}" if alone is not None and "ms" in alone else ""
        equal = {None: "", True: "yes", False: "NO"}[found["equal"]]
        cells = [f"{found['ms']:.1f}", f"{found['peak_gib']:.1f}", f"{found['ready_s']:.0f}", scaling, equal]
    return f"| {' | '.join([*which, str(processes), *cells])} |"


def main(argv: Sequence[str] | None = None) -> None:
    cards = torch.cuda.device_count()
    numbers = ",".join(dict.fromkeys(("1", str(max(1, cards)))))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="qwen3-bf16,llama-8b-lora", help=f"of {', '.join(ROWS)}, and with {OFFLOAD}")
    parser.add_argument("--engines", default="fsdp-layers,ddp", help=f"of {', '.join(ENGINES)}")
    parser.add_argument("--variants", default="glue,inductor,flex", help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--processes", default=numbers, help="one line for each; by default one, and all cards")
    parser.add_argument("--tokens", type=int, help="of each process; a row has its own")
    parser.add_argument("--varying", action="store_true", help="totals differ in each step and process")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--steps", type=int, default=10, help=f"timed, after {WARM_UP} others")
    parser.add_argument("--compiler", default="inductor", choices=("inductor", "aot_eager"))
    parser.add_argument("--device", default="cuda" if cards else "cpu", choices=("cuda", "cpu"))
    arguments = parser.parse_args(argv)
    rows, engines, variants = (value.split(",") for value in (arguments.rows, arguments.engines, arguments.variants))
    for given, known in ((engines, ENGINES), (variants, VARIANTS), ([r.removesuffix(OFFLOAD) for r in rows], ROWS)):
        if unknown := set(given) - set(known):
            parser.error(f"unknown: {', '.join(sorted(unknown))}; known are {', '.join(known)}")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast over NVLink is not to be had in every virtual machine
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    print(f"| row | engine | variant | processes | {' | '.join(COLUMNS)} |\n|{'---|' * (4 + len(COLUMNS))}", flush=True)
    for row in rows:
        for engine in engines:
            for variant in variants:
                which = (row, engine, variant)
                alone = None
                for processes in map(int, arguments.processes.split(",")):
                    found = run(processes, which, arguments)
                    print(line(processes, which, found, alone), flush=True)
                    alone = found if processes == 1 else alone


if __name__ == "__main__":
    main()
