"""Packed-batch metadata of models that are compiled layer by layer: per layer, once per batch by glue, once by hand.

    python -m benchmarks.packed_metadata [--models qwen3-0.6b llama-1b qwen3-14b-lora] [--metadata varlen mask]
                                         [--lengths fixed varying]

Random weights in the published shapes; one row of packed documents; bf16 on CUDA. Every variant runs the same model
object, in turn within each round, so that a machine that drifts drifts for all:

- ``eager``: no compiler; every layer builds its metadata;
- ``inductor``: each decoder layer compiled by Inductor, Dynamo's capture flags on; every layer builds its metadata;
- ``glue``: each decoder layer compiled by glue;
- ``oracle``: the metadata built by hand once per batch, outside of the layers, which Inductor compiles.

``varlen`` metadata is ``cu_seqlens`` and ``max_seqlen`` (two host syncs); ``mask`` is dense, ``[tokens, tokens]``.
Times are medians in ms: a training forward, and forward with backward. Each step has a batch that no step had before.
Where lengths are ``varying`` it has another total, of three quarters of ``--tokens`` to all of them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, LlamaConfig, LlamaModel, Qwen3Config, Qwen3Model

from demo.varlen_attention import document_bounds, varlen_attention

VARIANTS = ("eager", "inductor", "glue", "oracle")
PUBLISHED = {"llama-1b": "-11.5%", "qwen3-0.6b": "-14.8%", "qwen3-14b-lora": "+14.3% batches a second"}
CAPTURE_FLAGS = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}

Attention = tuple[Tensor, None]


def _heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    return query, key, value


def _varlen(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float) -> Attention:
    query, key, value = (x[0].transpose(0, 1) for x in _heads(query, key, value))
    return varlen_attention(query, key, value, cu_seqlens, max_seqlen, scale)[None], None


def _dense(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Attention:
    query, key, value = _heads(query, key, value)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale).transpose(1, 2), None


def packed_mask(position_ids: Tensor) -> Tensor:
    """Causal within each document: bool ``[1, 1, tokens, tokens]``."""
    document = (position_ids == 0).cumsum(-1)
    token = torch.arange(position_ids.shape[1], device=position_ids.device)
    return ((document[:, :, None] == document[:, None]) & (token[:, None] >= token))[:, None]


def varlen_per_layer(
    module: Any, query: Tensor, key: Tensor, value: Tensor, _: Any, *, scaling: float, position_ids: Tensor, **kw: Any
) -> Attention:
    return _varlen(query, key, value, *document_bounds(position_ids), scaling)


def varlen_given(
    module: Any, query: Tensor, key: Tensor, value: Tensor, _: Any, *, scaling: float, bounds: Any, **kw: Any
) -> Attention:
    return _varlen(query, key, value, *bounds, scaling)


def mask_per_layer(
    module: Any, query: Tensor, key: Tensor, value: Tensor, _: Any, *, scaling: float, position_ids: Tensor, **kw: Any
) -> Attention:
    return _dense(query, key, value, packed_mask(position_ids), scaling)


def mask_given(
    module: Any, query: Tensor, key: Tensor, value: Tensor, _: Any, *, scaling: float, packed: Tensor, **kw: Any
) -> Attention:
    return _dense(query, key, value, packed, scaling)


# Names that transformers' mask registry does not know, so that it builds no mask of its own.
for function in (varlen_per_layer, varlen_given, mask_per_layer, mask_given):
    AttentionInterface.register(f"benchmark_{function.__name__}", function)


def build(name: str, layers: int | None, device: str) -> nn.Module:
    """A decoder without the output layer, in training mode; ``layers`` overrides the published number."""
    common: dict[str, Any] = {"use_cache": False, "max_position_embeddings": 32768, "vocab_size": 32000}
    shapes: dict[str, tuple[Any, Any, dict[str, int]]] = {
        "llama-1b": (LlamaConfig, LlamaModel, _shape(2048, 8192, 16, 32, 8, 64)),
        "qwen3-0.6b": (Qwen3Config, Qwen3Model, _shape(1024, 3072, 28, 16, 8, 128)),
        "qwen3-14b-lora": (Qwen3Config, Qwen3Model, _shape(5120, 17408, 40, 40, 8, 128)),
        "tiny": (Qwen3Config, Qwen3Model, _shape(64, 128, 4, 4, 2, 16)),
    }
    config_class, model_class, shape = shapes[name]
    config = config_class(**common, **{**shape, **({"num_hidden_layers": layers} if layers else {})})
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        torch.set_default_dtype(dtype)
        model: nn.Module = model_class(config)
        torch.set_default_dtype(torch.float32)
    if name.endswith("lora"):
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
        model.get_base_model().to(dtype)
    return model.train()


def _shape(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


class Runner:
    """One model and its variants."""

    def __init__(
        self, name: str, metadata: str, lengths: str, variants: list[str], arguments: argparse.Namespace
    ) -> None:
        self.metadata, self.device, self.tokens = metadata, arguments.device, arguments.tokens
        self.varies = lengths == "varying"
        self.model = build(name, arguments.layers, arguments.device)
        base = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        self.base: Any = base
        self.layers: list[Any] = list(self.base.layers)
        self.target = torch.randn(1, self.tokens, self.base.config.hidden_size, device=self.device)
        self.generator = torch.Generator().manual_seed(0)
        backends = {"inductor": "inductor", "oracle": "inductor", "glue": "glue"}
        self.compiled = {
            v: [torch.compile(layer._call_impl, backend=backends[v]) for layer in self.layers]
            for v in variants
            if v in backends
        }

    def batch(self) -> dict[str, Tensor]:
        """Documents of 64 to 1024 tokens, about 16 in 8192."""
        tokens = self.tokens
        if self.varies:
            tokens = int(torch.randint(tokens * 3 // 4, tokens + 1, (1,), generator=self.generator))
        lengths: list[int] = []
        while sum(lengths) < tokens:
            longest = max(65, self.tokens // 8)
            lengths.append(int(torch.randint(64, longest, (1,), generator=self.generator)))
        positions = torch.cat([torch.arange(n) for n in lengths])[None, :tokens]
        ids = torch.randint(0, 32000, positions.shape, generator=self.generator)
        return {"input_ids": ids.to(self.device), "position_ids": positions.to(self.device)}

    def select(self, variant: str) -> None:
        kind = "given" if variant == "oracle" else "per_layer"
        self.base.config._attn_implementation = f"benchmark_{self.metadata}_{kind}"
        for i, layer in enumerate(self.layers):
            layer._compiled_call_impl = self.compiled[variant][i] if variant in self.compiled else None

    def forward(self, variant: str, batch: dict[str, Tensor]) -> Tensor:
        given: dict[str, Any] = {}
        if variant == "oracle" and self.metadata == "varlen":
            given["bounds"] = document_bounds(batch["position_ids"])
        elif variant == "oracle":
            given["packed"] = packed_mask(batch["position_ids"])
        hidden = self.model(**batch, **given).last_hidden_state
        return (hidden.float() * self.target[:, : hidden.shape[1]]).sum()

    def step(self, variant: str, batch: dict[str, Tensor]) -> tuple[float, float, float]:
        """(forward ms, step ms, loss)"""
        self.wait()
        start = time.perf_counter()
        loss = self.forward(variant, batch)
        self.wait()
        middle = time.perf_counter()
        loss.backward()
        self.model.zero_grad()
        # A step of its own: without a wait in the middle the host runs ahead.
        self.wait()
        again = time.perf_counter()
        self.forward(variant, {name: tensor.clone() for name, tensor in batch.items()}).backward()
        self.wait()
        step = time.perf_counter() - again
        self.model.zero_grad()
        return (middle - start) * 1e3, step * 1e3, loss.item()

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def host_reads(self, variant: str) -> dict[str, int]:
        batch = self.batch()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            self.forward(variant, batch).backward()
        counts = {event.key: event.count for event in profiler.key_averages()}
        return {name: counts.get(f"aten::{name}", 0) for name in ("nonzero", "_local_scalar_dense")}


def warm_up(runner: Runner, variant: str) -> str | None:
    """Compile; what went wrong, if anything did: one variant that fails must not stop the others."""
    runner.select(variant)
    try:
        for _ in range(3):
            runner.step(variant, runner.batch())
    except Exception as failure:
        return f"{type(failure).__name__}: {str(failure).splitlines()[0][:300]}"
    return None


def measure(name: str, metadata: str, lengths: str, arguments: argparse.Namespace) -> None:
    variants = list(arguments.variants)
    runner = Runner(name, metadata, lengths, variants, arguments)
    forward: dict[str, list[float]] = {v: [] for v in variants}
    step: dict[str, list[float]] = {v: [] for v in variants}
    first: dict[str, float] = {}
    losses: dict[str, float] = {}
    for variant in list(variants):
        start = time.perf_counter()
        problem = warm_up(runner, variant)
        first[variant] = time.perf_counter() - start
        if problem:
            print(f"{name} {metadata} {variant}: {problem}")
            variants.remove(variant)
    for _ in range(arguments.rounds):
        batch = runner.batch()
        for variant in variants:
            runner.select(variant)
            fresh = {key: tensor.clone() for key, tensor in batch.items()}
            times = runner.step(variant, fresh)
            forward[variant].append(times[0])
            step[variant].append(times[1])
            losses[variant] = times[2]
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    tokens = f"{arguments.tokens} tokens" if lengths == "fixed" else f"up to {arguments.tokens} tokens, varying"
    title = f"{name}, {metadata}, {len(runner.layers)} layers, {tokens}, {arguments.rounds} rounds"
    print(f"\n{title}, torch {torch.__version__} on {device}; published for the hand-made form: {PUBLISHED.get(name)}")
    print(
        "| variant | forward ms | step ms | forward, x oracle | step, x oracle | warm-up s | nonzero | reads | loss |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for variant in variants:
        reads = host_reads(runner, variant)
        ratios = [_ratio(t, variant) if "oracle" in variants else "" for t in (forward, step)]
        print(
            f"| {variant} | {statistics.median(forward[variant]):.2f} | {statistics.median(step[variant]):.2f} | "
            f"{ratios[0]} | {ratios[1]} | {first[variant]:.1f} | {reads} | {losses[variant]:.5g} |",
            flush=True,
        )


def host_reads(runner: Runner, variant: str) -> str:
    runner.select(variant)
    counts = runner.host_reads(variant)
    runner.model.zero_grad()
    return " | ".join(str(count) for count in counts.values())


def _ratio(times: dict[str, list[float]], variant: str) -> str:
    """Median of the rounds' own ratios: what drifts from round to round cancels."""
    pairs = zip(times[variant], times["oracle"], strict=True)
    return f"{statistics.median(a / b for a, b in pairs):.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["qwen3-0.6b", "llama-1b", "qwen3-14b-lora"])
    parser.add_argument("--metadata", nargs="+", default=["varlen", "mask"], choices=("varlen", "mask"))
    parser.add_argument("--lengths", nargs="+", default=["fixed", "varying"], choices=("fixed", "varying"))
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64
    with torch._dynamo.config.patch(CAPTURE_FLAGS):
        for name in arguments.models:
            for metadata in arguments.metadata:
                for lengths in arguments.lengths:
                    torch._dynamo.reset()
                    measure(name, metadata, lengths, arguments)


if __name__ == "__main__":
    main()
