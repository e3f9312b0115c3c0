"""Draw a training step with checkpoint offload: predicted, and measured where there is a GPU, in one SVG.

    python -m benchmarks.offload_timeline [--layers 16] [--length 8192] [--teraflops 600] [--link 50] [--budget 9.5]
    python -m benchmarks.offload_timeline --measure              # needs a GPU: records one compiled step
    python -m benchmarks.offload_timeline --trace trace.json     # a Chrome trace of one step, by torch.profiler

The prediction needs no GPU: decoder layers of the sizes given, a speed of compute and a link. Without options it is a
Qwen3-8B layer, 16 of them, with frozen weights (as with LoRA).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.profiler_trace import MeasuredStep, read_step
from benchmarks.timeline_svg import Panel, Span, draw
from glue_compiler.passes.overlap_offload.plan import OffloadPlan, plan_offload
from glue_compiler.passes.overlap_offload.simulator import Event, Link, Region, Timeline, memory_over_time, simulate

GIB = 2**30
LANES = {"compute": "compute", "device_to_host": "copy to host", "host_to_device": "copy from host"}
BYTES_PER_ELEMENT = 2  # bf16


@dataclass(frozen=True)
class Decoder:
    """Sizes of a decoder of equal layers with grouped-query attention and a gated MLP, and of its batch."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    head_size: int
    batch: int
    length: int
    frozen: bool

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def layer_weights(self) -> int:
        """Weights of one layer's matrices."""
        attention = self.hidden * self.head_size * 2 * (self.heads + self.key_value_heads)
        return attention + 3 * self.hidden * self.intermediate

    def regions(self, flops: float) -> list[Region]:
        """One for each layer, at ``flops`` floating-point operations a second."""
        product = 2 * self.layer_weights * self.tokens
        # Two products of causal attention: each query meets half of the keys.
        attention = 2 * self.batch * self.length**2 * self.heads * self.head_size
        # Recomputation, gradients of inputs and, unless frozen, of weights; backward of attention is 5 products.
        backward = (2 if self.frozen else 3) * product + (1 + 2.5) * attention
        nbytes = self.tokens * self.hidden * BYTES_PER_ELEMENT
        return [Region(layer, nbytes, (product + attention) / flops, backward / flops) for layer in range(self.layers)]

    def base_bytes(self) -> int:
        """Roughly what else is there: weights (and their gradients), and what one layer's backward recomputes."""
        weights = self.layers * self.layer_weights * BYTES_PER_ELEMENT * (1 if self.frozen else 2)
        return weights + self.tokens * (8 * self.hidden + 4 * self.intermediate) * BYTES_PER_ELEMENT


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


def predictions(plan: OffloadPlan, regions: Sequence[Region], link: Link, base: int) -> list[Panel]:
    """No offload, serial copies and the overlapped schedule of one plan."""
    alone = simulate(regions, link, (), "none", base_bytes=base)
    panels = [predicted_panel("Predicted, no offload", alone, regions, ())]
    if plan.moved:
        serial = simulate(regions, link, plan.moved, "serial", base_bytes=base)
        panels.append(predicted_panel("Predicted, serial copies", serial, regions, plan.moved))
        overlapped = simulate(regions, link, plan.moved, "overlapped", buffers=plan.buffers, base_bytes=base)
        title = f"Predicted, overlapped with {plan.buffers} buffers"
        panels.append(predicted_panel(title, overlapped, regions, plan.moved))
    return panels


def training_step(sizes: Decoder, options: dict[str, Any], device: str) -> Callable[[], None]:
    """One compiled forward and backward of transformers' Qwen3 without its output layer, every layer checkpointed.

    The weights are random and bf16; the gradient of the embedded input is always computed, as with LoRA.
    """
    import torch
    from torch import Tensor, nn
    from transformers import AttentionInterface, Qwen3Config, Qwen3Model

    def causal(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **options: Any
    ) -> tuple[Tensor, None]:
        out = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2), None

    # A name that transformers has no mask for: with its own it builds a dense one while it is traced.
    AttentionInterface.register("causal_without_mask", causal)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=256,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.key_value_heads,
        head_dim=sizes.head_size,
        max_position_embeddings=sizes.length,
        attn_implementation="causal_without_mask",
        use_cache=False,
    )
    with torch.device(device):
        model = Qwen3Model(config).to(torch.bfloat16)
        shape = (sizes.batch, sizes.length, sizes.hidden)
        embeddings = torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)
        target = torch.randn(shape, dtype=torch.bfloat16)
    model.requires_grad_(not sizes.frozen)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    compiled = torch.compile(model, backend="glue", options=options)

    def step() -> None:
        (compiled(inputs_embeds=embeddings).last_hidden_state * target).sum().backward()
        embeddings.grad = None
        model.zero_grad()

    return step


def record_step(step: Callable[[], None], warm_up: int = 4) -> tuple[list[dict[str, Any]], int]:
    """Trace events of one ``step`` on the current GPU, and the most bytes allocated in the one before it."""
    import torch

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
    for name, default in [("hidden", 4096), ("intermediate", 12288), ("layers", 16), ("heads", 32)]:
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in [("key-value-heads", 8), ("head-size", 128), ("batch", 2), ("length", 8192)]:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--train-weights", action="store_true", help="backward computes gradients of weights too")
    parser.add_argument("--teraflops", type=float, default=600.0, help="reached in compute, a second")
    parser.add_argument("--link", type=float, default=50.0, help="GB/s in each direction")
    parser.add_argument("--latency", type=float, default=10.0, help="microseconds of each copy")
    parser.add_argument("--base", type=float, help="GiB besides the saved inputs; estimated without it")
    parser.add_argument("--budget", type=float, help="GiB: move only what brings the peak below")
    parser.add_argument("--buffers", type=int, default=2)
    parser.add_argument("--measure", action="store_true", help="record a compiled step on the GPU too")
    parser.add_argument("--trace", type=Path, help="draw this recorded step too")
    parser.add_argument("--output", type=Path, default=Path("offload_timeline.svg"))
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    given = parse_arguments(arguments)
    sizes = Decoder(
        hidden=given.hidden,
        intermediate=given.intermediate,
        layers=given.layers,
        heads=given.heads,
        key_value_heads=given.key_value_heads,
        head_size=given.head_size,
        batch=given.batch,
        length=given.length,
        frozen=not given.train_weights,
    )
    regions = sizes.regions(given.teraflops * 1e12)
    link = Link(given.link * 1e9, given.link * 1e9, given.latency * 1e-6)
    base = sizes.base_bytes() if given.base is None else round(given.base * GIB)
    plan = plan_offload(
        regions,
        link,
        policy="all" if given.budget is None else "budget",
        base_bytes=base,
        budget=None if given.budget is None else round(given.budget * GIB),
        buffers=given.buffers,
    )
    panels = predictions(plan, regions, link, base)
    if given.trace:
        panels.append(measured_panel("Measured", read_step(json.loads(given.trace.read_text())["traceEvents"])))
    if given.measure:
        options = {"offload": "checkpoints"} if given.budget is None else {"memory_budget": f"{given.budget}GiB"}
        trace, peak = record_step(training_step(sizes, options, "cuda"))
        panels.append(measured_panel("Measured", read_step(trace), peak))
    weights = "frozen" if sizes.frozen else "trained"
    title = f"Checkpoint offload: {sizes.layers} layers of {sizes.hidden}, {sizes.batch} by {sizes.length} tokens"
    rates = f"{given.teraflops:g} TFLOP/s, {given.link:g} GB/s each way, {weights} weights"
    subtitle = f"{rates}. F: forward, B: backward with recomputation, dashed: compute waits."
    given.output.write_text(draw(title, subtitle, panels), encoding="utf-8")
    for panel in panels:
        print(panel.title)
    print(
        f"moved: {len(plan.moved)} of {sizes.layers} inputs, never above {plan.peak_bytes / GIB:.2f} GiB: {plan.reason}"
    )
    print(f"wrote {given.output}")


if __name__ == "__main__":
    main()
