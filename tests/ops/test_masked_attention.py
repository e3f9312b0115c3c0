"""mask_blocks and masked_attention: attention under any mask, by lists of blocks that are read from it."""

from __future__ import annotations

import importlib
import math

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

from glue_compiler.ops import flex_tiles, mask_blocks, row_offsets
from glue_compiler.ops.mask_blocks import mask_in_whole_blocks, to_whole_blocks
from tests.slow import one_in


def position(n: int) -> Tensor:
    return torch.arange(n)


def boolean_masks(queries: int, keys: int) -> dict[str, Tensor]:
    q, k = position(queries)[:, None] + (keys - queries), position(keys)
    generator = torch.Generator().manual_seed(0)
    documents = (k * 5) // keys
    return {
        "causal": k <= q,
        "prefix": (k <= q) | (k < keys // 3),
        "window": (k <= q) & (q - k < 40),
        "documents": (documents[None] == documents[q.clamp(min=0)[:, 0]][:, None]) & (k <= q),
        "random": torch.rand(queries, keys, generator=generator) < 0.3,
        "by head": torch.rand(4, queries, keys, generator=generator)
        < torch.tensor([0.01, 0.1, 0.5, 1.0])[:, None, None],
        "by row": (torch.rand(2, 1, 1, keys, generator=generator) < 0.7) & (k <= q),
        "of queries": (q % 3 == 0),
        "hidden block": ((k >= 150) | (k < 20))[None],
        "nothing": torch.zeros(1, keys, dtype=torch.bool),
        "everything": torch.ones(1, 1, dtype=torch.bool),
    }


def leaves(queries: int, keys: int, dtype: torch.dtype = torch.float64, device: str = "cpu") -> list[Tensor]:
    """Query of 4 heads, key and value of 2, as a model makes them: ``[B, T, H, D]``, transposed."""
    sizes = ((queries, 4), (keys, 2), (keys, 2))
    return [
        torch.randn(2, length, heads, 16, dtype=dtype, device=device).transpose(1, 2).requires_grad_()
        for length, heads in sizes
    ]


def with_gradients(call, inputs: list[Tensor]) -> list[Tensor]:
    out = call(*inputs)
    grad = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view(out.shape)
    return [out, *torch.autograd.grad(out, inputs, grad)]


def assert_equal(got: list[Tensor], wanted: list[Tensor]) -> None:
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


operator = torch.ops.glue.masked_attention


def by_lists(mask: Tensor, kind: str, empty_rows: str, **settings):
    def call(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Tensor:
        lists = mask_blocks(mask.detach(), q.shape[2], k.shape[2], kind, empty_rows)
        if settings.get("in_whole_blocks"):
            whole = mask_in_whole_blocks(mask, q.shape[2], k.shape[2], kind)
            lists = mask_blocks(whole, to_whole_blocks(q.shape[2]), to_whole_blocks(k.shape[2]), kind, empty_rows)
            return operator(q, k, v, whole, lists, kind, empty_rows, sinks=sinks[0] if sinks else None, **settings)
        if settings.get("bias") is not None:
            lists = [*lists, row_offsets(mask, settings["bias"].detach(), kind)]
        return operator(q, k, v, mask, lists, kind, empty_rows, sinks=sinks[0] if sinks else None, **settings)

    return call


def written_out(mask, *, added: bool = False, fill: float = float("-inf"), softcap: float | None = None):
    def call(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Tensor:
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores + mask if added else scores.masked_fill(~mask, fill)
        if not sinks:
            return scores.softmax(-1) @ v
        column = sinks[0].view(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v

    return call


SIZES = [(256, 256), (300, 300), (1, 130), (70, 200)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", one_in(3, list(boolean_masks(2, 2))))
@pytest.mark.parametrize("kind", ["shows", "hides"])
def test_a_boolean_mask_gives_what_sdpa_gives(sizes, name, kind):
    mask = boolean_masks(*sizes)[name]
    inputs = leaves(*sizes)
    wanted = with_gradients(
        lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True), inputs
    )
    given = mask if kind == "shows" else ~mask
    assert_equal(with_gradients(by_lists(given, kind, "zeros"), inputs), wanted)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", one_in(6, list(boolean_masks(2, 2))))
@pytest.mark.parametrize("kind", ["shows", "hides", "added"])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_a_mask_in_whole_blocks_gives_the_same(sizes, name, kind, has_sinks):
    shown = boolean_masks(*sizes)[name]
    empty_rows = "nan" if kind == "added" else "zeros"
    numbers = torch.zeros(shown.shape, dtype=torch.float64).masked_fill(~shown, float("-inf"))
    mask = {"shows": shown, "hides": ~shown, "added": numbers}[kind]
    inputs = leaves(*sizes)
    if has_sinks:
        inputs.append(torch.randn(inputs[0].shape[1], dtype=torch.float64, requires_grad=True))
    wanted = with_gradients(by_lists(mask, kind, empty_rows), inputs)
    assert_equal(with_gradients(by_lists(mask, kind, empty_rows, in_whole_blocks=True), inputs), wanted)


def test_a_mask_in_whole_blocks_hides_what_is_behind_it():
    of_keys = torch.ones(2, 1, 1, 130, dtype=torch.bool)
    found = mask_in_whole_blocks(of_keys, 300, 130, "shows")
    assert found.shape == (2, 1, 1, 256)
    assert found.sum() == 2 * 130
    found = mask_in_whole_blocks(torch.zeros(300, 130).expand(4, 300, 130), 300, 130, "added")
    assert found.shape == (1, 1, 384, 256)
    assert found[..., :300, :].isfinite().sum() == 300 * 130
    assert found[..., 300:, :].isfinite().sum() == 84  # its first key, or a block of queries that see none visits all
    assert mask_in_whole_blocks(torch.zeros(300, 1), 300, 130, "added")[..., :300, :].isfinite().sum() == 300 * 130
    torch.library.opcheck(mask_in_whole_blocks, (of_keys, 300, 130, "shows"))


@pytest.mark.parametrize("name", list(boolean_masks(2, 2)))
def test_a_query_that_sees_no_key_gets_the_mean_of_all_where_scores_are_filled_with_a_number(name):
    mask = boolean_masks(300, 300)[name]
    inputs = leaves(300, 300)
    wanted = with_gradients(written_out(mask, fill=torch.finfo(torch.float64).min), inputs)
    assert_equal(with_gradients(by_lists(mask, "shows", "mean"), inputs), wanted)


def test_a_checkpoint_around_an_eager_call_leaves_the_gradients_as_they_are():
    """torch traces the gradient of changed scores inside the call, in sight of the checkpoint's hooks."""
    mask = boolean_masks(30, 30)["random"].clone()
    mask[7] = False
    inputs = leaves(30, 30)
    call = by_lists(mask, "shows", "mean")
    wanted = with_gradients(call, inputs)
    assert_equal(with_gradients(lambda *given: checkpoint(call, *given, use_reentrant=False), inputs), wanted)


def test_a_query_that_sees_no_key_gets_nan_where_scores_are_filled_with_minus_infinity():
    mask = boolean_masks(300, 300)["random"].clone()
    mask[[0, 150]] = False
    inputs = leaves(300, 300)
    assert_equal([by_lists(mask, "shows", "nan")(*inputs)], [written_out(mask)(*inputs)])


@pytest.mark.parametrize("least", [-1e9, torch.finfo(torch.float32).min, float("-inf")], ids=str)
@pytest.mark.parametrize("name", ["causal", "prefix", "random", "by row", "hidden block"])
def test_numbers_are_added_to_the_scores(name, least):
    shown = boolean_masks(300, 300)[name]
    mask = torch.randn(shown.shape, dtype=torch.float64).masked_fill(~shown, least)
    mask[..., 0, 0] = 0 if least == float("-inf") else mask[..., 0, 0]  # in place of gradients that are all NaN
    inputs = leaves(300, 300)
    wanted = with_gradients(written_out(mask, added=True), inputs)
    assert_equal(with_gradients(by_lists(mask, "added", "nan"), inputs), wanted)


@pytest.mark.parametrize("least", [-1e9, -1e29, torch.finfo(torch.float64).min], ids=str)
def test_a_query_whose_keys_all_get_a_number_that_hides_is_computed_from_those_numbers(least):
    mask = torch.full((300, 300), least, dtype=torch.float64)
    mask[7, 20:] *= 1.5
    mask[100:200, :50] = 0
    inputs = leaves(300, 300)
    wanted = with_gradients(written_out(mask, added=True), inputs)
    assert_equal(with_gradients(by_lists(mask, "added", "zeros"), inputs), wanted)


@pytest.mark.parametrize(
    ("least", "others"), [(-1e7, 0), (-9e8, 0), (-5e8, -2e9), (-9e8, float("-inf")), (1e30, 0), (1e9, -1e9)], ids=str
)
def test_a_row_of_large_numbers_leaves_weights_that_backward_finds_again(least, others):
    """A logarithm of the sum of weights has no digits left beside such a number, in fp32."""
    mask = torch.zeros(300, 300).masked_fill(~boolean_masks(300, 300)["random"], -1e9)
    mask[100:103] = least
    mask[100:103, ::2] = others if others else least
    inputs = [each.detach().float().requires_grad_() for each in leaves(300, 300)]
    wanted = with_gradients(written_out(mask, added=True), inputs)
    for got, want in zip(with_gradients(by_lists(mask, "added", "nan"), inputs), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_query_of_minus_infinities_gets_zeros_as_from_sdpa():
    mask = torch.zeros(300, 300, dtype=torch.float64).masked_fill(~boolean_masks(300, 300)["prefix"], float("-inf"))
    mask[7] = float("-inf")
    inputs = leaves(300, 300)
    wanted = with_gradients(
        lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True), inputs
    )
    assert_equal(with_gradients(by_lists(mask, "added", "zeros"), inputs), wanted)


def test_a_slope_for_each_head_is_added_without_a_matrix():
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
    mask = (position(300) * slopes[:, None])[:, None]
    inputs = leaves(300, 300)
    wanted = with_gradients(written_out(mask, added=True), inputs)
    assert_equal(with_gradients(by_lists(mask, "added", "nan"), inputs), wanted)


@pytest.mark.parametrize("rows", [slice(None), slice(200, 201)], ids=["causal", "of keys"])
def test_a_bias_is_added_beside_a_boolean_mask(rows):
    mask, bias = boolean_masks(300, 300)["causal"][rows], torch.randn(1, 4, 1, 300, dtype=torch.float64)
    inputs = leaves(300, 300)
    both = bias.expand(1, 4, 300, 300).masked_fill(~mask, float("-inf"))
    wanted = with_gradients(written_out(both, added=True), inputs)
    assert_equal(with_gradients(by_lists(mask, "shows", "nan", bias=bias), inputs), wanted)
    inputs.append(torch.randn(4, dtype=torch.float64, requires_grad=True))
    wanted = with_gradients(written_out(both, added=True), inputs)
    for empty_rows in ("nan", "zeros"):
        assert_equal(with_gradients(by_lists(mask, "shows", empty_rows, bias=bias), inputs), wanted)


@pytest.mark.parametrize("hidden", [-1e9, torch.finfo(torch.float32).min], ids=str)
def test_a_bias_that_hides_all_keys_that_a_mask_shows_leaves_weights_that_backward_finds_again(hidden):
    mask, bias = boolean_masks(300, 300)["causal"], torch.zeros(2, 1, 1, 300)
    bias[0, ..., :40] = hidden
    inputs = [each.detach().float().requires_grad_() for each in leaves(300, 300)]
    both = bias.expand(2, 1, 300, 300).masked_fill(~mask, float("-inf"))
    wanted = with_gradients(written_out(both, added=True), inputs)
    for got, want in zip(with_gradients(by_lists(mask, "shows", "nan", bias=bias), inputs), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(4, 1, 300), (2, 1, 70, 300), (1, 1), (70, 1)], ids=str)
@pytest.mark.parametrize("name", ["causal", "by head", "by row", "nothing", "of queries"])
@pytest.mark.parametrize("kind", ["shows", "hides"])
def test_offsets_are_the_largest_numbers_that_are_added_where_a_key_is_seen(shape, name, kind):
    mask, bias = boolean_masks(70, 300)[name], torch.randn(shape)
    bias[..., :3] = float("-inf")
    wanted = bias.expand(2, 4, 70, 300).masked_fill(~mask, float("-inf")).amax(-1)
    found = row_offsets(mask if kind == "shows" else ~mask, bias, kind)
    torch.testing.assert_close(found.expand(2, 4, 70), wanted.where(wanted.isfinite(), 0))
    torch.library.opcheck(row_offsets, (mask, bias, kind))


# -- numbers with a gradient

SHAPES = [(300, 300), (1, 4, 300, 300), (2, 1, 300, 300), (2, 4, 300, 300), (4, 1, 300), (1, 1, 300, 1), (1, 1)]


@pytest.fixture(params=[False, True], ids=["in memory", "flex_attention"])
def by_either(request, monkeypatch):
    """Off a GPU all scores are in memory; torch's operator, which a GPU gets, has the same gradients in eager mode."""
    if request.param:
        # Of the same name as the operator, so an attribute of the package would be that.
        module = importlib.import_module("glue_compiler.ops.masked_attention")
        monkeypatch.setattr(module, "_is_dense", lambda *_: False)


def learned(shape: tuple[int, ...], hidden: float | None = None) -> Tensor:
    numbers = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    if hidden is not None:
        numbers[..., 20:40] = hidden
        numbers[..., 7, :] = hidden if hidden > float("-inf") else numbers[..., 7, :]
    return numbers.requires_grad_()


def added(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return written_out(bias, added=True)(q, k, v)


def added_by_lists(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return by_lists(bias, "added", "nan")(q, k, v)


@pytest.mark.usefixtures("by_either")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_numbers_that_are_added_get_their_gradient(shape):
    inputs = [*leaves(300, 300), learned(shape)]
    assert_equal(with_gradients(added_by_lists, inputs), with_gradients(added, inputs))


@pytest.mark.usefixtures("by_either")
@pytest.mark.parametrize("hidden", [float("-inf"), -1e9, torch.finfo(torch.float64).min], ids=str)
def test_numbers_that_hide_keys_and_whole_rows_get_their_gradient(hidden):
    inputs = [*leaves(70, 200), learned((4, 70, 200), hidden)]
    assert_equal(with_gradients(added_by_lists, inputs), with_gradients(added, inputs))


@pytest.mark.usefixtures("by_either")
@pytest.mark.parametrize("empty_rows", ["mean", "zeros"])
@pytest.mark.parametrize("shape", [(4, 300, 300), (4, 1, 300)], ids=str)
def test_a_bias_beside_a_boolean_mask_gets_its_gradient(shape, empty_rows):
    mask = boolean_masks(300, 300)["by row"].clone()
    mask[:, :, 7] = False

    def dense(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2) / 4 + bias
        weights = scores.masked_fill(~mask, torch.finfo(torch.float64).min).softmax(-1)
        weights = weights if empty_rows == "mean" else weights.masked_fill(~mask.any(-1, keepdim=True), 0.0)
        return weights @ v.repeat_interleave(2, 1)

    def listed(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return by_lists(mask, "shows", empty_rows, bias=bias)(q, k, v)

    inputs = [*leaves(300, 300), learned(shape)]
    assert_equal(with_gradients(listed, inputs), with_gradients(dense, inputs))


@pytest.mark.usefixtures("by_either")
def test_numbers_with_a_gradient_under_a_soft_cap_and_beside_sinks():
    bias = learned((4, 300, 300))
    inputs = [*leaves(300, 300), torch.randn(4, dtype=torch.float64).requires_grad_(), bias]

    def listed(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, bias: Tensor) -> Tensor:
        return by_lists(bias, "added", "zeros", softcap=0.7)(q, k, v, sinks)

    def dense(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, bias: Tensor) -> Tensor:
        return written_out(bias, added=True, softcap=0.7)(q, k, v, sinks)

    assert_equal(with_gradients(listed, inputs), with_gradients(dense, inputs))


def multiplied(factors: Tensor, softcap: float | None = None):
    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *sinks: Tensor) -> Tensor:
        scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2) / math.sqrt(q.shape[-1])
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        scores = torch.where(factors, scores, 0.0) if factors.dtype == torch.bool else scores * factors
        return (scores + bias).softmax(-1) @ v.repeat_interleave(2, 1)

    return call


@pytest.mark.usefixtures("by_either")
@pytest.mark.parametrize("shape", [(300, 300), (2, 1, 300, 300), (4, 1, 300), (300, 1)], ids=str)
@pytest.mark.parametrize("is_boolean", [True, False], ids=["boolean", "numbers"])
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_scores_that_are_multiplied_before_numbers_are_added(shape, is_boolean, softcap):
    numbers = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    factors = numbers > 0 if is_boolean else numbers
    hidden = torch.where(numbers > 1, 0.0, -1e30).double().expand(2, 4, 300, 300).clone()
    hidden[..., 7, :] = -1e30  # a query that sees nothing but such numbers
    inputs = [*leaves(300, 300), (learned((4, 300, 300)).detach() + hidden).requires_grad_()]

    def listed(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return by_lists(bias, "added", "nan", factors=factors, softcap=softcap)(q, k, v)

    assert_equal(with_gradients(listed, inputs), with_gradients(multiplied(factors, softcap), inputs))


def test_a_checkpoint_around_numbers_with_a_gradient():
    inputs = [*leaves(30, 30), learned((4, 30, 30))]
    wanted = with_gradients(added, inputs)
    assert_equal(with_gradients(lambda *g: checkpoint(added_by_lists, *g, use_reentrant=False), inputs), wanted)


def test_what_goes_into_memory_passes_its_gradient_on():
    number, index = torch.randn(3, 4, dtype=torch.float64).t().requires_grad_(), torch.arange(3)
    torch.library.opcheck(torch.ops.glue.materialized.default, ([number, index],))
    copy, same = torch.ops.glue.materialized([number * 2, index])
    assert copy.is_contiguous()
    assert not same.requires_grad
    (gradient,) = torch.autograd.grad(copy.pow(2).sum(), number)
    torch.testing.assert_close(gradient, 8 * number.detach())


@pytest.mark.parametrize(
    ("dtype", "factors", "score_bytes"),
    [
        (torch.float32, None, 4),
        (torch.bfloat16, None, 2),
        (torch.bfloat16, torch.bool, 3),
        (torch.bfloat16, torch.bfloat16, 4),
        (torch.float32, torch.bool, 5),
    ],
    ids=str,
)
def test_what_is_read_for_each_score_leaves_the_kernel_room_in_shared_memory(dtype, factors, score_bytes, monkeypatch):
    """The blocks are those that fit the card; ``test_flex_tiles`` has them."""
    graphs, calls = [], []

    def of_call(query, score_bytes):
        calls.append((query.shape[3], score_bytes))
        return {"fwd_num_stages": 2}

    def keep(gm, inputs):
        graphs.append(gm)
        return gm.forward

    monkeypatch.setattr(flex_tiles, "of_call", of_call)
    inputs = [torch.randn(1, 2, 128, 64, dtype=torch.bfloat16) for _ in range(3)]
    mask = torch.zeros(128, 128, dtype=dtype)
    settings = {} if factors is None else {"factors": torch.ones(128, 128, dtype=factors)}
    call = by_lists(mask, "added", "nan", **settings)
    torch.compile(call, backend=aot_autograd(fw_compiler=keep), fullgraph=True)(*inputs)
    (flex,) = graphs[0].graph.find_nodes(op="call_function", target=torch.ops.higher_order.flex_attention)
    assert flex.args[6].get("fwd_num_stages") == 2
    assert set(calls) == {(64, score_bytes)}


def test_scores_are_capped_before_the_mask():
    mask = boolean_masks(300, 300)["prefix"]
    inputs = leaves(300, 300)
    wanted = with_gradients(written_out(mask, softcap=0.7), inputs)
    assert_equal(with_gradients(by_lists(mask, "shows", "nan", softcap=0.7), inputs), wanted)
    apart = by_lists(mask, "shows", "nan")(*inputs) - wanted[0]
    assert apart.abs().max() > 1e-3


def test_sinks_take_their_part_and_get_their_gradient():
    mask = boolean_masks(300, 300)["window"]
    inputs = [*leaves(300, 300), torch.randn(4, dtype=torch.float64).requires_grad_()]
    assert_equal(with_gradients(by_lists(mask, "shows", "zeros"), inputs), with_gradients(written_out(mask), inputs))


def test_lower_precision_is_as_exact_as_a_mask():
    mask = boolean_masks(300, 300)["prefix"]
    exact = leaves(300, 300)
    wanted = with_gradients(by_lists(mask, "shows", "zeros"), exact)
    inputs = [leaf.detach().bfloat16().requires_grad_() for leaf in exact]
    dense = with_gradients(
        lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True), inputs
    )
    for got, other, want in zip(with_gradients(by_lists(mask, "shows", "zeros"), inputs), dense, wanted, strict=True):
        assert got.dtype == torch.bfloat16
        assert (got - want).norm() <= 1.2 * (other - want).norm()


@pytest.mark.parametrize(("kind", "empty_rows"), [("seen", "zeros"), ("shows", "none")])
def test_unknown_settings_name_the_known_ones(kind, empty_rows):
    with pytest.raises(ValueError, match="must be one of"):
        mask_blocks(torch.ones(2, 2, dtype=torch.bool), 2, 2, kind, empty_rows)


@pytest.mark.parametrize(("mask", "kind"), [(torch.ones(2, 2), "shows"), (torch.ones(2, 2).bool(), "added")])
def test_a_mask_of_another_dtype_is_an_error(mask, kind):
    with pytest.raises(ValueError, match="cannot be"):
        mask_blocks(mask, 2, 2, kind, "zeros")


@pytest.mark.parametrize("kind", ["shows", "hides", "added"])
def test_the_operator_is_a_good_citizen(kind):
    mask = torch.ones(2, 1, 130, 70).bool() if kind != "added" else torch.zeros(130, 70)
    torch.library.opcheck(mask_blocks, (mask, 130, 70, kind, "zeros"))
