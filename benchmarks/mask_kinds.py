"""Attention under twelve kinds of masks on one GPU: the dense mask against lists of its blocks, read from its values.

    python -m benchmarks.mask_kinds [--tokens 8192,2048,512] [--kinds prefix,alibi] [--json FILE]

Heads 16/8 of size 128, one row, bf16; milliseconds, forward / forward and backward. Both variants are compiled by
Inductor and replayed as CUDA graphs. ``lists`` is what their making takes, once a batch for all layers; ``pays from``
is the number of layers of a training step from which on lists are faster than the mask.

The kinds "learned" and "learned causal" are numbers for each head, query and key that get a gradient, as T5's bias of
relative positions: the second number is with it, and a third variant is softmax written out between two products.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import glue_compiler.ops  # noqa: F401  registers torch.ops.glue
from benchmarks.expert_operators import captured, time_in_turn

glue = torch.ops.glue
HEADS, KEY_HEADS, SIZE = 16, 8, 128
Call = Callable[[Tensor, Tensor, Tensor], Tensor]


def masks(tokens: int) -> dict[str, Tensor]:
    """By kind: bool, or bf16 that is added to the scores, broadcastable to ``[1, 16, tokens, tokens]``."""
    token = torch.arange(tokens, device="cuda")
    query, key = token[:, None], token
    past = key <= query
    generator = torch.Generator("cuda").manual_seed(0)
    starts = torch.rand(tokens, device="cuda", generator=generator) < 8 / tokens
    documents = starts.cumsum(0)
    slopes = 2.0 ** -torch.arange(0.5, 8.5, 0.5, device="cuda")
    distance = (key - query) * slopes[:, None, None]
    learned = torch.randn(1, HEADS, tokens, tokens, device="cuda", generator=generator)
    windows = torch.tensor([tokens // 32, tokens // 4], device="cuda").repeat(HEADS // 2)[:, None, None]
    return {
        "causal": past,
        "documents": (documents[:, None] == documents) & past,
        "window": past & (query - key < tokens // 8),
        "prefix": past | (key < tokens // 8),
        "chunks": past & (query // (tokens // 8) == key // (tokens // 8)),
        "global tokens": (past & (query - key < tokens // 16)) | (key < 64) | (query < 64),
        "padding": past & (key >= tokens // 5),
        "by head": past & (query - key < windows),
        "random": past & (torch.rand(tokens, tokens, device="cuda", generator=generator) < 0.5),
        "alibi": distance.masked_fill(~past, -1e9).to(torch.bfloat16),
        "learned": learned.to(torch.bfloat16).requires_grad_(),
        "learned causal": learned.masked_fill(~past, -1e9).to(torch.bfloat16).requires_grad_(),
    }


def dense(mask: Tensor) -> Call:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (each.repeat_interleave(HEADS // KEY_HEADS, 1) for each in (k, v))
        return scaled_dot_product_attention(q, k, v, mask)

    return torch.compile(call, dynamic=False)


def written_out(mask: Tensor) -> Call:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (each.repeat_interleave(HEADS // KEY_HEADS, 1) for each in (k, v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(SIZE) + mask
        return scores.float().softmax(-1).to(q.dtype) @ v

    return torch.compile(call, dynamic=False)


def listed(mask: Tensor, tokens: int, kind: str) -> Call:
    lists = glue.mask_blocks(mask.detach(), tokens, tokens, kind, "zeros")
    return torch.compile(
        lambda q, k, v: glue.masked_attention(q, k, v, mask, lists, kind, "zeros"), dynamic=False, fullgraph=True
    )


def measure(name: str, mask: Tensor, tokens: int) -> dict[str, object]:
    """One line; ``mask`` as in :func:`masks`."""
    kind = "added" if mask.is_floating_point() else "shows"
    inputs = [
        torch.randn(1, tokens, heads, SIZE, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]
    # Queries that see no key are not compared: cuDNN, which the dense mask may take, has values of its own for them.
    seen = (mask.detach() > -1e9 if kind == "added" else mask).any(-1, keepdim=True)
    grad = torch.randn_like(inputs[0]) * seen
    found: dict[str, dict[str, float]] = {}
    expected: list[Tensor] = []
    variants = {"dense": dense(mask), "lists": listed(mask, tokens, kind)}
    if mask.requires_grad:
        inputs.append(mask)
        variants["written out"] = written_out(mask)
    for variant, call in variants.items():

        def forward(call: Call = call) -> Tensor:
            with torch.no_grad():
                return call(*inputs[:3])

        def both(call: Call = call) -> tuple[Tensor, ...]:
            return torch.autograd.grad(call(*inputs[:3]), inputs, grad)

        got = [forward() * seen, *both()]
        expected = expected or got
        worst = max(((a - b).norm() / b.norm()).item() for a, b in zip(got, expected, strict=True))
        if not worst < 0.02:
            print(f"{name}: {variant} is wrong by {worst:.3f}", flush=True)
        found[variant] = time_in_turn({"forward": captured(forward), "both": captured(both)})
    making = time_in_turn({"lists": captured(lambda: glue.mask_blocks(mask.detach(), tokens, tokens, kind, "zeros"))})[
        "lists"
    ]
    saved = found["dense"]["both"] - found["lists"]["both"]
    layers = str(max(1, math.ceil(making / saved))) if saved > 0 else "never"
    shown = [found.get(variant) for variant in ("dense", "lists", "written out")]
    times = " | ".join(f"{each['forward']:.3f} / {each['both']:.3f}" if each else "" for each in shown)
    print(f"| {name} | {tokens} | {times} | {making:.3f} | {layers} |", flush=True)
    return {"kind": name, "tokens": tokens, **found, "making": making}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="8192,2048,512", help="lengths of the row")
    parser.add_argument("--kinds", help="of the masks; all by default")
    parser.add_argument("--json", help="also write the numbers to this file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}\n")
    print(
        "| mask | tokens | dense | glue | written out | lists | pays from |\n|---|---|---|---|---|---|---|", flush=True
    )
    lines = []
    for tokens in map(int, arguments.tokens.split(",")):
        for name, mask in masks(tokens).items():
            if arguments.kinds is None or name in arguments.kinds.split(","):
                torch._dynamo.reset()
                lines.append(measure(name, mask, tokens))
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(lines, file, indent=1)


if __name__ == "__main__":
    main()
