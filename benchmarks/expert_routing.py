"""One mixture-of-experts layer as a user compiles it: eager loop, Inductor, transformers' grouped_mm, glue, the floor.

    python -m benchmarks.expert_routing [--models qwen3,gpt_oss,mixtral,mixtral_list] [--layers 4] [--quick]

The layers are transformers' unmodified modules (``mixtral_list`` is written by hand, with a ``ModuleList``), with
random weights, in bf16 on a GPU. All rows of a column run in turn within each round; shown are medians in milliseconds.
The floor is the time of the experts' products at the rate of a dense 8192-cubed product, timed in turn with the others.
Each step is first compared with the same layer in fp32 in eager mode: output and all gradients.

Modes: ``forward`` (no grad), ``training`` (forward, backward, gradients of everything), ``lora_input`` (the layer
frozen, a trainable low-rank change of its input), ``lora_experts`` (experts' weights frozen, with trainable low-rank
changes: ``W + B @ A`` in every step for stacked weights, peft's extra linears for a ``ModuleList``).
The row ``glue_torch`` is glue without kernels of other packages.
``--quick``: small layers on the CPU in fp32, which shows that everything runs and measures nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import gc
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import expert_routing_measure as measure
from benchmarks.expert_routing_layers import (
    LAYERS,
    LayerKind,
    LoraOnInput,
    build_layer,
    config_of,
    random_tokens,
    small,
    with_lora_on_experts,
)
from glue_compiler.backend import GlueBackend
from glue_compiler.report.session import Session

ROWS = ("eager", "inductor", "grouped_mm", "glue")
GLUE = {"glue": "all", "glue_torch": "torch"}
"""Row → the option ``kernels``."""
FLOOR = "floor"
PRODUCTS = {"forward": 1, "training": 3, "lora_input": 2, "lora_experts": 3}
"""Mode → how many times the arithmetic of the forward products."""
DENSE = 8192


@dataclasses.dataclass
class Cell:
    """What was measured of one row in one mode."""

    ms: float | None = None
    peak_gib: float | None = None
    waits: dict[str, int] = dataclasses.field(default_factory=dict)
    compile_seconds: float | None = None
    graphs: int | None = None
    nodes: int | None = None
    error: float | None = None
    error_in: str = ""
    failed: str = ""
    notes: list[str] = dataclasses.field(default_factory=list)


def compile_layer(layer: nn.Module, row: str, session: Session) -> Callable[[Tensor], Tensor]:
    if row == "eager":
        return layer
    if row in GLUE:
        options = {"passes": {"group_experts": True}, "kernels": GLUE[row]}
        return torch.compile(layer, backend=GlueBackend(session=session), options=options)
    return torch.compile(layer, backend="inductor")


def prepare(kind: LayerKind, row: str, mode: str, dtype: torch.dtype, device: str) -> nn.Module:
    layer = build_layer(kind, "grouped_mm" if row == "grouped_mm" else "eager", dtype, device)
    if mode == "lora_input":
        return LoraOnInput(layer, kind.shape)
    return with_lora_on_experts(layer) if mode == "lora_experts" else layer


class Run:
    """One row in one mode: its layer, its compiled form, and one step of it."""

    def __init__(self, kind: LayerKind, row: str, mode: str, dtype: torch.dtype, device: str) -> None:
        self.row, self.mode, self.session = row, mode, Session()
        self.layer = prepare(kind, row, mode, dtype, device)
        self.x = random_tokens(kind.shape, dtype, device).requires_grad_(mode != "forward")
        self.grad = torch.randn_like(self.x, requires_grad=False)
        self.call = compile_layer(self.layer, row, self.session)

    def step(self) -> Tensor:
        if self.mode == "forward":
            with torch.no_grad():
                return self.call(self.x)
        self.x.grad = None
        for parameter in self.layer.parameters():
            parameter.grad = None
        output = self.call(self.x)
        output.backward(self.grad)
        return output

    def reference(self) -> dict[str, Tensor]:
        """Of the same layer with the same values, in fp32 and not compiled."""
        exact = copy.copy(self)
        exact.layer = copy.deepcopy(self.layer).float()
        exact.x = self.x.detach().float().requires_grad_(self.x.requires_grad)
        exact.grad, exact.call = self.grad.float(), exact.layer
        return measure.results(exact.layer, exact.x, exact.step())

    def first_step(self, cell: Cell, wanted: dict[str, Tensor]) -> None:
        before = _unique_graphs()
        output = []
        cell.compile_seconds = measure.seconds(lambda: output.append(self.step()))
        cell.graphs = _unique_graphs() - before if self.row != "eager" else None
        cell.error, cell.error_in = measure.largest_error(measure.results(self.layer, self.x, output[0]), wanted)
        if self.row in GLUE:
            cell.nodes = sum(graph.nodes_after for graph in self.session.graphs)
            cell.notes = session_notes(self.session)


def session_notes(session: Session) -> list[str]:
    """What glue's passes did to the graphs, and why they left something alone."""
    notes = []
    for graph in session.graphs:
        counts = {name: n for p in graph.passes for name, n in p.counts.items() if n}
        notes.append(f"graph {graph.id}: {graph.nodes_before} → {graph.nodes_after} nodes, {counts or 'unchanged'}")
        notes += [f"skip: {skip.reason}" for p in graph.passes for skip in p.skips]
        notes += [f"error in {p.name}: {p.error}" for p in graph.passes if p.error]
        notes += [f"host sync: {sync.target} {sync.source}" for sync in graph.host_syncs]
        notes += [f"graph break: {graph.graph_break[0].splitlines()[0]}"] if graph.graph_break else []
    return notes + [f"capture: {event.reason}" for event in session.capture_events]


def capture_flags(row: str) -> contextlib.AbstractContextManager[object]:
    """One graph where Dynamo can make one: glue sets these flags for its own compiles, Inductor does not."""
    if row != "inductor":
        return contextlib.nullcontext()
    return torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True)


def _unique_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def reason(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


def measure_mode(
    kind: LayerKind, mode: str, rows: list[str], dtype: torch.dtype, device: str, top_kernels: int
) -> dict[str, Cell]:
    """All rows of one mode. What fails is a reason in its cell."""
    torch._dynamo.reset()
    cells, runs = {row: Cell() for row in rows}, {}
    wanted: dict[str, Tensor] = {}
    for row in rows:
        cell = cells[row]
        if row == "grouped_mm" and not kind.stacked:
            cell.failed = "for stacked weights only"
            continue
        try:
            run = Run(kind, row, mode, dtype, device)
            wanted = wanted or run.reference()
            with capture_flags(row):
                run.first_step(cell, wanted)
                run.step()
            runs[row] = run
        except Exception as error:
            cell.failed = reason(error)
    del wanted
    gc.collect()
    for row, run in runs.items():
        cells[row].peak_gib = measure.peak_gib(run.step, run.layer.parameters())
        cells[row].waits = measure.host_waits(run.step)
    steps: dict[str, measure.Step] = {row: run.step for row, run in runs.items()}
    dense = torch.randn(DENSE if device == "cuda" else 256, DENSE if device == "cuda" else 256, device=device).to(dtype)
    steps[FLOOR] = lambda: dense @ dense
    times = measure.milliseconds_in_turn(steps)
    operations = PRODUCTS[mode] * 2.0 * kind.shape.rows * 3 * kind.shape.hidden * kind.shape.intermediate
    cells[FLOOR] = Cell(ms=operations / (2.0 * dense.shape[0] ** 3) * times.pop(FLOOR))
    for row, ms in times.items():
        cells[row].ms = ms
        if row != "eager":
            cells[row].compile_seconds = (cells[row].compile_seconds or 0) - ms / 1e3
        else:
            cells[row].compile_seconds = None
    if top_kernels and device == "cuda":
        for row in [row for row in (*GLUE, "grouped_mm") if row in runs]:
            print(f"\nkernels of {row}, {mode}:")
            for name, launches, ms in measure.kernels(runs[row].step, top_kernels):
                print(f"  {ms:8.3f} ms {launches:4d} x  {name[:110]}")
    return cells


def number(value: float | None, pattern: str) -> str:
    return "" if value is None else format(value, pattern)


def print_mode(mode: str, cells: dict[str, Cell]) -> None:
    print(f"\n| {mode} | ms | x floor | peak GiB | host waits | compile s | graphs | nodes | largest error |")
    print("|---|---|---|---|---|---|---|---|---|")
    floor = cells[FLOOR].ms or 1.0
    for row, cell in cells.items():
        if cell.failed:
            print(f"| {row} | {cell.failed} | | | | | | | |")
            continue
        waits = ", ".join(f"{n} {what}" for what, n in cell.waits.items()) or ("" if row == FLOOR else "0")
        shown = [
            number(cell.ms, ".2f"),
            number(cell.ms and cell.ms / floor, ".2f"),
            number(cell.peak_gib, ".2f"),
            waits,
            number(cell.compile_seconds, ".1f"),
            number(cell.graphs, "d"),
            number(cell.nodes, "d"),
            f"{cell.error:.1e} in {cell.error_in}" if cell.error is not None else "",
        ]
        print(f"| {row} | {' | '.join(shown)} |")
    for row, cell in cells.items():
        for note in dict.fromkeys(cell.notes):
            print(f"  {row}: {note}")
    print(flush=True)


def measure_stack(kind: LayerKind, layers: int, rows: list[str], dtype: torch.dtype, device: str) -> None:
    """A model of ``layers`` decoder layers, each compiled by itself: how often the backend was called, and seconds."""
    from transformers import AutoModel

    print(f"\n| {layers} decoder layers, each compiled | backend calls | compile s | step ms |")
    print("|---|---|---|---|")
    for row in [row for row in rows if row != "eager" and (kind.stacked or row != "grouped_mm")]:
        torch._dynamo.reset()
        session, before = Session(), _unique_graphs()
        backend = GlueBackend(session=session)  # one for all, as the name "glue" is
        try:
            implementation = "grouped_mm" if row == "grouped_mm" else "eager"
            sizes = {"num_hidden_layers": layers, "vocab_size": 128, "pad_token_id": 0, "eos_token_id": 1}
            config = config_of(kind.model_type, kind.shape, implementation, **sizes, **attention_sizes(kind))
            with torch.device(device):
                model = AutoModel.from_config(config, attn_implementation="sdpa", experts_implementation=implementation)
            for layer in model.layers:
                if not kind.stacked:
                    layer.mlp = kind.build(kind.shape, implementation).to(device)
            model.to(dtype)
            for layer in model.layers:
                if row in GLUE:
                    options = {"passes": {"group_experts": True}, "kernels": GLUE[row]}
                    layer.compile(backend=backend, options=options)
                else:
                    layer.compile(backend="inductor")
            ids = torch.randint(2, 128, (1, min(kind.shape.tokens, 4096)), device=device)
            step = lambda model=model, ids=ids: model(ids, use_cache=False)[0].float().square().sum().backward()  # noqa: E731
            with capture_flags(row):
                first = measure.seconds(step)
                later = measure.seconds(step)
            calls = len(session.graphs) if row in GLUE else _unique_graphs() - before
            print(f"| {row} | {calls} | {first - later:.1f} | {later * 1e3:.1f} |")
            for note in dict.fromkeys(session_notes(session)):
                print(f"  {row}: {note}")
        except Exception as error:
            print(f"| {row} | {reason(error)} | | |")
        gc.collect()
    print(flush=True)


def attention_sizes(kind: LayerKind) -> dict[str, int]:
    head = 16 if kind.shape.hidden < 128 else 64
    return {"num_attention_heads": kind.shape.hidden // head, "num_key_value_heads": 1, "head_dim": head}


def measure_models(arguments: argparse.Namespace, device: str, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Print what the arguments ask for; returns the cells for ``--json``."""
    import transformers

    name = "CPU" if arguments.quick else torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, transformers {transformers.__version__}, {dtype}")
    rows = arguments.rows.split(",")
    kept: list[dict[str, Any]] = []
    for model in arguments.models.split(","):
        kind = small(LAYERS[model]) if arguments.quick else LAYERS[model]
        shape = kind.shape
        sizes = f"E={shape.experts}, k={shape.top_k}, H={shape.hidden}, I={shape.intermediate}, {shape.tokens} tokens"
        print(f"\n### {shape.name}: {sizes}", flush=True)
        for mode in arguments.modes.split(",") if arguments.modes != "none" else []:
            cells = measure_mode(kind, mode, rows, dtype, device, arguments.kernels)
            print_mode(mode, cells)
            kept += [{"model": model, "mode": mode, "row": row, **vars(cell)} for row, cell in cells.items()]
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
        if arguments.layers:
            measure_stack(kind, arguments.layers, rows, dtype, device)
    return kept


def main(arguments_given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(LAYERS), help=f"of {', '.join(LAYERS)}")
    parser.add_argument("--rows", default=",".join(ROWS), help=f"of {', '.join(ROWS)}, glue_torch")
    parser.add_argument("--modes", default=",".join(PRODUCTS), help=f"of {', '.join(PRODUCTS)}, or none")
    parser.add_argument("--layers", type=int, default=0, help="also a model of so many layers, compiled one by one")
    parser.add_argument("--kernels", type=int, default=0, help="print so many of the slowest kernels of each step")
    parser.add_argument("--quick", action="store_true", help="small layers on the CPU in fp32")
    parser.add_argument("--json", help="also write the numbers to this file")
    arguments = parser.parse_args(arguments_given)
    if not arguments.quick and not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device; --quick runs small layers on the CPU")
    device, dtype = ("cpu", torch.float32) if arguments.quick else ("cuda", torch.bfloat16)
    # The rows' layers share their code objects, and each row has entries of its own.
    entries = torch._dynamo.config.patch(recompile_limit=64)
    with entries, torch._inductor.config.patch(force_disable_caches=True):
        kept = measure_models(arguments, device, dtype)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(kept, file, indent=1)


if __name__ == "__main__":
    main()
