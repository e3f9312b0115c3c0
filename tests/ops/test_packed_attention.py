"""packed_attention: attention under a mask of documents, without the mask."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from glue_compiler.ops import (
    causal_attention,
    document_blocks,
    document_offsets,
    exact_document_offsets,
    packed_attention,
    varlen_attention,
)
from glue_compiler.ops.document_blocks import BLOCK, block_lists_of_seen, visible_range

MASKS = list(itertools.product([True, False], [-1, 1, 40, 200]))


def documents(length: int = 300, batch: int = 2) -> Tensor:
    """Starts: in the first row documents of 1, 2, 125 (across no block end), then long ones; one in the second."""
    starts = torch.zeros(batch, length, dtype=torch.bool)
    starts[0, [1, 3, 128, 140, 290]] = True
    return starts


def dense_mask(starts: Tensor, is_causal: bool, window: int) -> Tensor:
    """What the operators stand for, element by element: bool ``[B, 1, T, T]``."""
    ids = starts.cumsum(1)
    position = torch.arange(starts.shape[1], device=starts.device)
    distance = position[:, None] - position
    mask = ids[:, :, None] == ids[:, None]
    if is_causal:
        mask = mask & (distance >= 0)
    if window > 0:
        mask = mask & (distance.abs() < window)
    return mask[:, None]


def leaves(length: int, batch: int, dtype: torch.dtype = torch.float64, device: str = "cpu") -> list[Tensor]:
    """Query of 4 heads, key and value of 2, as a model makes them: ``[B, T, H, D]``, transposed."""
    return [
        torch.randn(batch, length, heads, 16, dtype=dtype, device=device).transpose(1, 2).requires_grad_()
        for heads in (4, 2, 2)
    ]


def of_few_sizes(starts: Tensor) -> Tensor:
    return exact_document_offsets(starts, few_sizes=True)


def with_gradients(call, inputs: list[Tensor]) -> list[Tensor]:
    out = call(*inputs)
    grad = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view(out.shape)
    return [out, *torch.autograd.grad(out, inputs, grad)]


def assert_equal_to_dense(call, starts: Tensor, is_causal: bool, window: int, inputs: list[Tensor]) -> None:
    mask = dense_mask(starts, is_causal, window)
    expected = with_gradients(
        lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True), inputs
    )
    for got, want in zip(with_gradients(call, inputs), expected, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("offsets", [document_offsets, exact_document_offsets, of_few_sizes])
@pytest.mark.parametrize(("is_causal", "window"), MASKS)
def test_outputs_and_gradients_are_those_of_the_dense_mask(is_causal, window, offsets):
    starts = documents()
    cu_seqlens = offsets(starts)
    assert_equal_to_dense(
        lambda q, k, v: packed_attention(q, k, v, cu_seqlens, 300, is_causal, window),
        starts,
        is_causal,
        window,
        leaves(300, 2),
    )


@pytest.mark.parametrize(("is_causal", "window"), MASKS)
def test_flex_attention_over_the_blocks_gives_the_same(is_causal, window):
    """On the CPU flex_attention evaluates the mask alone; the lists are proved by the tests below."""
    starts = documents()
    cu_seqlens = document_offsets(starts)
    blocks = document_blocks(cu_seqlens, 2, 300, is_causal, window)
    assert_equal_to_dense(
        lambda q, k, v: packed_attention(q, k, v, cu_seqlens, 300, is_causal, window, None, blocks),
        starts,
        is_causal,
        window,
        leaves(300, 2),
    )


def with_a_column(mask: Tensor):
    """Softmax over the scores and one more of each query, ``sinks``, whose value is zero."""

    def call(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> Tensor:
        key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], 1) for each in (key, value))
        scores = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(~mask, float("-inf"))
        column = (sinks[:, None, None] if sinks.dim() == 1 else sinks).expand(*scores.shape[:3], 1)
        return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ value

    return call


SINKS = {
    "of heads": lambda: torch.tensor([0.5, -1.0, 3.0, 40.0]),
    "of queries": lambda: torch.randn(2, 4, 300, 1),
    "none": lambda: torch.full((4,), float("-inf")),
    "of one head for all rows": lambda: torch.randn(1, 4, 1, 1),
}


@pytest.mark.parametrize("kernel", ["varlen", "flex"])
@pytest.mark.parametrize(("is_causal", "window"), MASKS)
@pytest.mark.parametrize("kind", SINKS)
def test_sinks_are_one_more_column_of_the_softmax(kind, is_causal, window, kernel):
    starts = documents()
    cu_seqlens = document_offsets(starts)
    blocks = document_blocks(cu_seqlens, 2, 300, is_causal, window) if kernel == "flex" else None
    inputs = [*leaves(300, 2), SINKS[kind]().double().requires_grad_()]
    found = with_gradients(
        lambda q, k, v, s: packed_attention(q, k, v, cu_seqlens, 300, is_causal, window, None, blocks, sinks=s), inputs
    )
    expected = with_gradients(with_a_column(dense_mask(starts, is_causal, window)), inputs)
    tolerance = 1e-10 if kernel == "varlen" else 1e-6  # torch's logsumexp of fp64 has gradients of fp32
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_sinks_without_a_gradient_get_none():
    cu_seqlens, sinks = document_offsets(documents()), torch.randn(4, dtype=torch.float64)
    inputs = leaves(300, 2)
    with_gradients(lambda q, k, v: packed_attention(q, k, v, cu_seqlens, 300, True, sinks=sinks), inputs)
    assert sinks.grad is None


def test_the_gradient_of_sinks_alone():
    cu_seqlens = document_offsets(documents())
    inputs = [each.detach() for each in leaves(300, 2)]
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    (found,) = with_gradients(lambda s: packed_attention(*inputs, cu_seqlens, 300, True, sinks=s), [sinks])[1:]
    mask = dense_mask(documents(), True, -1)
    (expected,) = with_gradients(lambda s: with_a_column(mask)(*inputs, s), [sinks])[1:]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("is_causal", "window"), MASKS)
@pytest.mark.parametrize("hidden", [slice(0, 200), slice(150, 300), slice(3, 290, 2), slice(0, 300)])
def test_hidden_keys_are_seen_by_no_query(hidden, is_causal, window):
    starts, inputs = documents(), leaves(300, 2)
    visible = torch.ones(2, 300, dtype=torch.bool)
    visible[1, hidden] = False
    cu_seqlens = document_offsets(starts)
    blocks = document_blocks(cu_seqlens, 2, 300, is_causal, window, visible)
    mask = dense_mask(starts, is_causal, window) & visible[:, None, None]
    found = with_gradients(
        lambda q, k, v: packed_attention(q, k, v, cu_seqlens, 300, is_causal, window, None, blocks), inputs
    )
    expected = with_gradients(
        lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True), inputs
    )
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want)


def test_block_lists_of_lengths_that_are_symbols_are_the_same():
    first, last = visible_range(document_offsets(documents()), 2, 300, True, -1)
    visible = torch.rand(2, 300) < 0.9
    opaque = torch.ops.glue.block_lists_of_seen.default
    for got, want in zip(opaque(first, last, visible), block_lists_of_seen(first, last, visible), strict=True):
        assert torch.equal(got, want)
    torch.library.opcheck(opaque, (first, last, visible))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kernel", ["flex", "varlen"])
def test_half_precision_rounds_the_result_and_not_the_scores(kernel, autocast):
    """As kernels on a GPU do. Scores of 30 that are rounded to bf16 change weights by a tenth."""
    starts, inputs = documents(), [10 * each for each in leaves(300, 2, torch.float32)]
    inputs = [each.bfloat16().to(torch.float32 if autocast else torch.bfloat16) for each in inputs]
    cu_seqlens = document_offsets(starts)
    blocks = document_blocks(cu_seqlens, 2, 300, True) if kernel == "flex" else None
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        found = packed_attention(*inputs, cu_seqlens, 300, True, -1, 0.2, blocks)
    exact = packed_attention(*(each.double() for each in inputs), cu_seqlens, 300, True, -1, 0.2)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-2)


def test_the_scale_is_used():
    starts = documents()
    cu_seqlens = document_offsets(starts)
    inputs = leaves(300, 2)
    halved = packed_attention(inputs[0] / 2, *inputs[1:], cu_seqlens, 300, True, -1, 0.5)
    torch.testing.assert_close(packed_attention(*inputs, cu_seqlens, 300, True, -1, 0.25), halved)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(packed_attention(*inputs, cu_seqlens, 300, True, -1, 0.5), halved)


def test_a_document_does_not_see_another():
    starts = documents()
    cu_seqlens = document_offsets(starts)
    query, key, value = (each.detach() for each in leaves(300, 2))
    before = packed_attention(query, key, value, cu_seqlens, 300, False)
    value[0, :, 128:140] += 1
    changed = (packed_attention(query, key, value, cu_seqlens, 300, False) != before).any(-1).any(1)
    assert changed[0].nonzero().flatten().tolist() == list(range(128, 140))
    assert not changed[1].any()


def test_half_precision_is_summed_in_fp32():
    starts = documents()
    cu_seqlens = document_offsets(starts)
    inputs = [each.detach().bfloat16() for each in leaves(300, 2)]
    out = packed_attention(*inputs, cu_seqlens, 300, True)
    exact = packed_attention(*(each.double() for each in inputs), cu_seqlens, 300, True)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, exact.bfloat16(), rtol=2**-7, atol=2**-12)


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_decides_the_dtype_and_gradients_keep_theirs(compiled):
    """Queries and keys come in fp32 from a rotary embedding, values in bf16 from a product."""
    starts = documents()
    query, key, value = leaves(300, 2, torch.float32)
    value = value.detach().bfloat16().requires_grad_()

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        cu_seqlens = torch.ops.glue.document_offsets(starts)
        return torch.ops.glue.packed_attention(query, key, value, cu_seqlens, 300, True)

    if compiled:
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        out, *gradients = with_gradients(call, [query, key, value])
    assert out.dtype == torch.bfloat16
    assert [each.dtype for each in gradients] == [torch.float32, torch.float32, torch.bfloat16]
    half = [each.detach().bfloat16() for each in (query, key, value)]
    torch.testing.assert_close(out, packed_attention(*half, document_offsets(starts), 300, True))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_offsets_are_where_documents_begin(data):
    batch, length = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 12))
    bits = data.draw(st.lists(st.booleans(), min_size=batch * length, max_size=batch * length))
    starts = torch.tensor(bits).view(batch, length)
    begins = [row * length + t for row in range(batch) for t in range(length) if t == 0 or starts[row, t]]
    assert exact_document_offsets(starts).tolist() == [*begins, batch * length]
    documents = 32 if len(begins) <= 32 else 64
    assert of_few_sizes(starts).tolist() == begins + [batch * length] * (documents + 1 - len(begins))
    padded = document_offsets(starts)
    assert padded.dtype == torch.int32
    assert padded.tolist() == begins + [batch * length] * (batch * length + 1 - len(begins))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_block_lists_are_those_of_the_dense_mask(data):
    batch, length = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 5 * BLOCK))
    is_causal, window = data.draw(st.booleans()), data.draw(st.one_of(st.just(-1), st.integers(1, 4 * BLOCK)))
    begins = data.draw(st.lists(st.integers(0, batch * length - 1), max_size=6))
    starts = torch.zeros(batch * length, dtype=torch.bool)
    starts[begins] = True
    starts = starts.view(batch, length)
    hidden = data.draw(st.one_of(st.none(), st.lists(st.integers(0, 5 * BLOCK - 1), max_size=3)))
    visible = None
    if hidden is not None:  # runs of hidden keys, as padding is, and single ones
        visible = torch.ones(batch, length, dtype=torch.bool)
        for i, key in enumerate(hidden):
            visible[i % batch, key : key + (1, 50, 2 * BLOCK)[i]] = False
    _, _, *lists = document_blocks(document_offsets(starts), batch, length, is_causal, window, visible)
    lists = lists[:8]

    blocks = -(-length // BLOCK)
    padded = torch.zeros(batch, blocks * BLOCK, blocks * BLOCK, dtype=torch.bool)
    padded[:, :length, :length] = dense_mask(starts, is_causal, window)[:, 0]
    if visible is not None:
        padded[:, :, :length] &= visible[:, None]
    parts = padded.view(batch, blocks, BLOCK, blocks, BLOCK)
    seen, full = parts.any(4).any(2), parts.all(4).all(2)
    for (count, index, full_count, full_index), by in ((lists[:4], lambda m: m), (lists[4:], lambda m: m.mT)):
        for row, block in itertools.product(range(batch), range(blocks)):
            in_part = index[row, 0, block, : count[row, 0, block]].tolist()
            in_full = full_index[row, 0, block, : full_count[row, 0, block]].tolist()
            assert sorted(in_full) == by(full)[row, block].nonzero().flatten().tolist()
            partly = by(seen & ~full)[row, block].nonzero().flatten().tolist()
            if visible is None:
                assert sorted(in_part) == partly
            else:  # a block whose visible keys all belong to other documents may be listed; its elements are masked
                assert set(partly) <= set(in_part)
                assert not set(in_part) & set(in_full)
        assert index.min() >= 0
        assert index.max() < blocks


def test_causal_attention_is_sdpa():
    inputs = leaves(40, 2)
    for got, want in zip(
        with_gradients(causal_attention, inputs),
        with_gradients(
            lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
            inputs,
        ),
        strict=True,
    ):
        torch.testing.assert_close(got, want)


def test_gradcheck():
    cu_seqlens = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
    inputs = [torch.randn(7, heads, 4, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    for is_causal, window in itertools.product([True, False], [-1, 2]):
        assert torch.autograd.gradcheck(
            lambda q, k, v: varlen_attention(q, k, v, cu_seqlens, 4, is_causal, window, 0.5)[0],  # noqa: B023
            inputs,
        )


def test_operators_keep_torchs_rules():
    cu_seqlens = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
    inputs = [torch.randn(7, heads, 4, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    torch.library.opcheck(varlen_attention, (*inputs, cu_seqlens, 4, True, -1, 0.5))
    detached = [each.detach() for each in inputs]
    out, logsumexp = varlen_attention(*detached, cu_seqlens, 4, True, -1, 0.5)
    backward = torch.ops.glue.varlen_attention_backward.default
    torch.library.opcheck(backward, (out, *detached, out, logsumexp, cu_seqlens, 4, True, -1, 0.5, "flash2"))
    starts = documents()
    torch.library.opcheck(torch.ops.glue.exact_document_offsets.default, (starts,))
    torch.library.opcheck(torch.ops.glue.exact_document_offsets.default, (starts, True))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("kernel", ["flex", "varlen", "exact"])
def test_one_graph_that_lengths_of_documents_do_not_recompile(kernel, dynamic):
    def call(starts, query, key, value):
        offsets = torch.ops.glue.exact_document_offsets if kernel == "exact" else torch.ops.glue.document_offsets
        cu_seqlens = offsets(starts)
        batch, _, length, _ = query.shape
        blocks = torch.ops.glue.document_blocks(cu_seqlens, batch, length, True) if kernel == "flex" else None
        return torch.ops.glue.packed_attention(query, key, value, cu_seqlens, length, True, blocks=blocks)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    inputs = leaves(300, 2)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for begins in ([5], [5, 140, 290], []):
            starts = torch.zeros(2, 300, dtype=torch.bool)
            starts[0, begins] = True
            with torch.compiler.set_stance("default" if begins == [5] else "fail_on_recompile"):
                got = with_gradients(lambda q, k, v: compiled(starts, q, k, v), inputs)  # noqa: B023
            expected = with_gradients(lambda q, k, v: call(starts, q, k, v), inputs)  # noqa: B023
            for one, other in zip(got, expected, strict=True):
                torch.testing.assert_close(one, other)


def traced_flex_attention() -> torch.fx.GraphModule:
    """What AOTAutograd makes of packed_attention over blocks, for two rows."""
    graphs = []

    def keep(gm, inputs):
        graphs.append(gm)
        return gm.forward

    def call(starts, query, key, value):
        cu_seqlens = torch.ops.glue.document_offsets(starts)
        blocks = torch.ops.glue.document_blocks(cu_seqlens, 2, 300, True)
        return torch.ops.glue.packed_attention(query, key, value, cu_seqlens, 300, True, blocks=blocks)

    compiled = torch.compile(call, backend=aot_autograd(fw_compiler=keep), fullgraph=True)
    compiled(documents(), *(each.detach() for each in leaves(300, 2)))
    return graphs[0]


def test_the_mask_of_flex_attention_has_no_annotations():
    """They would be strings, on which hashing the graph for Inductor's cache fails."""
    masks = [module for name, module in traced_flex_attention().named_children() if name.startswith("sdpa_mask")]
    assert len(masks) == 1
    assert all(node.type is None for node in masks[0].graph.nodes)


def test_what_flex_attention_finds_by_strides_has_those_of_a_contiguous_tensor():
    """Left to Inductor, the dimension of heads would get stride 0, and each row the lists of the first."""
    (flex,) = traced_flex_attention().graph.find_nodes(op="call_function", target=torch.ops.higher_order.flex_attention)
    read = [
        node for node in (*flex.args[4], *flex.args[8]) if isinstance(node, torch.fx.Node) and node.op != "get_attr"
    ]
    assert len(read) == 9  # four lists of counts and indices, and the first key that a query sees
    for node in read:
        assert node.args[0].target is torch.ops.glue.materialized.default
        shape = node.meta["val"].shape
        assert node.meta["val"].stride() == torch.empty(shape).stride()


@pytest.mark.slow
def test_inductor_compiles_flex_attention_and_its_metadata_in_one_graph():
    def call(starts, query, key, value):
        cu_seqlens = torch.ops.glue.document_offsets(starts)
        blocks = torch.ops.glue.document_blocks(cu_seqlens, 2, 300, True)
        return torch.ops.glue.packed_attention(query, key, value, cu_seqlens, 300, True, blocks=blocks)

    inputs = [each.detach() for each in leaves(300, 2, torch.float32)]
    got = torch.compile(call, fullgraph=True)(documents(), *inputs)
    torch.testing.assert_close(got, call(documents(), *inputs))


def test_wrong_arguments_are_value_errors():
    query, key, value = (torch.randn(7, heads, 4) for heads in (4, 2, 2))
    cu_seqlens = torch.tensor([0, 7], dtype=torch.int32)

    def call(query=query, key=key, value=value, cu_seqlens=cu_seqlens, window=-1):
        varlen_attention(query, key, value, cu_seqlens, 7, True, window, 1.0)

    call()
    for wrong, message in (
        ({"query": query[None]}, "expected query"),
        ({"query": query[:, :3]}, "key heads divide query heads"),
        ({"query": query[..., :3]}, "sizes must be equal"),
        ({"query": query[:6]}, "differ in tokens"),
        ({"query": query.double()}, "one floating dtype"),
        ({"cu_seqlens": cu_seqlens.long()}, "int32 vector"),
        ({"window": 0}, "window must be"),
    ):
        with pytest.raises(ValueError, match=message):
            call(**wrong)
    with pytest.raises(ValueError, match="starts must be bool"):
        document_offsets(torch.zeros(2, 3))
