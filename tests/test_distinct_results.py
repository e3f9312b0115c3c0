"""Results that are equal are one tensor only where eager mode returns one."""

import pytest
import torch
import torch.nn.functional as F

ROWS, WEIGHT, TARGET = (torch.randn(5, 8), torch.randn(37, 8), torch.arange(5))
QUERY = torch.randn(1, 2, 8, 16)


def losses(rows, weight):
    logits = F.linear(rows, weight)
    return F.cross_entropy(logits.clone(), TARGET), F.cross_entropy(logits, TARGET), F.cross_entropy(logits, TARGET)


def row_numbers(rows, weight):
    logits = F.linear(rows, weight)
    return logits.logsumexp(-1), logits.clone().logsumexp(-1), logits.argmax(-1), logits.clone().argmax(-1)


def attention(query, key):
    mask = torch.ones(8, 8, dtype=torch.bool).tril()
    masked = F.scaled_dot_product_attention(query, key, key, mask).transpose(1, 2)
    return masked, F.scaled_dot_product_attention(query, key, key, is_causal=True).transpose(1, 2)


def clones_of_a_value(rows, weight):
    value = rows.sin() + weight[:5].sum(-1, keepdim=True)
    return value.clone(), value.clone()


def one_tensor_twice(rows, weight):
    value = F.linear(rows, weight)
    return value, value


def views_of_one_value(rows, weight):
    value = F.linear(rows, weight)
    return value[:, :18], value[:, 18:36]


def an_input_twice(rows, weight):
    return rows.view(5, 8), rows.view(5, 8), F.linear(rows, weight)


def written_results(call, *inputs):
    """The results, each written to after the others were made, and what came of the gradients of all of them."""
    inputs = [tensor.double().requires_grad_() if tensor.requires_grad else tensor.clone() for tensor in inputs]
    results = call(*inputs)
    grads = []
    if any(result.requires_grad for result in results):
        total = sum((place + 1) * result.sum() for place, result in enumerate(results) if result.requires_grad)
        grads = torch.autograd.grad(total, inputs)
    with torch.no_grad():
        for place, result in enumerate(results):
            result.add_(place + 1)
    return [*results, *grads]


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    ("fn", "inputs"),
    [
        (losses, (ROWS, WEIGHT)),
        (row_numbers, (ROWS, WEIGHT)),
        (attention, (QUERY, QUERY + 1)),
        (clones_of_a_value, (ROWS, WEIGHT)),
        (one_tensor_twice, (ROWS, WEIGHT)),
        (views_of_one_value, (ROWS, WEIGHT)),
        (an_input_twice, (ROWS, WEIGHT)),
    ],
)
def test_who_writes_to_one_result_writes_to_what_it_shares_memory_with_in_eager(fn, inputs, grad, compiler):
    torch._dynamo.reset()
    inputs = [tensor.clone().requires_grad_(grad) for tensor in inputs]
    compiled = torch.compile(fn, backend="glue", options={"compiler": compiler})
    for got, want in zip(written_results(compiled, *inputs), written_results(fn, *inputs), strict=True):
        torch.testing.assert_close(got, want, atol=1e-5 if got.dtype is torch.float32 else 1e-10, rtol=1e-5)


def test_results_that_differ_are_not_copied(monkeypatch):
    from glue_compiler import distinct_results

    copied = []
    real = distinct_results._replaced
    monkeypatch.setattr(distinct_results, "_replaced", lambda *args: copied.append(args) or real(*args))
    torch._dynamo.reset()
    options = {"compiler": "aot_eager"}
    torch.compile(lambda x, y: (x.sin(), y.sin()), backend="glue", options=options)(ROWS, ROWS + 1)
    assert not copied
    torch.compile(lambda x: (x.sort()[0], x.sort()[0]), backend="glue", options=options)(ROWS.clone().requires_grad_())
    assert copied
