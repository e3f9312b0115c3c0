"""Through Inductor on a GPU: what the pass writes is as close to fp64 as the dense mask in the same dtype."""

import pytest
import torch
import torch.nn.functional as F

from tests.passes.specialize_attention.attention import counts, specialized

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def short_rows_too(monkeypatch):
    for name in ("pays", "lists_pay", "gradient_pays"):
        monkeypatch.setattr(f"glue_compiler.passes.specialize_attention.analysis.{name}", lambda *_, **__: True)


def documents(starts, window):
    token = torch.arange(starts.shape[1], device=starts.device)
    ids = starts.cumsum(-1)
    distance = token[:, None] - token
    return (ids[:, None, :, None] == ids[:, None, None, :]) & (distance >= 0) & (distance < window)


def dense(query, key, value, starts, window):
    mask = documents(starts, window)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


@pytest.mark.parametrize("length", [300, 1024])
@pytest.mark.parametrize("window", [4096, 100])
@pytest.mark.parametrize("probability", [0.0, 0.01])
@pytest.mark.parametrize("compiler", ["inductor", "aot_eager"])
def test_documents_and_windows(length, window, probability, compiler):
    torch.manual_seed(0)
    shapes = ((2, 4, length, 64), (2, 2, length, 64), (2, 2, length, 64))
    tensors = [torch.randn(s, dtype=torch.bfloat16, device="cuda", requires_grad=True) for s in shapes]
    starts = torch.rand(2, length, device="cuda") < probability
    run = specialized(lambda *t: dense(*t, starts, window), eager=False, compiler=compiler)

    def with_gradients(fn, inputs):
        out = fn(*inputs)
        torch.manual_seed(1)
        return [out, *torch.autograd.grad(out, inputs, torch.randn(out.shape, device="cuda").to(out.dtype))]

    actual = with_gradients(run.call, tensors)
    exact = with_gradients(
        lambda *t: dense(*t, starts, window), [t.detach().double().requires_grad_() for t in tensors]
    )
    masked = with_gradients(lambda *t: dense(*t, starts, window), tensors)
    assert counts(run) == {"packed": 1}
    for got, want, other in zip(actual, exact, masked, strict=True):
        allowed = (other.double() - want).norm() / want.norm()
        assert (got.double() - want).norm() / want.norm() <= 2 * allowed + 1e-3


@pytest.mark.parametrize("window", [4096, 100])
def test_a_mask_of_numbers_beside_sinks_is_proved(window):
    """The number is a tensor on the device, as transformers makes it for attention that it writes out."""

    def written(query, key, value, sinks, starts):
        shown = documents(starts, window)
        zero = torch.tensor(0.0, device=query.device, dtype=query.dtype)
        scores = query @ key.mT * 0.125 + torch.where(shown, zero, torch.finfo(query.dtype).min)
        column = sinks.reshape(1, -1, 1, 1).expand(2, -1, 1024, -1)
        return F.softmax(torch.cat([scores, column], -1), -1)[..., :-1] @ value

    torch.manual_seed(0)
    tensors = [torch.randn(2, 4, 1024, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
    tensors.append(torch.tensor([0.5, -1.0, 3.0, 8.0], dtype=torch.bfloat16, device="cuda"))
    starts = torch.rand(2, 1024, device="cuda") < 0.01

    def with_gradients(fn, dtype):
        inputs = [each.to(dtype).requires_grad_() for each in tensors]
        out = fn(*inputs, starts)
        torch.manual_seed(1)
        return [out, *torch.autograd.grad(out, inputs, torch.randn(out.shape, device="cuda").to(out.dtype))]

    run = specialized(written, eager=False, compiler="inductor")
    actual = with_gradients(run.call, torch.bfloat16)
    assert counts(run) == {"packed": 1}
    exact, rounded = with_gradients(written, torch.float64), with_gradients(written, torch.bfloat16)
    for got, want, other in zip(actual, exact, rounded, strict=True):
        allowed = (other.double() - want).norm() / want.norm()
        assert (got.double() - want).norm() / want.norm() <= 1.5 * allowed + 2e-3


def test_lengths_that_change_do_not_recompile_or_sync():
    starts = torch.rand(1, 512, device="cuda") < 0.01
    tensors = [torch.randn(1, 2, 512, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in range(3)]
    run = specialized(lambda q, k, v, s: dense(q, k, v, s, 4096), eager=False, compiler="inductor")
    run.call(*tensors, starts).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for probability in (0.0, 0.1, 0.5):
            other = torch.rand(1, 512, device="cuda") < probability
            run.call(*tensors, other).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(run.graphs) == 1


def test_dynamic_rows_and_lengths():
    def fn(x, starts):
        query, key, value = x.unflatten(-1, (3, 4, 64)).permute(2, 0, 3, 1, 4).unbind()
        return dense(query, key, value, starts, 4096)

    run = specialized(fn, eager=False, compiler="inductor")
    for rows, length in ((2, 300), (3, 500)):
        starts = torch.rand(rows, length, device="cuda") < 0.01
        x = torch.randn(rows, length, 3 * 4 * 64, dtype=torch.bfloat16, device="cuda")
        exact = fn(x.double(), starts)
        for tensor in (x, starts):
            torch._dynamo.mark_dynamic(tensor, 0)
            torch._dynamo.mark_dynamic(tensor, 1)
        assert (run.call(x, starts).double() - exact).norm() / exact.norm() < 1e-2
    assert len(run.graphs) == 1
    assert counts(run) == {"packed": 1}


@pytest.mark.parametrize("window", [4096, 100])
@pytest.mark.parametrize("is_causal", [True, False])
def test_padding(is_causal, window):
    """Queries that see no key get zeros, as from the reference; cuDNN, the default on Hopper, gives other values."""
    length = 700
    valid = torch.ones(4, length, dtype=torch.bool, device="cuda")
    valid[0, :300], valid[1, 400:], valid[2, ::3], valid[3] = False, False, False, False

    def padded(query, key, value):
        token = torch.arange(length, device="cuda")
        distance = token[:, None] - token
        near = (distance >= 0) & (distance < window) if is_causal else distance.abs() < window
        return F.scaled_dot_product_attention(query, key, value, attn_mask=near & valid[:, None, None], enable_gqa=True)

    def with_gradients(fn, inputs):
        out = fn(*inputs)
        torch.manual_seed(1)
        return [out, *torch.autograd.grad(out, inputs, torch.randn(out.shape, device="cuda").to(out.dtype))]

    shapes = ((4, 4, length, 64), (4, 2, length, 64), (4, 2, length, 64))
    tensors = [torch.randn(s, dtype=torch.bfloat16, device="cuda", requires_grad=True) for s in shapes]
    run = specialized(padded, eager=False, compiler="inductor")
    actual = with_gradients(run.call, tensors)
    exact = with_gradients(padded, [t.detach().double().requires_grad_() for t in tensors])
    assert counts(run) == {"packed": 1}
    for got, want in zip(actual, exact, strict=True):
        assert (got.double() - want).norm() / want.norm() < 1e-2
        assert (got[3] == 0).all()


def test_padding_of_rows_whose_length_varies():
    """Two compiles, static and dynamic, both without the mask."""

    def padded(x, valid):
        rows, length, _ = x.shape
        query, key, value = (part.transpose(1, 2) for part in x.view(rows, length, 8, 64).split([4, 2, 2], 2))
        token = torch.arange(length, device="cuda")
        mask = (token[:, None] >= token) & valid[:, None, None]
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)

    def with_gradient(fn, x, valid):
        out = fn(x, valid)
        torch.manual_seed(1)
        return [out, *torch.autograd.grad(out, x, torch.randn(out.shape, device="cuda").to(out.dtype))]

    run = specialized(padded, eager=False, compiler="inductor")
    for rows, length in ((4, 700), (3, 517), (4, 1024), (5, 129)):
        x = torch.randn(rows, length, 512, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        valid = torch.arange(length, device="cuda") >= torch.randint(length, (rows, 1), device="cuda")
        exact = with_gradient(padded, x.detach().double().requires_grad_(), valid)
        for got, want in zip(with_gradient(run.call, x, valid), exact, strict=True):
            assert (got.double() - want).norm() / want.norm() < 1e-2
    assert [dict(report.passes[0].counts).get("packed") for report in run.session.graphs] == [1, 1]


def by_sdpa(query, key, value, mask):
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


def written_out(query, key, value, mask):
    key, value = (each.repeat_interleave(2, 1) for each in (key, value))
    scores = query @ key.transpose(-1, -2) * 0.125
    scores = scores.float() if query.dtype != torch.float64 else scores
    hidden = scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return hidden.softmax(-1).to(query.dtype) @ value


def masks(length):
    token = torch.arange(length, device="cuda")
    past = token[:, None] >= token
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device="cuda")
    return {
        "prefix": past | (token < length // 3),
        "by head": past & (torch.rand(4, length, length, device="cuda") < 0.5),
        "by row": (past & (torch.rand(2, length, length, device="cuda") < 0.9))[:, None],
        "added": (slopes[:, None, None] * (token - token[:, None])).masked_fill(~past, -1e9),
    }


@pytest.mark.parametrize("length", [300, 1024])
@pytest.mark.parametrize("name", ["prefix", "by head", "by row", "added"])
@pytest.mark.parametrize("attention", [by_sdpa, written_out])
def test_masks_that_are_inputs(attention, name, length):
    torch.manual_seed(0)
    mask = masks(length)[name]
    shapes = ((2, 4, length, 64), (2, 2, length, 64), (2, 2, length, 64))
    tensors = [torch.randn(s, dtype=torch.bfloat16, device="cuda", requires_grad=True) for s in shapes]

    def with_gradients(call, inputs, mask):
        out = call(*inputs, mask.to(inputs[0].dtype) if attention is by_sdpa and mask.is_floating_point() else mask)
        torch.manual_seed(1)
        return [out, *torch.autograd.grad(out, inputs, torch.randn(out.shape, device="cuda").to(out.dtype))]

    run = specialized(attention, eager=False, compiler="inductor")
    actual = with_gradients(run.call, tensors, mask)
    masked = with_gradients(attention, tensors, mask)
    exact = with_gradients(attention, [t.detach().double().requires_grad_() for t in tensors], mask)
    assert counts(run) == {"listed": 1}
    for got, want, other in zip(actual, exact, masked, strict=True):
        assert (got.double() - want).norm() <= 2 * (other.double() - want).norm() + 1e-3 * want.norm()


def test_a_mask_that_is_an_input_of_rows_whose_length_varies():
    def layer(x, mask):
        rows, length, _ = x.shape
        query, key, value = (part.transpose(1, 2) for part in x.view(rows, length, 8, 64).split([4, 2, 2], 2))
        return by_sdpa(query, key, value, mask)

    run = specialized(layer, eager=False, compiler="inductor")
    for length in (700, 517, 1024, 129):
        mask = masks(length)["prefix"]
        x = torch.randn(2, length, 512, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        exact = layer(x.double(), mask)
        assert (run.call(x, mask).double() - exact).norm() / exact.norm() < 1e-2
    assert [dict(report.passes[0].counts).get("listed") for report in run.session.graphs] == [1, 1]


def relative_bias(table, length, seen):
    """T5's: a learned number for each head and distance, ``[1, H, T, T]``; and what hides padding, for each row."""
    token = torch.arange(length, device=table.device)
    bias = table[(token - token[:, None]).clamp(-15, 16) + 15].permute(2, 0, 1)[None]
    if seen is None:
        return bias
    hidden = torch.zeros_like(seen, dtype=table.dtype).masked_fill(~seen, torch.finfo(table.dtype).min)
    return bias + hidden[:, None, None]


def two_layers(attention):
    def fn(query, key, value, table, seen=None):
        bias = relative_bias(table, query.shape[2], seen).to(query.dtype)
        return attention(attention(query, key, value, bias), key, value, bias)

    return fn


def softmax_of_sum(query, key, value, bias):
    scores = query @ key.mT * 0.125 + bias
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    return weights.to(query.dtype) @ value


def assert_learned(call, fn, tensors, seen=None):
    """Outputs and gradients, the table's too, are about as close to fp64 as eager's are."""

    def with_gradients(fn, inputs):
        out = fn(*inputs, seen)
        torch.manual_seed(1)
        return [out, *torch.autograd.grad(out, inputs, torch.randn(out.shape, device="cuda").to(out.dtype))]

    actual, eager = with_gradients(call, tensors), with_gradients(fn, tensors)
    exact = with_gradients(fn, [each.detach().double().requires_grad_() for each in tensors])
    for got, want, other in zip(actual, exact, eager, strict=True):
        allowed = 2 * (other.double() - want).norm() + torch.finfo(got.dtype).eps / 4 * want.norm()
        assert (got.double() - want).norm() <= allowed


def learned_inputs(length, dtype):
    torch.manual_seed(0)
    shapes = ((2, 8, length, 64), (2, 8, length, 64), (2, 8, length, 64), (32, 8))
    return [torch.randn(shape, dtype=dtype, device="cuda", requires_grad=True) for shape in shapes]


@pytest.mark.parametrize(
    ("attention", "dtype", "length", "is_padded"),
    [
        (by_sdpa, torch.bfloat16, 2048, True),
        (by_sdpa, torch.float32, 1024, False),
        (softmax_of_sum, torch.bfloat16, 1100, False),
        (softmax_of_sum, torch.float32, 1100, True),
    ],
)
def test_a_learned_bias(attention, dtype, length, is_padded):
    fn = two_layers(attention)
    run = specialized(fn, eager=False, compiler="inductor")
    seen = torch.arange(length, device="cuda") < torch.tensor([[length], [length // 2]], device="cuda")
    assert_learned(run.call, fn, learned_inputs(length, dtype), seen if is_padded else None)
    assert counts(run) == {"listed": 2}


def test_a_learned_bias_of_rows_whose_length_varies():
    """Inductor fails on its gradient for sizes that are symbols, so the second graph keeps its attention."""
    fn = two_layers(by_sdpa)
    run = specialized(fn, eager=False, compiler="inductor")
    for length in (1024, 1300):
        assert_learned(run.call, fn, learned_inputs(length, torch.bfloat16))
    assert [dict(report.passes[0].counts).get("listed") for report in run.session.graphs] == [2, None]
