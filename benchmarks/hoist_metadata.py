"""hoist_metadata on the demo's model: graph sizes, host syncs, step times and compile times.

    python -m benchmarks.hoist_metadata [--layers 4] [--tokens 512] [--repeat 3] [--device cuda] [--modes ...]

Each measurement is a fresh process with caches off. "inductor" has Dynamo's capture flags set by hand, so that it
compiles the same single graph; "default" is plain ``backend="inductor"``, graph breaks and all. Varying lengths are
totals from three quarters of ``--tokens`` to all of them; the second step then compiles again, for any total.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

MODES = ("train", "train, varying lengths", "train, checkpointing", "no grad")
BACKENDS = ("eager", "default", "inductor", "glue")


def measure(backend: str, mode: str, layers: int, tokens: int, device: str) -> dict[str, Any]:
    """One model, compiled and run in this process: counts and seconds."""
    from demo.packed_model import packed_batches, packed_qwen3

    torch._inductor.config.force_disable_caches = True
    if backend == "inductor":
        torch._dynamo.config.capture_scalar_outputs = True
        torch._dynamo.config.capture_dynamic_output_shape_ops = True
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = packed_qwen3(layers=layers, checkpointing="checkpointing" in mode, dtype=dtype, device=device)
    least = tokens * 3 // 4 if "varying" in mode else tokens
    totals = [least + (tokens - least) * part // 7 for part in (3, 7, 0, 5, 1, 4, 2, 6)]
    batches = [packed_batches(1, total, seed, device=device)[0] for seed, total in enumerate(totals)]
    nodes: dict[str, int] = {}
    call = _compiled(model, backend, nodes)

    def step(batch: dict[str, torch.Tensor]) -> None:
        if mode == "no grad":
            with torch.no_grad():
                call(**batch)
        else:
            call(**batch).loss.backward()
            model.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()

    first = _seconds(step, batches[0]) + _seconds(step, batches[1])
    later = [_seconds(step, batch) for batch in batches[2:]]
    return {
        "compile": first - 2 * statistics.median(later),
        "step": statistics.median(later),
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        **nodes,
        **_operator_counts(lambda: step(batches[0])),
    }


def _compiled(model: torch.nn.Module, backend: str, nodes: dict[str, int]) -> Callable[..., Any]:
    if backend == "eager":
        return model

    def count(name: str) -> Callable[[torch.fx.Graph], None]:
        def add(graph: torch.fx.Graph) -> None:
            calls = sum(node.op == "call_function" for node in graph.nodes)
            which = name if name == "joint" or "forward" not in nodes else "backward"
            nodes[which] = nodes.get(which, 0) + calls

        return add

    options = {"joint_custom_pre_pass": count("joint"), "post_grad_custom_pre_pass": count("forward")}
    name = "glue" if backend == "glue" else "inductor"
    return torch.compile(model, backend=name, options=options if backend != "default" else None)


def _seconds(run: Callable[..., None], *args: Any) -> float:
    start = time.perf_counter()
    run(*args)
    return time.perf_counter() - start


def _operator_counts(run: Callable[[], None]) -> dict[str, int]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        run()
    counts = {event.key: event.count for event in profiler.key_averages()}
    return {"nonzero": counts.get("aten::nonzero", 0), "item": counts.get("aten::_local_scalar_dense", 0)}


def _in_fresh_process(backend: str, mode: str, arguments: argparse.Namespace) -> dict[str, Any] | None:
    sizes = [str(arguments.layers), str(arguments.tokens), arguments.device]
    command = [sys.executable, "-m", "benchmarks.hoist_metadata", "--one", backend, mode, *sizes]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        errors = [line for line in result.stderr.splitlines() if "Error" in line]
        return {"failed": errors[-1] if errors else result.stderr[-200:]}
    return json.loads(result.stdout.splitlines()[-1])


def _cells(runs: list[dict[str, Any]], base: list[dict[str, Any]]) -> list[str]:
    if "failed" in runs[0]:
        return [runs[0]["failed"][:60], *[""] * 7]
    last = runs[-1]
    sizes = [str(last.get(name, "")) for name in ("graphs", "joint", "forward", "backward", "nonzero", "item")]

    def ratio(name: str) -> str:
        median = statistics.median(run[name] for run in runs)
        shown = f"{median:.3f} s"
        usable = [run[name] for run in base if name in run]
        return f"{shown} ({median / statistics.median(usable):.2f} x)" if usable else shown

    return [*sizes, ratio("step"), ratio("compile") if last["graphs"] else ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        backend, mode, layers, tokens, device = arguments.one
        print(json.dumps(measure(backend, mode, int(layers), int(tokens), device)))
        return
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    console = Console(width=150)
    for mode in arguments.modes:
        runs: dict[str, list[dict[str, Any]]] = {backend: [] for backend in arguments.backends}
        for _ in range(arguments.repeat):  # in turn, so that a machine that drifts drifts for all
            for backend in arguments.backends:
                runs[backend].append(_in_fresh_process(backend, mode, arguments) or {})
        sizes = f"{arguments.layers} layers, {arguments.tokens} tokens"
        title = f"{mode}: {sizes}, {device}, torch {torch.__version__} (x: times inductor's)"
        table = Table("", "graphs", "joint", "forward", "backward", "nonzero", "item", "step", "compile", title=title)
        for backend in arguments.backends:
            table.add_row(backend, *_cells(runs[backend], runs.get("inductor", [])))
        console.print(table)


if __name__ == "__main__":
    main()
