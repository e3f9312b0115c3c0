"""Step time against peak memory of one model: glue's plans, beside torch's knapsack, policies and checkpoints.

    python -m benchmarks.memory_frontier                            # Qwen3-8B's width, 16 layers, 2 x 8192 tokens
    python -m benchmarks.memory_frontier --rows keep,plan-24GiB,plan-16GiB,checkpoints --svg docs/memory_frontier.svg
    python -m benchmarks.memory_frontier --shape tiny --tokens 256 --rows keep,regions      # a test, on a CPU

Rows: ``keep`` (glue, nothing is recomputed but what its compiler fuses), ``inductor`` (the same without glue),
``knapsack-S`` (Inductor with ``activation_memory_budget=S``), ``checkpoints`` (each layer is checkpointed), ``policy``
(the same, attention's results saved by a selective policy), ``offload`` (glue, ``offload="checkpoints"``), ``regions``
(glue, layers that checkpoint themselves, ``regions="auto"``), ``plan-B`` (the same within ``memory_budget=B``). All but
``knapsack``, ``inductor``, ``checkpoints`` and ``policy`` run glue; with ``-unshared`` at its end such a row compiles
each of equal layers. With ``-layers`` at its end a row compiles layers one by one (``torch.compile`` of each), and what
is around them is eager.

The model has random frozen weights; LoRA adapters of rank 16 on the query and value projections train, without an
optimiser. All rows compile side by side, each in a process of its own, and take memory at the same time; they are timed
one after the other when all are ready. Columns: milliseconds of a step, median; GiB at the peak; seconds of the first
step; glue's warnings, whose texts stand below the table; the largest difference of a gradient of the last step from the
first row's, relative to that gradient's largest number (what bf16 rounds is some hundredths).
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import statistics
import time
import traceback
import warnings
from multiprocessing.synchronize import Barrier, Lock
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from benchmarks.checkpoint_decoder import (
    Checkpointed,
    Decoder,
    RunLayer,
    Shape,
    add_shape_arguments,
    batch_of,
    checkpointed,
    shape_of,
)
from benchmarks.frontier_svg import Dot, draw
from glue_compiler.errors import GlueWarning

DEFAULT_ROWS = "keep,regions,plan-24GiB,plan-16GiB,plan-11.2GiB,knapsack-0.5,knapsack-0.2,checkpoints,policy,offload"
WARM_UP = 5
"""Steps behind the first one that are not timed: layers keep what fits by then."""
COLUMNS = ("step ms", "peak GiB", "first s", "warnings", "gradients")
GIB = 2**30


def without_checkpoint(layer: nn.Module, *given: Tensor) -> Tensor:
    result: Tensor = layer(*given)
    return result


def with_saved_attention(layer: nn.Module, *given: Tensor) -> Tensor:
    result: Tensor = checkpoint(
        layer,
        *given,
        use_reentrant=False,
        context_fn=functools.partial(create_selective_checkpoint_contexts, _save_attention),
    )
    return result


def _save_attention(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_attention = "attention" in str(operator)
    return CheckpointPolicy.MUST_SAVE if is_attention else CheckpointPolicy.PREFER_RECOMPUTE


def prepare(row: str) -> tuple[RunLayer, dict[str, Any]]:
    """How a row, without its ``-layers``, runs its layers, and what it hands to ``torch.compile``."""
    if row.endswith("-unshared"):
        run, settings = prepare(row.removesuffix("-unshared"))
        if "backend" not in settings:
            raise ValueError(f"'{row}': only glue shares layers")
        options = {**settings.get("options", {}), "passes": {"share_layers": False}}
        return run, {**settings, "options": options}
    kind, _, size = row.partition("-")
    if kind == "knapsack":
        torch._functorch.config.activation_memory_budget = float(size)
    if kind in ("inductor", "knapsack"):
        return without_checkpoint, {}
    if kind == "checkpoints":
        return checkpointed, {}
    if kind == "policy":
        return with_saved_attention, {}
    if kind == "keep":
        return without_checkpoint, {"backend": "glue"}
    if kind == "offload":
        return checkpointed, {"backend": "glue", "options": {"offload": "checkpoints"}}
    if kind in ("plan", "regions"):
        return without_checkpoint, {"backend": "glue", "options": {"memory_budget": size or None, "regions": "auto"}}
    raise ValueError(f"there is no row '{row}'; see --help")


def measure(row: str, number: int, shape: Shape, steps: int, everyone: Barrier, turn: Lock, folder: str) -> None:
    """In a process of its own: leaves its numbers as a file in ``folder``. Rows go over all cards in turn."""
    path = os.path.join(folder, row)
    found: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _measure_into(found, row, number, shape, steps, everyone, turn, path)
    found["messages"] = [str(each.message) for each in caught if issubclass(each.category, GlueWarning)]
    found["warnings"] = len(found["messages"])
    with open(f"{path}.json", "w") as file:
        json.dump(found, file)


def _measure_into(
    found: dict[str, Any], row: str, number: int, shape: Shape, steps: int, everyone: Barrier, turn: Lock, path: str
) -> None:
    try:
        cards = torch.cuda.device_count()
        device = torch.device("cuda", number % cards) if cards else torch.device("cpu")
        if cards:
            torch.cuda.set_device(device)
        step = Stepper(row, shape, device)
        found["first s"] = step() / 1e3
        for _ in range(WARM_UP):
            step()
        if cards:
            torch.cuda.empty_cache()
    except Exception as error:
        traceback.print_exc()
        found["error"] = f"{type(error).__name__}: {error}"[:200]
    everyone.wait()
    if "error" not in found:
        with turn:
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            found["step ms"] = statistics.median(step() for _ in range(steps))
            if device.type == "cuda":
                found["peak GiB"] = torch.cuda.max_memory_allocated() / GIB
            torch.save(step.gradients, f"{path}.gradients")


class Stepper:
    """Runs steps of a row, each timed in milliseconds; ``gradients`` are the last one's."""

    def __init__(self, row: str, shape: Shape, device: torch.device) -> None:
        torch.manual_seed(0)
        run_layer, settings = prepare(row.removesuffix("-layers"))
        by_layers, by_regions = row.endswith("-layers"), "regions" in settings.get("options", {})
        if by_layers:
            run_layer = torch.compile(run_layer, fullgraph=True, **settings)
        self.model = Decoder(shape, device, run_layer=run_layer)
        if by_regions:
            self.model.layers = nn.ModuleList(Checkpointed(layer) for layer in self.model.layers)
        self.batch = batch_of(shape, device)
        self.call = self.model if by_layers else torch.compile(self.model, fullgraph=not by_regions, **settings)
        self.gradients: list[Tensor | None] = []

    def __call__(self) -> float:
        self.gradients.clear()
        start = time.perf_counter()
        self.call(*self.batch).backward()
        inputs = (*self.model.parameters(), *self.batch)
        self.gradients += [tensor.grad for tensor in inputs]
        for tensor in inputs:
            tensor.grad = None
        if inputs[0].is_cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3


def _difference(path: str, first: str) -> float:
    """Of two files of gradients; infinite where one of them is None."""
    worst = 0.0
    for one, other in zip(torch.load(path), torch.load(first), strict=True):
        if one is None or other is None:
            worst = worst if one is other else float("inf")
        else:
            one, other = one.cpu().double(), other.cpu().double()
            worst = max(worst, float((one - other).abs().max() / other.abs().max()))
    return worst


def run(rows: list[str], shape: Shape, steps: int, folder: str) -> dict[str, dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    everyone, turn = context.Barrier(len(rows)), context.Lock()
    processes = [
        context.Process(target=measure, args=(row, number, shape, steps, everyone, turn, folder))
        for number, row in enumerate(rows)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    found = {}
    for row in rows:
        path = os.path.join(folder, f"{row}.json")
        found[row] = {"error": "the process ended"}
        if os.path.exists(path):
            with open(path) as file:
                found[row] = json.load(file)
        both = [os.path.join(folder, f"{each}.gradients") for each in (row, rows[0])]
        if all(map(os.path.exists, both)):
            found[row]["gradients"] = _difference(*both)
    return found


def main(arguments: list[str] | None = None) -> None:
    import tempfile

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shape_arguments(parser)
    parser.add_argument("--rows", default=DEFAULT_ROWS)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--svg", help="where to draw time against memory")
    given = parser.parse_args(arguments)
    shape, rows = shape_of(given), given.rows.split(",")
    with tempfile.TemporaryDirectory() as folder:
        found = run(rows, shape, given.steps, folder)
    print(f"torch {torch.__version__}, {shape}")
    print("| row |", " | ".join(COLUMNS), "|")
    print("|---" * (1 + len(COLUMNS)) + "|")
    for row, cells in found.items():
        texts = [cells["error"]] if "error" in cells else [_text(cells.get(column)) for column in COLUMNS]
        print(f"| {row} |", " | ".join(texts), "|")
    for row, cells in found.items():
        for message in dict.fromkeys(cells.get("messages", ())):
            print(f"{row}: {message}")
    if given.svg:
        dots = [Dot(row, c["peak GiB"], c["step ms"]) for row, c in found.items() if "peak GiB" in c]
        with open(given.svg, "w") as file:
            file.write(draw("Step time against peak memory", "peak, GiB", "step, ms", dots))


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}" if value >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    main()
