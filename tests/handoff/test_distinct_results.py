"""Results that are equal are one tensor only where eager mode returns one."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from tests.slow import one_in

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


def pieces_of_two(rows, weight):
    return (*(rows * 2).split(2, 1), *(rows * 2).split(2, 1))


def whole_and_part(rows, weight):
    first, second = (rows * 2).clone(), (rows * 2).clone()
    return first, second, first[0]


def a_clone_beside_a_view(rows, weight):
    value = (rows * 2).clone()
    return value, value.clone(), value.view(-1)


def columns(rows, weight):
    return (rows * 2).split(4, 1)[0], (rows * 2).split(4, 1)[0]


def one_column_many_times(rows, weight):
    return (rows * 2)[:, :1].expand(5, 4), (rows * 2)[:, :1].expand(5, 4)


def written_results(call, *inputs):
    """The results, each written to after the others were made, and what came of the gradients of all of them."""
    inputs = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in inputs]
    results = call(*inputs)
    grads = []
    if any(result.requires_grad for result in results):
        total = sum((place + 1) * result.sum() for place, result in enumerate(results) if result.requires_grad)
        grads = [grad for grad in torch.autograd.grad(total, inputs, allow_unused=True) if grad is not None]
    layouts = [torch.tensor([n for n, size in zip(r.stride(), r.shape, strict=True) if size > 1]) for r in results]
    with torch.no_grad():
        for place, result in enumerate(results):
            if 0 not in result.stride():
                result.add_(place + 1)
    return [*results, *grads, *layouts]


WITH_GRADIENTS = (
    *(losses, row_numbers, attention, clones_of_a_value, one_tensor_twice, views_of_one_value, an_input_twice),
    *(whole_and_part, a_clone_beside_a_view, one_column_many_times),
)
SPLIT = (pieces_of_two, columns)  # with gradients, pieces are not written in place


@pytest.mark.parametrize("compiler", one_in(2, ["aot_eager", "inductor"]))
@pytest.mark.parametrize(
    ("fn", "grad"), [*itertools.product(WITH_GRADIENTS, (True, False)), *itertools.product(SPLIT, (False,))]
)
def test_who_writes_to_one_result_writes_to_what_it_shares_memory_with_in_eager(fn, grad, compiler):
    torch._dynamo.reset()
    given = (QUERY, QUERY + 1) if fn is attention else (ROWS, WEIGHT)
    inputs = [tensor.clone().requires_grad_(grad) for tensor in given]
    compiled = torch.compile(fn, backend="glue", options={"compiler": compiler})
    for got, want in zip(written_results(compiled, *inputs), written_results(fn, *inputs), strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_results_that_differ_are_not_copied(monkeypatch):
    from glue_compiler.handoff import distinct_results

    copied = []
    real = distinct_results._apart
    monkeypatch.setattr(distinct_results, "_apart", lambda *args: copied.append(args) or real(*args))
    torch._dynamo.reset()
    options = {"compiler": "aot_eager"}
    torch.compile(lambda x, y: (x.sin(), y.sin()), backend="glue", options=options)(ROWS, ROWS + 1)
    assert not copied
    torch.compile(lambda x: (x.sort()[0], x.sort()[0]), backend="glue", options=options)(ROWS.clone().requires_grad_())
    assert copied
