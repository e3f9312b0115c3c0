"""Draw a training step with checkpoint offload: predicted, and measured where there is a GPU, in one SVG.

    python -m benchmarks.offload_timeline [--shape 14b] [--layers 16] [--teraflops 600] [--link 50]
    python -m benchmarks.offload_timeline --measure              # needs a GPU: records one compiled step
    python -m benchmarks.offload_timeline --trace trace.json     # a Chrome trace of one step, by torch.profiler

The prediction needs no GPU: the layers of the decoder that the offload benchmarks train, a speed of compute and a link.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from benchmarks.checkpoint_decoder import Decoder, Shape, add_shape_arguments, batch_of, shape_of
from benchmarks.checkpoint_rows import stepper
from benchmarks.offload_simulator import Event, Link, Region
from benchmarks.profiler_trace import MeasuredStep, read_step
from benchmarks.step_timeline import Timeline, memory_over_time, simulate
from benchmarks.timeline_svg import Panel, Span, draw

GIB = 2**30
LANES = {"compute": "compute", "device_to_host": "copy to host", "host_to_device": "copy from host"}
BYTES_PER_ELEMENT = 2  # bf16


def regions_of(shape: Shape, flops: float) -> list[Region]:
    """One for each layer of the benchmarks' decoder, at ``flops`` floating-point operations a second."""
    tokens = shape.batch * shape.tokens
    product = 2 * shape.layer_weights * tokens
    # Two products of causal attention: each query meets half of the keys.
    attention = 2 * shape.batch * shape.tokens**2 * shape.heads * shape.head_size
    # Recomputation and gradients of inputs, for the weights are frozen; backward of attention is 5 products.
    backward = 2 * product + (1 + 2.5) * attention
    return [
        Region(layer, shape.input_bytes, (product + attention) / flops, backward / flops)
        for layer in range(shape.layers)
    ]


def base_bytes_of(shape: Shape) -> int:
    """Roughly what else is there: weights, and what one layer's backward recomputes."""
    weights = shape.layers * shape.layer_weights * BYTES_PER_ELEMENT
    return weights + shape.batch * shape.tokens * (8 * shape.hidden + 4 * shape.intermediate) * BYTES_PER_ELEMENT


def predicted_panel(title: str, timeline: Timeline, regions: Sequence[Region], moved: Sequence[int]) -> Panel:
    """A panel of a simulated step; labels are F and B for forward and backward, and the region."""
    lanes = tuple(
        (name, tuple(_span(event) for event in timeline.events if event.engine == engine))
        for engine, name in LANES.items()
        if moved or engine == "compute"
    )
    memory = memory_over_time(timeline.events, regions, moved)
    return Panel(
        title=f"{title}: {_summary(timeline.step_seconds, timeline.peak_bytes, timeline.overlap if moved else None)}",
        lanes=lanes,
        memory=tuple((second * 1e3, held / GIB) for second, held in memory),
    )


def measured_panel(title: str, step: MeasuredStep, peak_bytes: int | None = None) -> Panel:
    """A panel of a recorded step. Copies count as regions: out from the first region, back from the last one moved."""
    out = sum(span.engine == "device_to_host" for span in step.spans)
    lanes = []
    for engine, name in LANES.items():
        bars = []
        for span in step.spans:
            if span.engine == engine:
                region = out - 1 - (span.copy or 0) if engine == "host_to_device" else span.copy
                label = "" if region is None else str(region)
                bars.append(Span(span.start * 1e3, span.end * 1e3, region if region in range(out) else None, label))
        lanes.append((name, tuple(bars)))
    return Panel(f"{title}: {_summary(step.step_seconds, peak_bytes, step.overlap)}", tuple(lanes))


def _span(event: Event) -> Span:
    prefix = {"forward": "F", "backward": "B", "wait": "waits for "}.get(event.kind, "")
    label = f"{prefix}{event.region}"
    return Span(event.start * 1e3, event.end * 1e3, event.region, label, waiting=event.kind == "wait")


def _summary(seconds: float, peak_bytes: int | None, overlap: float | None) -> str:
    parts = [f"step {seconds * 1e3:.1f} ms"]
    if peak_bytes is not None:
        parts.append(f"peak {peak_bytes / GIB:.2f} GiB")
    if overlap is not None:
        parts.append(f"{overlap:.0%} of copying under compute")
    return ", ".join(parts)


def predictions(regions: Sequence[Region], link: Link, base: int, buffers: int) -> list[Panel]:
    """No offload, serial copies and the overlapped schedule of all inputs but the last region's."""
    moved = [region.index for region in regions[:-1]]
    alone = simulate(regions, link, (), "none", base_bytes=base)
    panels = [predicted_panel("Predicted, no offload", alone, regions, ())]
    serial = simulate(regions, link, moved, "serial", base_bytes=base)
    panels.append(predicted_panel("Predicted, serial copies", serial, regions, moved))
    overlapped = simulate(regions, link, moved, "overlapped", buffers=buffers, base_bytes=base)
    panels.append(predicted_panel(f"Predicted, overlapped with {buffers} buffers", overlapped, regions, moved))
    return panels


def training_step(shape: Shape, options: dict[str, Any], device: torch.device) -> Callable[[], float]:
    """One forward and backward of the benchmarks' decoder, compiled by glue."""
    torch.manual_seed(0)
    model = Decoder(shape, device)
    call = torch.compile(model, backend="glue", fullgraph=True, options=options)
    return stepper(call, nullcontext, model, batch_of(shape, device))


def record_step(step: Callable[[], float], warm_up: int = 5) -> tuple[list[dict[str, Any]], int]:
    """Trace events of one ``step`` on the current GPU, and the most bytes allocated in the one before it."""
    for _ in range(warm_up):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"], peak


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shape_arguments(parser)
    parser.add_argument("--teraflops", type=float, default=600.0, help="reached in compute, a second")
    parser.add_argument("--link", type=float, default=50.0, help="GB/s in each direction")
    parser.add_argument("--latency", type=float, default=10.0, help="microseconds of each copy")
    parser.add_argument("--base", type=float, help="GiB besides the saved inputs; estimated without it")
    parser.add_argument("--buffers", type=int, default=2)
    parser.add_argument("--measure", action="store_true", help="record a compiled step on the GPU too")
    parser.add_argument("--trace", type=Path, help="draw this recorded step too")
    parser.add_argument("--output", type=Path, default=Path("offload_timeline.svg"))
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    given = parse_arguments(arguments)
    shape = shape_of(given)
    regions = regions_of(shape, given.teraflops * 1e12)
    link = Link(given.link * 1e9, given.link * 1e9, given.latency * 1e-6)
    base = base_bytes_of(shape) if given.base is None else round(given.base * GIB)
    panels = predictions(regions, link, base, given.buffers)
    if given.trace:
        panels.append(measured_panel("Measured", read_step(json.loads(given.trace.read_text())["traceEvents"])))
    if given.measure:
        trace, peak = record_step(training_step(shape, {"offload": "checkpoints"}, torch.device("cuda")))
        panels.append(measured_panel("Measured", read_step(trace), peak))
    title = f"Checkpoint offload: {shape.layers} layers of {shape.hidden}, {shape.batch} by {shape.tokens} tokens"
    rates = f"{given.teraflops:g} TFLOP/s, {given.link:g} GB/s each way, frozen weights"
    subtitle = f"{rates}. F: forward, B: backward with recomputation, dashed: compute waits."
    given.output.write_text(draw(title, subtitle, panels), encoding="utf-8")
    for panel in panels:
        print(panel.title)
    print(f"wrote {given.output}")


if __name__ == "__main__":
    main()
