"""Logits that a graph returns beside their loss."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from glue_compiler.deferred.tensor import DeferredTensor
from tests.captured import compile_with_glue
from tests.passes.chunk_loss.runs import (  # noqa: F401
    CLASSES,
    ONLY,
    assert_same,
    check,
    check_left_alone,
    check_rewritten,
    results_of,
    rows_and_head,
    small_chunks,
)
from tests.slow import one_in


def loss_of(logits, target):
    return F.cross_entropy(logits.reshape(-1, CLASSES), target.view(-1))


def model(hidden, weight, target):
    logits = F.linear(hidden, weight)
    return loss_of(logits, target), logits


def capped(hidden, weight, target):
    logits = torch.tanh(F.linear(hidden * 2, weight) / 5.0) * 5.0
    return loss_of(logits, target), logits


def transposed(hidden, weight, target):
    logits = (hidden + 1) @ weight.t().contiguous().t().t()
    return loss_of(logits, target), logits


def last_row(hidden, weight, target):
    logits = F.linear(hidden, weight)
    return loss_of(logits, target), logits[:, -1].contiguous()


def flat(hidden, weight, target):
    logits = F.linear(hidden, weight).view(-1, CLASSES)
    return loss_of(logits, target), logits


def detached(hidden, weight, target):
    logits = F.linear(hidden, weight)
    return loss_of(logits, target), logits.detach()


def cast(hidden, weight, target):
    logits = F.linear(hidden, weight)
    return loss_of(logits, target), logits.float()


def with_bias(hidden, weight, target):
    logits = F.linear(hidden, weight, weight[:, 0])
    return loss_of(logits, target), logits


def hidden_states_too(hidden, weight, target):
    rows = hidden.tanh()
    logits = F.linear(rows, weight)
    return loss_of(logits, target), logits, rows


def two_heads(hidden, weight, target):
    first, second = F.linear(hidden, weight), F.linear(hidden.tanh(), weight)
    return loss_of(first, target) + loss_of(second, target), first, second


def without_gradients(hidden, weight, target):
    with torch.no_grad():
        return model(hidden, weight, target)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "fn",
    one_in(
        3, [model, capped, last_row, flat, detached, cast, with_bias, hidden_states_too, two_heads, without_gradients]
    ),
)
def test_they_are_computed_when_somebody_reads_them(fn, dynamic):
    inputs = rows_and_head()
    compiled = check(fn, inputs, dynamic=dynamic, atol=1e-6 if fn is cast else 1e-10)
    heads = 2 if fn is two_heads else 1
    assert compiled.counts["deferred"] == heads, compiled.skip_reasons
    outputs = compiled.call(*inputs)
    assert sum(isinstance(each, DeferredTensor) for each in outputs) == heads


def test_what_they_are_made_of_goes_with_them():
    hidden, weight, target = rows_and_head()
    compiled = compile_with_glue(capped, passes=ONLY)
    expected = results_of(capped, [hidden, weight, target], backward=False)
    _, logits = compiled.call(hidden, weight, target)
    torch.testing.assert_close(logits.detach(), expected[1], rtol=0, atol=0)


def layout_of_its_own(hidden, weight, target):
    logits = F.linear(hidden, weight)
    return loss_of(logits, target), logits.transpose(1, 2)


def shifted_view(hidden, weight, target):
    logits = F.linear(hidden, weight)
    return loss_of(logits, target), logits[:, :-1]


def made_weight(hidden, weight, target):
    logits = F.linear(hidden, weight / weight.norm())
    return loss_of(logits, target), logits


def views_of_each_other(hidden, weight, target):
    logits = F.linear(hidden, weight)
    return loss_of(logits, target), logits, logits.view(-1, CLASSES)


def row_written(hidden, weight, target):
    rows = hidden.detach() * 2
    logits = F.linear(rows, weight.detach())
    loss = loss_of(logits, target)
    rows.add_(1)
    return loss, logits, rows


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (layout_of_its_own, "layout of their own"),
        (shifted_view, "layout of their own"),
        (made_weight, "its weight is made in the graph"),
        (views_of_each_other, "views of each other"),
        (row_written, "written in place later"),
    ],
)
def test_a_graph_that_cannot_defer_them_stays(fn, reason):
    check_left_alone(fn, rows_and_head(), reason)


def test_a_made_weight_serves_a_loss_alone():
    check_rewritten(lambda *given: made_weight(*given)[0], rows_and_head())


def test_the_option_keeps_them():
    check_left_alone(model, rows_and_head(), "logits='kept'", logits="kept")


def test_the_option_leaves_losses_alone_that_return_none():
    assert check_rewritten(lambda *given: model(*given)[0], rows_and_head(), logits="kept") == {"losses": 1}


def test_an_optimizer_step_after_the_loss():
    hidden, weight, target = rows_and_head()
    weight = nn.Parameter(weight.detach())
    compiled = compile_with_glue(model, passes=ONLY)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss, logits = compiled.call(hidden, weight, target)
        expected = model(hidden, weight, target)[1].detach()
        loss.backward()
        torch.testing.assert_close(logits.detach().clone(), expected)
        optimizer.step()
    assert compiled.counts["deferred"] == 1


def test_backward_twice_and_through_the_logits_afterwards():
    hidden, weight, target = rows_and_head()

    def twice(call):
        hidden.grad = weight.grad = None
        loss, logits = call(hidden, weight, target)
        loss.backward(retain_graph=True)
        (2 * loss).backward(retain_graph=True)
        logits.pow(2).sum().backward()
        return [hidden.grad.clone(), weight.grad.clone()]

    assert_same(twice(model), twice(compile_with_glue(model, passes=ONLY).call))


def test_gradients_only_through_the_logits():
    hidden, weight, target = rows_and_head()

    def step(call):
        hidden.grad = weight.grad = None
        call(hidden, weight, target)[1].pow(2).sum().backward()
        return [hidden.grad.clone(), weight.grad.clone()]

    assert_same(step(model), step(compile_with_glue(model, passes=ONLY).call))


@pytest.mark.parametrize("frozen", ["weight", "hidden", "both"])
def test_what_is_frozen_gets_no_gradient(frozen):
    hidden, weight, target = rows_and_head()
    hidden = hidden.detach() if frozen != "weight" else hidden
    weight = nn.Parameter(weight.detach(), requires_grad=frozen == "hidden")
    check(capped, [hidden, weight, target])
    compiled = check(model, [hidden, weight, target])
    assert compiled.counts["deferred"] == 1
