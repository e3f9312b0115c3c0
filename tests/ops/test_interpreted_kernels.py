"""The Triton kernels on a CPU, through Triton's interpreter, against the references.

Runs only where Triton is installed and the process was started with ``TRITON_INTERPRET=1``, since Triton reads that
variable when it is imported:

    TRITON_INTERPRET=1 python -m pytest tests/ops/test_interpreted_kernels.py
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from glue_compiler.ops import (
    expert_combine,
    expert_dot,
    expert_gather,
    expert_sort,
    grouped_linear,
    grouped_outer,
    grouped_repeat,
    grouped_sum,
    mask_blocks,
    nf4,
)
from glue_compiler.ops.grouped_product_tiles import Tiles

if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton and TRITON_INTERPRET=1 from the start", allow_module_level=True)

from glue_compiler.ops import (
    expert_rows_triton,
    expert_sort_triton,
    group_bounds_triton,
    grouped_product_triton,
    grouped_rows_triton,
    mask_blocks_triton,
    nf4_triton,
)

ROUTINGS = [(37, 3, 5), (150, 2, 4), (5, 1, 1)]
POINTERS = Tiles(16, 32, 16, 2, 4, 2)
DESCRIPTORS = Tiles(16, 32, 16, 2, 4, 2, descriptors=True)


@pytest.fixture(params=ROUTINGS, ids=str)
def routed(request):
    tokens, top_k, num_experts = request.param
    ids = torch.randint(-1, num_experts + 1, (tokens, top_k))
    return (tokens, top_k, num_experts), ids, expert_sort(ids, num_experts)


def close(value, reference):
    torch.testing.assert_close(value, reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("k_major", [True, False])
def test_sort(routed, k_major):
    (_, _, num_experts), ids, _ = routed
    expected = expert_sort(ids, num_experts, k_major)
    for same in (ids, ids.int(), ids.t().contiguous().t()):
        assert all(map(torch.equal, expert_sort_triton.sort(same, num_experts, k_major), expected))


def test_rows(routed):
    (tokens, top_k, num_experts), _, (order, inverse, _, offsets) = routed
    x, weights = torch.randn(tokens, 33), torch.randn(tokens, top_k)
    rows, flat = torch.randn(tokens * top_k, 33), weights.reshape(-1)
    for kernel_weights, reference_weights in ((None, None), (flat, weights)):
        close(
            expert_rows_triton.gather(x, inverse, offsets, top_k, kernel_weights),
            expert_gather(x, order, inverse, offsets, top_k, reference_weights),
        )
        close(
            expert_rows_triton.combine(rows, inverse, offsets, top_k, kernel_weights, torch.float32),
            expert_combine(rows, order, inverse, offsets, top_k, reference_weights),
        )
    close(
        expert_rows_triton.dot(rows, x, inverse, offsets, top_k, torch.float32),
        expert_dot(rows, x, order, inverse, offsets, top_k, torch.float32),
    )
    close(grouped_rows_triton.sum_rows(rows, offsets), grouped_sum(rows, offsets))
    values = torch.randn(num_experts, 33)
    close(grouped_rows_triton.repeat(values, offsets, len(rows)), grouped_repeat(values, offsets, len(rows)))


@pytest.mark.parametrize("tiles", [POINTERS, DESCRIPTORS], ids=["pointers", "descriptors"])
@pytest.mark.parametrize("widths", [(48, 52), (33, 50)], ids=str)
def test_products(routed, tiles, widths):
    (_, _, num_experts), ids, (_, _, _, offsets) = routed
    deep, wide = widths
    x, grad = torch.randn(ids.numel(), deep), torch.randn(ids.numel(), wide)
    weight, bias = torch.randn(num_experts, wide, deep), torch.randn(num_experts, wide)
    out = grouped_product_triton.linear(x, weight, offsets, bias, False, tiles)
    close(out, grouped_linear(x, weight, offsets, bias))
    close(
        grouped_product_triton.linear(grad, weight, offsets, None, True, tiles),
        grouped_linear(grad, weight, offsets, None, True),
    )
    close(grouped_product_triton.outer(grad, x, offsets, tiles), grouped_outer(grad, x, offsets))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("average", [8, 48, 130])
def test_products_in_the_tiles_that_small_cards_get(average, dtype):
    """Those that are chosen off cards with a tensor memory accelerator."""
    offsets = torch.tensor([average - 5, average - 5, 3 * average], dtype=torch.int32)
    x, weight = torch.randn(3 * average, 96).to(dtype), torch.randn(3, 136, 96).to(dtype)
    grad = torch.randn(3 * average, 136).to(dtype)
    near = {"rtol": 1e-2, "atol": 5e-2} if dtype == torch.float16 else {"rtol": 1e-4, "atol": 1e-4}
    out = grouped_product_triton.linear(x, weight, offsets, None, False)
    torch.testing.assert_close(out, grouped_linear(x, weight, offsets), **near)
    outer = grouped_product_triton.outer(grad, x, offsets)
    torch.testing.assert_close(outer, grouped_outer(grad, x, offsets), **near)


@pytest.mark.parametrize("ends", [[3, 3, 9, 11], [0, 0], [25] * 5, [40]])
@pytest.mark.parametrize("width", [1, 40, 1500])
def test_bounds_of_groups_and_zeros_behind_them(monkeypatch, ends, width):
    monkeypatch.setattr(group_bounds_triton, "processor_count", lambda index: 2)
    offsets, rows = torch.tensor(ends, dtype=torch.int32), 25
    expected = torch.tensor([0, *(min(end, rows) for end in ends)], dtype=torch.int32)
    assert torch.equal(group_bounds_triton.bounds(offsets, rows), expected)
    cleared, spread = torch.randn(rows, width), torch.stack([offsets, offsets + 9], dim=1)[:, 0]
    wanted = cleared.clone()
    wanted[min(ends[-1], rows) :] = 0
    assert torch.equal(group_bounds_triton.bounds(spread, rows, cleared), expected)
    assert torch.equal(cleared, wanted)


@pytest.mark.parametrize("kind", ["shows", "hides", "added"])
@pytest.mark.parametrize("has_mean", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1, 300, 300), (2, 3, 130, 256), (1, 2, 1, 500), (2, 1, 128, 2300)], ids=str)
def test_lists_of_blocks(sizes, kind, has_mean):
    tokens = [torch.arange(size) for size in sizes[2:]]
    shown = (tokens[0][:, None] >= tokens[1] - 70) & (torch.rand(*sizes) < 0.999)
    shown[..., -1, :] = False
    shown[:1, :, :, :128] = True
    for dtype in (torch.float32, torch.float64):
        numbers = torch.zeros(sizes, dtype=dtype).masked_fill(~shown, torch.finfo(dtype).min)
        numbers[..., :1, :] = float("-inf")
        mask = {"shows": shown, "hides": ~shown, "added": numbers}[kind]
        wanted = mask_blocks(mask, *sizes[2:], kind, "mean" if has_mean else "zeros")
        for same in (mask, mask.mT.contiguous().mT):
            got = mask_blocks_triton.lists(same, kind, has_mean or kind == "added")
            for one, other in zip(got, wanted, strict=True):
                assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("shape", [(3, 64), (96, 128), (70, 64)], ids=str)
def test_weights_of_four_bits(shape, nested, dtype):
    """Of fewer bytes than a program reads, of whole programs, and of a part of the last one."""
    packed, scales = torch.randint(256, (shape[0] * shape[1] // 2, 1), dtype=torch.uint8), torch.rand(shape[0] * 4)
    blocks = shape[0] * shape[1] // 64
    codes = torch.randint(256, (blocks,), dtype=torch.uint8), torch.randn(256), torch.tensor(0.25)
    given = codes if nested else ()
    out = torch.full(shape, float("nan"), dtype=dtype)
    nf4_triton.launch(packed, scales[:blocks], torch.tensor(nf4.NF4), out, 64, nf4.SCALE_BLOCK, *given)
    close(out, nf4.dequantize_nf4(packed, scales[:blocks], 64, list(shape), dtype, *given))
