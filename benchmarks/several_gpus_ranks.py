"""One process of a case of benchmarks.several_gpus: torch's engine around a row's model, its steps, their figures."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from benchmarks.end_to_end_rows import Workload, sized
from benchmarks.end_to_end_variants import Variant, variant_of
from benchmarks.peers import base_of
from benchmarks.step_streams import recorded

ENGINES = ("fsdp", "ddp", "ddp-cut", "tensor")
WARM_UP = 4


@dataclass(frozen=True)
class Case:
    """``ROW[@TOKENS[xLAYERS]]:ENGINE:VARIANT``, on so many processes."""

    row: str
    engine: str
    variant: str
    processes: int


def prepared(workload: Workload, engine: str, variant: Variant, compiler: str, device: str) -> Any:
    """What is called: the model, compiled, wrapped or sharded.

    Raises:
        ValueError: the variant calls layers and head by itself, so that the engine's hooks on the model would not run.
    """
    if variant.by_regions or variant.peer is not None:
        raise ValueError("a variant that calls the model's parts by itself does not run what an engine hooks to it")
    torch._dynamo.config.optimize_ddp = engine == "ddp-cut"
    if engine.startswith("ddp"):
        return variant.compiled(replace(workload, model=DistributedDataParallel(workload.model)), compiler)
    mesh = dist.init_device_mesh(device, (dist.get_world_size(),))
    if engine == "tensor":
        _parallelize(workload, mesh)
        return variant.compiled(workload, compiler)
    call = variant.compiled(workload, compiler) if variant.by_layers else None
    for layer in workload.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(workload.model, mesh=mesh)
    return call if call is not None else variant.compiled(workload, compiler)


def _parallelize(workload: Workload, mesh: Any) -> None:
    """Each rank has heads, columns of the MLP and rows of the head; logits are gathered, as in torch's tutorial."""
    plan: dict[str, Any] = {}
    for module, names, style in (
        ("self_attn", ("q_proj", "k_proj", "v_proj"), ColwiseParallel),
        ("mlp", ("gate_proj", "up_proj"), ColwiseParallel),
        ("self_attn", ("o_proj",), RowwiseParallel),
        ("mlp", ("down_proj",), RowwiseParallel),
    ):
        plan |= {f"{module}.{name}": style() for name in names}
    for layer in workload.layers:
        parallelize_module(layer, mesh, plan)
    parallelize_module(base_of(workload), mesh, {"lm_head": ColwiseParallel(output_layouts=Replicate())})


def steps(
    case: Case, arguments: argparse.Namespace, wait_for_turn: Callable[[], None]
) -> Iterator[tuple[float, nn.Module]]:
    """Seconds of each of this process's steps, and the model; the third begins in this case's turn."""
    device: str = arguments.device
    torch.manual_seed(0)
    name, size = sized(case.row, device)
    variant = variant_of(case.variant)
    workload = variant.workload(name, size, device, arguments.compiler)
    call = prepared(workload, case.engine, variant, arguments.compiler, device)
    trained = [weight for weight in workload.model.parameters() if weight.requires_grad]
    kinds = ([weight for weight in trained if hasattr(weight, "to_local") is is_shared] for is_shared in (False, True))
    groups = [{"params": weights} for weights in kinds if weights]  # one call takes no DTensors beside plain ones
    optimizer = torch.optim.AdamW(groups, lr=1e-5, fused=device == "cuda")
    shares = case.engine == "tensor"  # all ranks have one batch
    generator = torch.Generator().manual_seed(0 if shares else dist.get_rank())
    for number in itertools.count():
        if number == 2:
            wait_for_turn()
        drawn = torch.randint(size.least, size.tokens, (), generator=generator)
        batch = workload.batch(int(drawn) if arguments.varying else size.tokens, generator)
        _wait(device)
        start = time.perf_counter()
        if arguments.exhaust and number == WARM_UP and dist.get_rank() == dist.get_world_size() - 1:
            _exhaust(device)
        with workload.around():
            loss = call(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        _wait(device)
        yield time.perf_counter() - start, workload.model


def _exhaust(device: str) -> None:
    """Asks for more memory than there is, as a batch does that is too long."""
    torch.empty(2**50, dtype=torch.uint8, device=device)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def measure(rank: int, folder: str, case: Case, arguments: argparse.Namespace) -> None:
    """Writes this process's figures to ``folder``, where ``go`` says that it is this case's turn."""
    device = arguments.device
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=case.processes)
    start, ready = time.perf_counter(), 0.0

    def wait_for_turn() -> None:
        nonlocal ready
        ready = time.perf_counter() - start
        if device == "cuda":
            torch.cuda.empty_cache()  # for the others
        Path(folder, f"ready{rank}").touch()
        while not Path(folder, "go").exists():
            time.sleep(0.05)

    each = steps(case, arguments, wait_for_turn)
    for _ in range(WARM_UP):
        next(each)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = [next(each)[0] for _ in range(arguments.steps)]
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    with recorded(Path(folder, "trace.json")) if arguments.timeline and rank == 0 else contextlib.nullcontext():
        _, model = next(each)
    found = {
        "ms": statistics.median(times) * 1e3,
        "best_ms": min(times) * 1e3,
        "peak_gib": peak,
        "ready_s": ready,
        "sums": _sums(model),
    }
    Path(folder, f"rank{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _sums(model: nn.Module) -> list[float]:
    """Of each weight; those of shards are not compared."""
    weights = (weight.detach() for weight in model.parameters() if weight.requires_grad)
    return [weight.double().sum().item() for weight in weights if not hasattr(weight, "to_local")]
