"""packed_attention's kernels on a GPU, compiled by Inductor, against fp64."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from glue_compiler.ops import flash_attn4

pytestmark = pytest.mark.gpu
glue = torch.ops.glue
KERNELS = [
    "flex",
    "flash2",
    pytest.param("flash4", marks=pytest.mark.skipif(bool(flash_attn4.unusable()), reason=str(flash_attn4.unusable()))),
]
MASKS = list(itertools.product([True, False], [-1, 100]))


def documents(length: int, batch: int) -> Tensor:
    starts = torch.zeros(batch, length, dtype=torch.bool)
    starts[0, [1, 3, 128, 140, 290]] = True
    return starts.cuda()


def leaves(length: int, batch: int, size: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [
        torch.randn(batch, length, heads, size, dtype=dtype, device="cuda").transpose(1, 2).requires_grad_()
        for heads in (4, 2, 2)
    ]


def dense_mask(starts: Tensor, is_causal: bool, window: int) -> Tensor:
    ids = starts.cumsum(1)
    position = torch.arange(starts.shape[1], device="cuda")
    distance = position[:, None] - position
    mask = ids[:, :, None] == ids[:, None]
    if is_causal:
        mask = mask & (distance >= 0)
    if window > 0:
        mask = mask & (distance.abs() < window)
    return mask[:, None]


def with_gradients(call, inputs: list[Tensor]) -> list[Tensor]:
    out = call(*inputs)
    grad = torch.linspace(-1, 1, out.numel(), dtype=torch.float64, device="cuda").view(out.shape)
    return [out, *torch.autograd.grad(out, inputs, grad.to(out.dtype))]


def packed(kernel: str, is_causal: bool, window: int):
    """A step over (starts, query, key, value), and sinks, compiled by Inductor."""

    def call(starts: Tensor, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        batch, _, length, _ = query.shape
        if kernel.startswith("flash"):
            cu_seqlens = glue.exact_document_offsets(starts)
            settings = (cu_seqlens, length, is_causal, window, None, None, kernel)
            return glue.packed_attention(query, key, value, *settings, sinks=sinks)
        cu_seqlens = glue.document_offsets(starts)
        blocks = glue.document_blocks(cu_seqlens, batch, length, is_causal, window)
        settings = (cu_seqlens, length, is_causal, window, None, blocks)
        return glue.packed_attention(query, key, value, *settings, sinks=sinks)

    return torch.compile(call, fullgraph=True)


@pytest.mark.parametrize(("length", "size"), [(300, 64), (1024, 128)])
@pytest.mark.parametrize(("is_causal", "window"), MASKS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_no_further_from_fp64_than_the_dense_mask(kernel, is_causal, window, length, size):
    starts, inputs = documents(length, 2), leaves(length, 2, size)
    mask = dense_mask(starts, is_causal, window)
    call = packed(kernel, is_causal, window)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        got = with_gradients(lambda q, k, v: call(starts, q, k, v), inputs)

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)

    exact = with_gradients(dense, [each.detach().double().requires_grad_() for each in inputs])
    for ours, theirs, truth in zip(got, with_gradients(dense, inputs), exact, strict=True):
        error, allowed = ((each.double() - truth).norm() / truth.norm() for each in (ours, theirs))
        assert error <= 1.5 * allowed + 1e-3, f"{error} against {allowed}"


def with_a_column(mask: Tensor):
    def call(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> Tensor:
        key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], 1) for each in (key, value))
        scores = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(~mask, torch.finfo(query.dtype).min)
        column = sinks[:, None, None].expand(*scores.shape[:3], 1)
        return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ value

    return call


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("is_causal", "window"), MASKS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_sinks_are_no_further_from_fp64_than_a_column(kernel, is_causal, window, dtype):
    """Sinks in fp32 are those of weights in fp32 under autocast."""
    starts = documents(1024, 2)
    sinks = torch.tensor([0.5, -1.0, 3.0, 8.0], dtype=dtype, device="cuda", requires_grad=True)
    inputs = [*leaves(1024, 2, 64), sinks]
    call = packed(kernel, is_causal, window)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        got = with_gradients(lambda *tensors: call(starts, *tensors), inputs)
    dense = with_a_column(dense_mask(starts, is_causal, window))
    exact = with_gradients(dense, [each.detach().double().requires_grad_() for each in inputs])
    rounded = with_gradients(dense, [each.detach().bfloat16().requires_grad_() for each in inputs])
    for ours, theirs, truth in zip(got, rounded, exact, strict=True):
        error, allowed = ((each.double() - truth).norm() / truth.norm() for each in (ours, theirs))
        assert error <= 1.5 * allowed + 2e-3, f"{error} against {allowed}"


def test_flex_needs_no_host_synchronisation_and_no_recompile_and_is_deterministic():
    inputs = leaves(1024, 2, 128)
    call = packed("flex", True, -1)
    with_gradients(lambda q, k, v: call(documents(1024, 2), q, k, v), inputs)
    other = documents(1024, 2)
    other[1, 77] = True
    grad = torch.randn_like(inputs[0])
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.compiler.set_stance("fail_on_recompile"):
            first, second = (torch.autograd.grad(call(other, *inputs), inputs, grad) for _ in range(2))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(map(torch.equal, first, second))


def test_a_graph_with_flex_goes_into_inductors_cache():
    inputs = leaves(1024, 2, 128)
    torch._dynamo.utils.counters.clear()
    with_gradients(lambda q, k, v: packed("flex", True, -1)(documents(1024, 2), q, k, v), inputs)
    assert not torch._dynamo.utils.counters["inductor"]["fxgraph_cache_bypass"]


def test_varlen_needs_one_synchronisation_a_batch():
    inputs = leaves(1024, 2, 128)
    cu_seqlens = glue.exact_document_offsets(documents(1024, 2))
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = glue.packed_attention(*inputs, cu_seqlens, 1024, True)
        torch.autograd.grad(out, inputs, torch.ones_like(out))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_causal_attention_takes_cudnn_in_eager_and_compiled():
    inputs = leaves(1024, 2, 128)
    expected = with_gradients(
        lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        [each.detach().double().requires_grad_() for each in inputs],
    )
    compiled = torch.compile(lambda q, k, v: glue.causal_attention(q, k, v), fullgraph=True)
    for call in (glue.causal_attention, compiled):
        for got, want in zip(with_gradients(call, inputs), expected, strict=True):
            assert (got.double() - want).norm() / want.norm() < 1e-2
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            with_gradients(call, inputs)
        names = {event.key for event in profile.key_averages()}
        assert "aten::_scaled_dot_product_cudnn_attention" in names
        assert "aten::_scaled_dot_product_cudnn_attention_backward" in names


def test_causal_attention_of_fp32_falls_back():
    inputs = leaves(256, 2, 64, torch.float32)
    for got, want in zip(
        with_gradients(glue.causal_attention, inputs),
        with_gradients(lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), inputs),
        strict=True,
    ):
        torch.testing.assert_close(got, want)
