"""Autocast, half precision, adapters, checkpoints, lengths that vary, and whole training steps."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from glue_compiler.deferred.tensor import DeferredTensor
from tests.captured import compile_with_glue
from tests.passes.chunk_loss.runs import (  # noqa: F401
    CLASSES,
    ONLY,
    assert_same,
    check,
    check_rewritten,
    results_of,
    rows_and_head,
    small_chunks,
)


def model(hidden, weight, target):
    logits = F.linear(hidden, weight).float()
    return F.cross_entropy(logits.view(-1, CLASSES), target.view(-1)), logits


def under_autocast(hidden, weight, target):
    with torch.autocast("cpu", torch.bfloat16):
        logits = F.linear(hidden, weight)
        return F.cross_entropy(logits.view(-1, CLASSES), target.view(-1))


def loss_alone(hidden, weight, target):
    return model(hidden, weight, target)[0]


def log_probabilities(hidden, weight, target):
    logits = F.linear(hidden, weight)
    return logits.log_softmax(-1).gather(-1, target.clamp(min=0)[..., None])


def errors(fn, inputs):
    """How far eager and the compiled function are from fp64, for each result, relative to its largest number."""
    with torch.autocast("cpu", enabled=False):
        exact = [value.double().detach().requires_grad_() if value.is_floating_point() else value for value in inputs]
        wanted = results_of(fn if fn is not under_autocast else model_in_fp64, exact)
    compiled = compile_with_glue(fn, passes=ONLY)
    found = [results_of(call, inputs) for call in (fn, compiled.call)]
    assert any(compiled.counts.values()), compiled.skip_reasons
    for results in zip(wanted, *found, strict=True):
        if isinstance(results[0], torch.Tensor):
            scale = results[0].abs().max()
            eager, ours = ((each.double() - results[0]).abs().max() / scale for each in results[1:])
            assert results[1].dtype == results[2].dtype
            yield eager.item(), ours.item()


def model_in_fp64(hidden, weight, target):
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits.view(-1, CLASSES), target.view(-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("fn", [loss_alone, log_probabilities])
def test_half_precision_is_no_worse_than_eagers(fn, dtype):
    for eager, ours in errors(fn, rows_and_head(size=32, dtype=dtype)):
        assert ours <= 1.5 * eager + 1e-6


def test_autocast_is_no_worse_than_eagers():
    for eager, ours in errors(under_autocast, rows_and_head(size=32, dtype=torch.float32)):
        assert ours <= 1.5 * eager + 1e-6


def test_autocast_around_the_call():
    inputs = rows_and_head(size=32, dtype=torch.float32)
    compiled = compile_with_glue(model, passes=ONLY)
    with torch.autocast("cpu", torch.bfloat16):
        expected, actual = results_of(model, inputs), results_of(compiled.call, inputs)
        logits = compiled.call(*inputs)[1]
    assert compiled.counts["deferred"] == 1
    assert isinstance(logits, DeferredTensor)
    assert_same(expected[:4], actual[:4], atol=1e-5)
    assert_same(expected[4:], actual[4:], atol=2e-2)
    torch.testing.assert_close(logits.detach().clone(), expected[1], rtol=0, atol=0)  # read outside of autocast


class Adapted(nn.Module):
    """A frozen head with an adapter in another dtype, as peft makes it."""

    def __init__(self, dtype, adapter):
        super().__init__()
        self.base = nn.Linear(8, CLASSES, bias=False, dtype=dtype).requires_grad_(False)
        self.down, self.up = (
            nn.Linear(8, 2, bias=False, dtype=adapter),
            nn.Linear(2, CLASSES, bias=False, dtype=adapter),
        )

    def forward(self, hidden, target):
        logits = self.base(hidden)
        logits = logits + self.up(self.down(hidden.to(self.down.weight.dtype))) * 2.0
        logits = logits.to(hidden.dtype)
        return F.cross_entropy(logits.view(-1, CLASSES).float(), target.view(-1)), logits


@pytest.mark.parametrize("dtypes", [(torch.float64, torch.float64), (torch.bfloat16, torch.float32)])
def test_an_adapted_head(dtypes):
    head = Adapted(*dtypes)
    hidden = torch.randn(3, 8, 8, dtype=dtypes[0])
    _, _, target = rows_and_head()
    compiled = compile_with_glue(head, passes=ONLY)

    def step(call):
        head.zero_grad()
        loss, logits = call(hidden, target)
        loss.backward()
        return [loss.detach(), logits.detach().clone(), *(p.grad for p in head.parameters())]

    tolerance = 1e-6 if dtypes[0] is torch.float64 else 2e-2
    assert_same(step(head), step(compiled.call), atol=tolerance)
    assert compiled.counts["deferred"] == 1, compiled.skip_reasons
    assert head.base.weight.grad is None


def test_a_loss_in_a_checkpoint():
    def loss(hidden, weight, target):
        return F.cross_entropy(F.linear(hidden, weight).view(-1, CLASSES), target.view(-1))

    def fn(hidden, weight, target):
        return checkpoint(loss, hidden.tanh(), weight, target, use_reentrant=False)

    assert check_rewritten(fn, rows_and_head()) == {"losses": 1}


def test_logits_that_leave_a_checkpoint():
    def head(hidden, weight):
        logits = F.linear(hidden, weight)
        return logits, logits.logsumexp(-1)

    def fn(hidden, weight, target):
        logits, total = checkpoint(head, hidden.tanh(), weight, use_reentrant=False)
        return F.cross_entropy(logits.view(-1, CLASSES), target.view(-1)) + total.sum()

    compiled = check(fn, rows_and_head())
    assert not compiled.report.passes[0].changed


@pytest.mark.parametrize("dynamic", [True, None])
def test_lengths_that_vary(dynamic):
    compiled = compile_with_glue(capped_and_shifted, passes=ONLY, dynamic=dynamic)
    for length in (8, 12, 5, 9, 3):
        inputs = rows_and_head((2, length))
        assert_same(results_of(capped_and_shifted, inputs), results_of(compiled.call, inputs))
    assert len(compiled.session.graphs) <= 2
    assert all(graph.passes[0].counts["losses"] == 1 for graph in compiled.session.graphs)


def capped_and_shifted(hidden, weight, target):
    logits = torch.tanh(F.linear(hidden, weight) / 7) * 7
    rows, classes = logits.shape[0] * (logits.shape[1] - 1), logits.shape[-1]
    loss = F.cross_entropy(logits[:, :-1].reshape(rows, classes), target[:, 1:].reshape(-1), reduction="sum")
    return loss / rows, logits


class Step(nn.Module):
    """The model returns logits alone; its loss stands in the training step."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, 8, dtype=torch.float64)
        self.body = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, ids):
        return F.linear(self.body(self.embedding(ids)).tanh(), self.embedding.weight)


def test_a_training_step_with_the_loss_outside_of_the_model():
    model, ids = Step(), torch.randint(0, CLASSES, (3, 8))

    def step(ids):
        logits = model(ids)
        loss = F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:])
        accuracy = (logits[:, :-1].argmax(-1) == ids[:, 1:]).double().mean()
        return loss, accuracy

    def run(call):
        model.zero_grad()
        loss, accuracy = call(ids)
        loss.backward()
        return [loss.detach(), accuracy, *(p.grad for p in model.parameters())]

    compiled = compile_with_glue(step, passes=ONLY)
    assert_same(run(step), run(compiled.call))
    assert compiled.counts["losses"] == 1, compiled.skip_reasons


def test_a_loss_without_gradients():
    compiled = compile_with_glue(model, passes=ONLY)
    inputs = rows_and_head()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            expected, actual = model(*inputs), compiled.call(*inputs)
        assert not actual[0].requires_grad
        torch.testing.assert_close(actual[0], expected[0])
        torch.testing.assert_close(actual[1].clone(), expected[1])


def test_inductor():
    inputs = rows_and_head()
    compiled = compile_with_glue(capped_and_shifted, passes=ONLY, compiler="inductor")
    assert_same(results_of(capped_and_shifted, inputs), results_of(compiled.call, inputs))
    assert compiled.counts["deferred"] == 1


def test_a_target_out_of_range_is_an_error():
    hidden, weight, target = rows_and_head()
    compiled = compile_with_glue(model, passes=ONLY)
    target[0, 1] = CLASSES
    with pytest.raises(IndexError):
        compiled.call(hidden, weight, target)


@pytest.mark.parametrize("wrong", [CLASSES, -1])
def test_a_target_out_of_range_of_single_rows_is_an_error(wrong):
    def rows(hidden, weight, target):
        return F.cross_entropy(F.linear(hidden, weight).view(-1, CLASSES), target.view(-1), reduction="none")

    hidden, weight, target = rows_and_head()
    target[0, 1] = wrong
    with pytest.raises(IndexError):
        compile_with_glue(rows, passes=ONLY).call(hidden, weight, target)


def test_a_sum_over_no_tokens_leaves_the_gradients_at_zero():
    def loss(hidden, weight, target):
        total = F.cross_entropy(F.linear(hidden, weight).view(-1, CLASSES), target.view(-1), reduction="sum")
        return total / (target != -100).sum()

    hidden, weight, target = rows_and_head()
    check_rewritten(loss, [hidden, weight, torch.full_like(target, -100)])
