"""Checkpoint offload on a decoder of Qwen3's shape: step time, peak memory and pinning cost, one row per way to do it.

    python -m benchmarks.checkpoint_offload                       # Qwen3-8B's width, 16 layers, 2 x 8192 tokens
    python -m benchmarks.checkpoint_offload --layers 8 --rows none,glue
    python -m benchmarks.checkpoint_offload --hidden 5120 --intermediate 17408 --heads 40 --layers 40

Rows: ``none`` (full graph, no offload), ``serial`` (torch's own offload in the graph: a copy is waited for at once),
``glue`` (full graph, ``offload="checkpoints"``), and for layers compiled one by one ``layers-none``, ``save_on_cpu``
(torch's hooks) and ``layers-glue`` (``glue_compiler.offload_checkpoints()``). Weights are random and frozen; LoRA
adapters of rank 16 on the query and value projections train. "pinning ms" is the time spent on getting page-locked
memory in the row's first step.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

ROWS = ("none", "serial", "glue", "layers-none", "save_on_cpu", "layers-glue")


@dataclass(frozen=True)
class Shape:
    """Of a decoder; ``tokens`` in each of ``batch`` sequences."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    layers: int
    batch: int
    tokens: int

    @property
    def input_bytes(self) -> int:
        """Of one layer's input in bf16."""
        return 2 * self.batch * self.tokens * self.hidden


class LoraLinear(nn.Module):
    """A frozen weight and a trained product of rank 16."""

    def __init__(self, wide_in: int, wide_out: int, **kwargs: Any) -> None:
        super().__init__()
        self.base = nn.Linear(wide_in, wide_out, bias=False, **kwargs).requires_grad_(False)
        self.down = nn.Linear(wide_in, 16, bias=False, **kwargs)
        self.up = nn.Linear(16, wide_out, bias=False, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Layer(nn.Module):
    """Qwen3's decoder layer: normalised heads, rotary positions, grouped key and value heads, a gated MLP."""

    def __init__(self, shape: Shape, **kwargs: Any) -> None:
        super().__init__()
        self.shape = shape
        wide, narrow = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
        self.query = LoraLinear(shape.hidden, wide, **kwargs)
        self.key = nn.Linear(shape.hidden, narrow, bias=False, **kwargs).requires_grad_(False)
        self.value = LoraLinear(shape.hidden, narrow, **kwargs)
        self.out = nn.Linear(wide, shape.hidden, bias=False, **kwargs).requires_grad_(False)
        self.gate = nn.Linear(shape.hidden, shape.intermediate, bias=False, **kwargs).requires_grad_(False)
        self.up = nn.Linear(shape.hidden, shape.intermediate, bias=False, **kwargs).requires_grad_(False)
        self.down = nn.Linear(shape.intermediate, shape.hidden, bias=False, **kwargs).requires_grad_(False)
        self.before_attention = nn.RMSNorm(shape.hidden, eps=1e-6, **kwargs).requires_grad_(False)
        self.before_mlp = nn.RMSNorm(shape.hidden, eps=1e-6, **kwargs).requires_grad_(False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        shape = self.shape
        h = self.before_attention(x)
        q, k, v = (
            p(h).view(x.shape[0], x.shape[1], -1, shape.head_size).transpose(1, 2)
            for p in (self.query, self.key, self.value)
        )
        q, k = (functional.rms_norm(t, (shape.head_size,)) for t in (q, k))
        q, k = (t * cos + torch.cat((-t.chunk(2, -1)[1], t.chunk(2, -1)[0]), -1) * sin for t in (q, k))
        a = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(a.transpose(1, 2).flatten(2))
        h = self.before_mlp(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    """Checkpointed layers and a random projection as the loss: a vocabulary would only add time to all rows."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        super().__init__()
        kwargs = {"device": device, "dtype": torch.bfloat16}
        self.layers = nn.ModuleList(Layer(shape, **kwargs) for _ in range(shape.layers))
        angles = torch.outer(
            torch.arange(shape.tokens, device=device),
            1e6 ** -(torch.arange(0, shape.head_size, 2, device=device) / shape.head_size),
        )
        angles = torch.cat((angles, angles), -1)
        self.register_buffer("cos", angles.cos().bfloat16())
        self.register_buffer("sin", angles.sin().bfloat16())

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = x * 1.0  # as from an embedding: the first input is the model's own
        for layer in self.layers:
            x = checkpoint(layer, x, self.cos, self.sin, use_reentrant=False)
        return (x.float() * target).sum()


def prepare(row: str, model: Decoder) -> tuple[Callable[..., Tensor], Callable[[], AbstractContextManager[Any]]]:
    """The callable to step with, and the context of a step."""
    if row in ("none", "serial"):
        return torch.compile(model, fullgraph=True), nullcontext
    if row == "glue":
        return torch.compile(model, backend="glue", fullgraph=True, options={"offload": "checkpoints"}), nullcontext
    for layer in model.layers:
        layer.compile(fullgraph=True)
    if row == "save_on_cpu":
        return model, lambda: torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available())
    if row == "layers-glue":
        import glue_compiler

        return model, glue_compiler.offload_checkpoints
    return model, nullcontext


class MarkSavedInputs:
    """A joint-graph pass that marks the layers' inputs for torch's own offload (nothing in torch does)."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def __call__(self, gm: torch.fx.GraphModule, joint_inputs: Any) -> torch.fx.GraphModule:
        regions = [node.meta["ac_graph_id"] for node in gm.graph.nodes if "ac_graph_id" in node.meta]
        for node in gm.graph.nodes:
            value = node.meta.get("val")
            readers = {user.meta["ac_graph_id"] for user in node.users if "ac_graph_id" in user.meta}
            starts = readers - {node.meta.get("ac_graph_id"), max(regions)}
            if node.op == "call_function" and starts and isinstance(value, Tensor):
                node.meta["should_offload"] = value.numel() * value.element_size() == self.nbytes
        return gm


def serial_offload(shape: Shape) -> AbstractContextManager[Any]:
    return torch._functorch.config.patch(
        enable_activation_offloading=True,
        activation_offload_separate_stream=False,
        joint_custom_pass=MarkSavedInputs(shape.input_bytes),
    )


def measure(row: str, shape: Shape, steps: int, device: torch.device) -> dict[str, float]:
    """Milliseconds of a step, GiB at the peak, GiB pinned, and the first step's milliseconds after compiling."""
    from glue_compiler.ops.copy_engine import engine

    pinning_before = engine.pool.pinning_seconds
    torch.manual_seed(0)
    model = Decoder(shape, device)
    x = torch.randn(shape.batch, shape.tokens, shape.hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
    target = torch.randn(shape.batch, shape.tokens, shape.hidden, device=device)
    step_model, context = prepare(row, model)

    def step() -> float:
        start = time.perf_counter()
        with context():
            step_model(x, target).backward()
        for p in model.parameters():
            p.grad = None
        x.grad = None
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1000

    with serial_offload(shape) if row == "serial" else nullcontext():
        compiling = step()
        second = step()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        times = [step() for _ in range(steps)]
    result = {"ms": statistics.median(times), "min": min(times), "second": second, "first_s": compiling / 1000}
    if device.type == "cuda":
        result["peak"] = torch.cuda.max_memory_allocated() / 2**30
    result["pinned"] = engine.pool.pinned_bytes() / 2**30
    result["pin_ms"] = (engine.pool.pinning_seconds - pinning_before) * 1000
    engine.release()
    return result


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hidden", 4096), ("intermediate", 12288), ("heads", 32), ("kv-heads", 8), ("layers", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--rows", default=",".join(ROWS))
    options = vars(parser.parse_args(arguments))
    rows, steps = options.pop("rows").split(","), options.pop("steps")
    shape = Shape(**options)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, {shape}")
    print(f"layer inputs: {shape.layers} x {shape.input_bytes / 2**20:.0f} MiB\n")
    heads = ("step ms", "min", "peak GiB", "pinned GiB", "pinning ms", "2nd step", "1st s")
    print(f"{'row':<12} " + " ".join(f"{head:>10}" for head in heads))
    for row in rows:
        try:
            r = measure(row, shape, steps, device)
        except Exception as error:  # one way that fails must not hide the others
            print(f"{row:<12} failed: {type(error).__name__}: {str(error).splitlines()[0][:150] if str(error) else ''}")
        else:
            print(
                f"{row:<12} {r['ms']:10.1f} {r['min']:10.1f} {r.get('peak', 0):10.2f} {r['pinned']:10.2f} "
                f"{r['pin_ms']:10.0f} {r['second']:10.1f} {r['first_s']:10.1f}",
                flush=True,
            )
        torch._dynamo.reset()
        gc.collect()  # a compiled layer refers to itself, and its weights would count for the next row
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
