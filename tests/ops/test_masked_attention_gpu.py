"""masked_attention's kernels on a GPU against fp64, compiled by Inductor; mask_blocks' kernel and its reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from glue_compiler.ops import mask_blocks
from tests.ops.test_masked_attention import boolean_masks, leaves, multiplied, with_gradients, written_out

pytestmark = pytest.mark.gpu
glue = torch.ops.glue
SIZES = [(256, 256), (300, 300), (130, 400)]


def compiled(kind: str, empty_rows: str, **settings):
    """(mask, query, key, value, *sinks) → attention by lists, compiled by Inductor."""

    def call(mask: Tensor, q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Tensor:
        lists = glue.mask_blocks(mask, q.shape[2], k.shape[2], kind, empty_rows)
        sink = sinks[0] if sinks else None
        return glue.masked_attention(q, k, v, mask, lists, kind, empty_rows, sinks=sink, **settings)

    return torch.compile(call, fullgraph=True)


def assert_as_exact(call, dense, inputs: list[Tensor], mask: Tensor | None) -> None:
    """No further from fp64 than what has the whole mask, and the rounding of a weight: all alike under equal scores."""
    got = with_gradients(lambda *given: call(mask, *given), inputs)
    exact = [each.detach().double().requires_grad_() for each in inputs]
    for ours, theirs, truth in zip(got, with_gradients(dense, inputs), with_gradients(dense, exact), strict=True):
        error, allowed = ((each.double() - truth).norm() for each in (ours, theirs))
        assert error <= 1.5 * allowed + torch.finfo(torch.bfloat16).eps / 2 * truth.norm()


def on_gpu(*sizes: int) -> list[Tensor]:
    return [each.detach().cuda().bfloat16().requires_grad_() for each in leaves(*sizes)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", list(boolean_masks(2, 2)))
@pytest.mark.parametrize(("kind", "empty_rows"), [("shows", "zeros"), ("hides", "mean")])
def test_boolean_masks(sizes, name, kind, empty_rows):
    mask, inputs = boolean_masks(*sizes)[name].cuda(), on_gpu(*sizes)

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = written_out(mask, fill=torch.finfo(q.dtype).min)(q, k, v)
        return out.where(mask.any(-1, keepdim=True), 0.0) if empty_rows == "zeros" else out

    assert_as_exact(compiled(kind, empty_rows), dense, inputs, mask if kind == "shows" else ~mask)


@pytest.mark.parametrize("sizes", [(300, 300), (256, 256), (130, 400)], ids=str)
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.bool), (torch.bfloat16,) * 2])
@pytest.mark.parametrize("size", [16, 64, 128])
def test_scores_that_are_multiplied_before_numbers_are_added(sizes, dtypes, size):
    of_numbers, of_factors = dtypes
    numbers = torch.randn(2, 4, *sizes, device="cuda")
    factors = numbers > 0 if of_factors == torch.bool else numbers.to(of_factors)
    mask = numbers.masked_fill(numbers < -0.5, torch.finfo(torch.bfloat16).min).to(of_numbers)
    mask[..., 7, :] = torch.finfo(torch.bfloat16).min  # a query that sees nothing but such numbers
    shapes = ((2, 4, sizes[0], size), (2, 2, sizes[1], size), (2, 2, sizes[1], size))
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return multiplied(factors.to(q.dtype) if of_factors != torch.bool else factors)(q, k, v, mask.to(q.dtype))

    assert_as_exact(compiled("added", "nan", factors=factors), dense, inputs, mask)


@pytest.mark.parametrize("least", [-1e9, torch.finfo(torch.bfloat16).min], ids=str)
@pytest.mark.parametrize("name", ["causal", "prefix", "random", "by row"])
def test_numbers_that_are_added(name, least):
    shown = boolean_masks(300, 300)[name].cuda()
    mask = torch.randn(shown.shape, device="cuda", dtype=torch.bfloat16).masked_fill(~shown, least)
    mask[..., -1, :] = least  # a query that sees nothing but such numbers
    assert_as_exact(compiled("added", "nan"), written_out(mask, added=True), on_gpu(300, 300), mask)


@pytest.mark.parametrize("shape", [(4, 300, 300), (2, 1, 300, 300), (4, 1, 300)], ids=str)
def test_numbers_that_are_added_get_their_gradient(shape):
    """The kernel's atomic additions: into numbers of one batch, of one head, and of one query, which all add to."""
    bias = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    bias[..., 20:40] = -1e9
    bias.requires_grad_()

    def call(mask: None, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        lists = glue.mask_blocks(bias.detach(), q.shape[2], k.shape[2], "added", "nan")
        return glue.masked_attention(q, k, v, bias, lists, "added", "nan")

    def dense(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return written_out(bias, added=True)(q, k, v)

    assert_as_exact(torch.compile(call, fullgraph=True), dense, [*on_gpu(300, 300), bias], None)


def test_a_bias_beside_a_boolean_mask_gets_its_gradient():
    mask = boolean_masks(300, 300)["by row"].clone()
    mask[:, :, 7] = False  # a query that gets the mean of all values, and to which nothing is added
    bias = torch.randn(4, 300, 300, device="cuda", dtype=torch.bfloat16).requires_grad_()

    def call(mask: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        lists = glue.mask_blocks(mask, q.shape[2], k.shape[2], "shows", "mean")
        lists = [*lists, glue.row_offsets(mask, bias.detach(), "shows")]
        return glue.masked_attention(q, k, v, mask, lists, "shows", "mean", bias=bias)

    def dense(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        hidden = bias.expand(2, 4, 300, 300).masked_fill(~mask.cuda(), float("-inf"))
        hidden = hidden.masked_fill(~mask.cuda().any(-1, keepdim=True), 0.0)
        scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2) / 4
        scores = scores.masked_fill(~mask.cuda().any(-1, keepdim=True), 0.0)
        return (scores + hidden).softmax(-1) @ v.repeat_interleave(2, 1)

    assert_as_exact(torch.compile(call, fullgraph=True), dense, [*on_gpu(300, 300), bias], mask.cuda())


def test_soft_caps_and_sinks():
    mask = boolean_masks(300, 300)["window"].cuda()
    inputs = [*on_gpu(300, 300), torch.randn(4, device="cuda", dtype=torch.bfloat16).requires_grad_()]
    assert_as_exact(compiled("shows", "zeros", softcap=0.7), written_out(mask, softcap=0.7), inputs, mask)


def test_a_mask_that_the_graph_computes():
    ids = torch.arange(300, device="cuda") // 70

    def call(ids: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        (mask,) = glue.materialized([ids[:, None] >= ids])
        lists = glue.mask_blocks(mask, q.shape[2], k.shape[2], "shows", "zeros")
        return glue.masked_attention(q, k, v, mask, lists, "shows", "zeros")

    dense = written_out(ids[:, None] >= ids)
    assert_as_exact(torch.compile(call, fullgraph=True), dense, on_gpu(300, 300), ids)


def test_lengths_that_vary_take_two_graphs():
    call = compiled("shows", "zeros")
    for length in (256, 300, 700, 129, 1000):
        mask, inputs = boolean_masks(length, length)["prefix"].cuda(), on_gpu(length, length)
        with torch._dynamo.config.patch(error_on_recompile=length > 300):
            assert_as_exact(call, written_out(mask), inputs, mask)


@pytest.mark.parametrize("sizes", [*SIZES, (1, 1), (1, 500)], ids=str)
@pytest.mark.parametrize("name", list(boolean_masks(2, 2)))
@pytest.mark.parametrize("kind", ["shows", "hides", "added"])
@pytest.mark.parametrize("empty_rows", ["zeros", "mean"])
def test_the_kernel_lists_what_the_reference_lists(sizes, name, kind, empty_rows):
    mask = boolean_masks(*sizes)[name]
    mask = {"shows": mask, "hides": ~mask, "added": torch.zeros(mask.shape).masked_fill(~mask, -1e9)}[kind]
    wanted = mask_blocks(mask, *sizes, kind, empty_rows)
    for same in (mask, mask.transpose(-1, -2).contiguous().transpose(-1, -2)):
        for got, want in zip(mask_blocks(same.cuda(), *sizes, kind, empty_rows), wanted, strict=True):
            assert torch.equal(got.cpu(), want)
