"""Times attention kernels for packed batches on one GPU: forward, and forward with backward, in milliseconds.

    python -m benchmarks.attention_kernels [--shapes qwen3,mixed] [--json FILE]

Every variant is replayed as a CUDA graph, so launches are not measured; all variants of one shape run in turn. The
variants marked "by hand" use torch alone; "padded" is varlen with offsets of one (mostly empty) document a token.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

import glue_compiler.ops  # noqa: F401  registers torch.ops.glue
from benchmarks.expert_operators import captured, time_in_turn
from glue_compiler.ops import flash_attn4

glue = torch.ops.glue
Call = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclasses.dataclass(frozen=True)
class Shape:
    """A batch of rows, each of the same packed documents."""

    heads: int
    key_heads: int
    size: int
    documents: tuple[int, ...]
    rows: int = 1
    window: int = -1

    @property
    def length(self) -> int:
        return sum(self.documents)


SHAPES = {
    "qwen3": Shape(16, 8, 128, (512,) * 16),
    "mixed": Shape(32, 8, 128, (64, 4096, 300, 1500, 100, 2000, 132)),
    "14b": Shape(40, 8, 128, (1024,) * 8),
    "rows": Shape(32, 8, 128, (8192,), rows=2),
    "window": Shape(16, 8, 128, (4096, 4096), window=1024),
    "size64": Shape(32, 8, 64, (1024,) * 8),
    "mixed16": Shape(16, 8, 128, (4096, 64, 1000, 2000, 900, 100, 32)),
    "mixed64": Shape(32, 8, 64, (4096, 64, 1000, 2000, 900, 100, 32)),
    "size256": Shape(4, 1, 256, (4096, 64, 1000, 2000, 900, 100, 32), window=512),
    "short256": Shape(16, 8, 128, (64, 192)),
    "short512": Shape(16, 8, 128, (128, 384)),
    "short1024": Shape(16, 8, 128, (512, 512)),
    "short2048": Shape(16, 8, 128, (512, 1536)),
}


def variants(shape: Shape, ragged: bool) -> dict[str, Call]:
    """Each takes query ``[B, Hq, T, D]``, key and value ``[B, Hkv, T, D]``; metadata is made beforehand."""
    batch, length, window = shape.rows, shape.length, shape.window
    starts = torch.zeros(batch, length, dtype=torch.bool, device="cuda")
    starts[:, torch.tensor((0, *shape.documents[:-1])).cumsum(0)] = True
    offsets, padded = glue.exact_document_offsets(starts), glue.document_offsets(starts)
    blocks = glue.document_blocks(padded, batch, length, True, window)
    ids = starts.cumsum(1)
    position = torch.arange(length, device="cuda")
    mask = (ids[:, :, None] == ids[:, None]) & (position[:, None] >= position)
    if window > 0:
        mask &= position[:, None] - position < window
    mask = mask[:, None]
    longest = max(shape.documents)
    groups = shape.heads // shape.key_heads

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = (ids[b, q] == ids[b, k]) & (q >= k)
        return seen & (q - k < window) if window > 0 else seen

    block_mask = create_block_mask(visible, batch, None, length, length)
    compiled_flex = torch.compile(flex_attention, dynamic=False)

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (each.repeat_interleave(groups, 1) for each in (k, v))
        return scaled_dot_product_attention(q, k, v, mask)

    def varlen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        flat = (each.transpose(1, 2).flatten(0, 1) for each in (q, k, v))
        sides = (window - 1 if window > 0 else -1, 0)
        # Later versions want to be told of grouped heads, 2.11 has no such argument.
        grouped = {"enable_gqa": True} if "enable_gqa" in varlen_attn.__annotations__ else {}
        out = varlen_attn(*flat, offsets, offsets, longest, longest, window_size=sides, **grouped)
        return out.view(batch, length, shape.heads, shape.size).transpose(1, 2)

    def by_backend(backend: SDPBackend, rows: int) -> Call:
        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (
                each.transpose(1, 2).reshape(rows, -1, each.shape[1], shape.size).transpose(1, 2) for each in (q, k, v)
            )
            with sdpa_kernel(backend):
                out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=groups > 1)
            return out.transpose(1, 2).reshape(batch, length, shape.heads, shape.size).transpose(1, 2)

        return call

    flex = torch.compile(
        lambda q, k, v: glue.packed_attention(q, k, v, padded, length, True, window, None, blocks), dynamic=False
    )
    lists = glue.mask_blocks(mask, length, length, "shows", "zeros")

    listed = torch.compile(lambda q, k, v: glue.masked_attention(q, k, v, mask, lists, "shows", "zeros"), dynamic=False)
    found: dict[str, Call] = {
        "dense": dense,
        "varlen by hand": varlen,
        "varlen, bound T": lambda q, k, v: glue.packed_attention(q, k, v, offsets, length, True, window),
        "flex by hand": lambda q, k, v: compiled_flex(q, k, v, block_mask=block_mask, enable_gqa=True),
        "flex": flex,
    }
    found["flex, lists of the mask"] = listed
    if reason := flash_attn4.unusable():
        print(f"without flash4: {reason}", flush=True)
    else:
        found["flash4"] = lambda q, k, v: glue.packed_attention(
            q, k, v, offsets, length, True, window, None, None, "flash4"
        )
    if ragged:
        found["cudnn ragged"] = lambda q, k, v: cudnn_ragged(shape, q, k, v, offsets, longest)
    if length <= 1024:
        found["varlen, padded"] = lambda q, k, v: glue.packed_attention(q, k, v, padded, length, True, window)
    if len(set(shape.documents)) == 1 and window < 0:
        rows = batch * len(shape.documents)
        found["cudnn, equal lengths"] = by_backend(SDPBackend.CUDNN_ATTENTION, rows)
        found["flash, equal lengths"] = by_backend(SDPBackend.FLASH_ATTENTION, rows)
    return found


class CudnnRagged(torch.autograd.Function):
    """cuDNN over ragged rows, as torch's nested tensors call it."""

    @staticmethod
    def forward(ctx, q, k, v, offsets, longest, scale):  # type: ignore[no-untyped-def]
        out, logsumexp, _, _, _, _, seed, offset, _ = torch.ops.aten._cudnn_attention_forward(
            q, k, v, None, offsets, offsets, longest, longest, True, 0.0, True, False, scale=scale
        )
        ctx.save_for_backward(q, k, v, out, logsumexp, seed, offset, offsets)
        ctx.settings = longest, scale
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        q, k, v, out, logsumexp, seed, offset, offsets = ctx.saved_tensors
        longest, scale = ctx.settings
        gradients = torch.ops.aten._cudnn_attention_backward(
            grad.contiguous(), q, k, v, out, logsumexp, seed, offset, None, offsets, offsets, longest, longest, 0.0,
            True, scale=scale
        )  # fmt: skip
        return *gradients, None, None, None


def cudnn_ragged(shape: Shape, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int) -> Tensor:
    if shape.window > 0:
        raise NotImplementedError("cuDNN's operator takes no window")
    flat = (each.transpose(1, 2).flatten(0, 1) for each in (q, k, v))
    out = CudnnRagged.apply(*flat, offsets, longest, shape.size**-0.5)
    return out.view(shape.rows, shape.length, shape.heads, shape.size).transpose(1, 2)


def measure(name: str, shape: Shape, ragged: bool) -> dict[str, object]:
    """Prints two lines for a shape. A variant that fails says so and is left out."""
    inputs = [
        torch.randn(shape.rows, shape.length, heads, shape.size, device="cuda", dtype=torch.bfloat16)
        .transpose(1, 2)
        .requires_grad_()
        for heads in (shape.heads, shape.key_heads, shape.key_heads)
    ]
    grad = torch.randn_like(inputs[0])
    forward: dict[str, Callable[[], object]] = {}
    both: dict[str, Callable[[], object]] = {}
    expected: list[Tensor] = []
    for variant, call in variants(shape, ragged).items():

        def forward_only(call: Call = call) -> Tensor:
            with torch.no_grad():
                return call(*inputs)

        def forward_and_backward(call: Call = call) -> tuple[Tensor, ...]:
            out = call(*inputs)
            return torch.autograd.grad(out, inputs, grad)

        try:
            got = [forward_only(), *forward_and_backward()]
            expected = expected or got
            errors = [((a - b).norm() / b.norm()).item() for a, b in zip(got, expected, strict=True)]
            if max(errors) > 0.02:
                print(f"{name}: {variant} is wrong: {errors}", flush=True)
            forward[variant], both[variant] = captured(forward_only), captured(forward_and_backward)
        except Exception as error:
            print(f"{name}: {variant} fails: {type(error).__name__}: {str(error)[:300]}", flush=True)
            forward.pop(variant, None)
            torch.cuda.synchronize()
    lines = {"forward": time_in_turn(forward), "forward+backward": time_in_turn(both)}
    for line, times in lines.items():
        shown = "  ".join(f"{variant} {time:.3f}" for variant, time in times.items())
        print(f"{name:<10} {line:<17} {shown}", flush=True)
    return {"shape": name, **lines}


def measure_metadata(shape: Shape) -> None:
    """Milliseconds for a batch's metadata, compiled, and by create_block_mask."""
    ids = torch.arange(len(shape.documents), device="cuda").repeat_interleave(torch.tensor(shape.documents).cuda())
    position = torch.cat([torch.arange(each, device="cuda") for each in shape.documents])[None]

    def ours(position: Tensor) -> list[Tensor]:
        return glue.document_blocks(glue.document_offsets(position == 0), 1, shape.length, True)

    compiled = torch.compile(ours, fullgraph=True)

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (ids[q] == ids[k]) & (q >= k)

    compiled_create = torch.compile(create_block_mask)
    times = time_in_turn(
        {
            "offsets and blocks, eager": lambda: ours(position),
            "offsets and blocks, compiled": lambda: compiled(position),
            "the same, captured": captured(lambda: compiled(position)),
            "exact offsets": lambda: glue.exact_document_offsets(position == 0),
            "create_block_mask": lambda: create_block_mask(visible, None, None, shape.length, shape.length),
            "create_block_mask, compiled": lambda: compiled_create(visible, None, None, shape.length, shape.length),
        }
    )
    print("metadata  ", "  ".join(f"{variant} {time:.3f}" for variant, time in times.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES), help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--ragged", action="store_true", help="also cuDNN's ragged kernels, which torch itself avoids")
    parser.add_argument("--json", help="also write the numbers to this file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}", flush=True)
    lines = []
    for name in arguments.shapes.split(","):
        torch._dynamo.reset()
        lines.append(measure(name, SHAPES[name], arguments.ragged))
    measure_metadata(SHAPES["qwen3"])
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(lines, file, indent=1)


if __name__ == "__main__":
    main()
