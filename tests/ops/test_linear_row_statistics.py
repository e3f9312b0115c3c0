"""linear_row_statistics: what losses are put together from, of logits that are made a chunk of rows at a time."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from glue_compiler.ops import loss_chunks
from tests.ops.conftest import relative_error
from tests.ops.linear_losses import HEADS, IGNORED, SMALL_CHUNKS, Head, counting, glue, no_worse, same

ALL = [True] * 5


@pytest.fixture(params=["one chunk", "chunks"])
def chunks(request, device, monkeypatch):
    if request.param == "chunks":
        monkeypatch.setitem(loss_chunks.LIMITS, device, SMALL_CHUNKS)


def statistics(head, dtype, wants=ALL, skips_ignored=False):
    return glue.linear_row_statistics(
        head.rows, head.weights, head.bias, head.target, head.scale, head.softcap, dtype, list(wants), skips_ignored
    )


def expected_of(head, dtype):
    scores, target = head.scores().to(dtype), head.target
    return (
        scores.logsumexp(1),
        scores.gather(1, target.clamp(min=0)[:, None])[:, 0].masked_fill(target < 0, 0),
        scores.sum(1),
        -(scores.softmax(1) * scores.log_softmax(1)).sum(1),
        scores.argmax(1),
    )


def mixed(values, wants):
    """One number of the wanted statistics, with another factor for each row."""
    parts = (
        (torch.sin(torch.arange(1.0, len(value) + 1, device=value.device) * (index + 1)) * value).sum()
        for index, (value, wanted) in enumerate(zip(values[:4], wants, strict=False))
        if wanted
    )
    return sum(parts)


@pytest.mark.parametrize("wants", list(itertools.product([False, True], repeat=4)), ids=str)
@pytest.mark.parametrize("head", ["adapted", "scaled by a negative number", "capped"])
def test_equals_eager_in_float64(device, chunks, head, wants):
    head = Head.random(device, **HEADS[head])
    found, expected = statistics(head, torch.float64, (*wants, True)), expected_of(head, torch.float64)
    for value, reference, wanted in zip(found, expected, (*wants, True), strict=True):
        assert value.dtype == reference.dtype
        if wanted:
            same([value], [reference])
        else:
            assert value.shape == (0,)
    if any(wants):
        same(head.gradients(mixed(found, wants)), head.gradients(mixed(expected, wants)))


def test_an_unused_statistic_adds_nothing_to_the_gradient(device, chunks):
    head = Head.random(device)
    found, expected = statistics(head, torch.float64), expected_of(head, torch.float64)
    for one in ([1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]):
        same(
            head.gradients(mixed(found, one), retain_graph=True),
            head.gradients(mixed(expected, one), retain_graph=True),
        )


@pytest.mark.parametrize("head", ["plain", "capped"])
def test_the_loss_of_each_token_in_bfloat16_is_no_worse_than_eagers(device, chunks, head):
    head = Head.random(device, torch.bfloat16, rows=200, classes=130, **HEADS[head])
    exact, kept = head.to(torch.float64), head.target >= 0
    logsumexp, target_logit, *_ = statistics(head, torch.bfloat16)
    assert logsumexp.dtype == torch.float32  # a difference of two rounded numbers would be far off
    ours = ((logsumexp - target_logit) * kept).to(torch.bfloat16)
    eager = F.cross_entropy(head.scores(), head.target, reduction="none", ignore_index=IGNORED)
    reference = F.cross_entropy(exact.scores(), head.target, reduction="none", ignore_index=IGNORED)
    assert relative_error(ours, reference) <= no_worse(device) * relative_error(eager, reference)
    weight = torch.rand(200, device=device)
    for value, other, best in zip(
        head.gradients((ours * weight).sum()),
        head.gradients((eager * weight).sum()),
        exact.gradients((reference * weight).sum()),
        strict=True,
    ):
        assert value.dtype == other.dtype
        assert relative_error(value, best) <= no_worse(device) * relative_error(other, best)


def test_minus_infinities_have_no_share_in_the_entropy(device, chunks):
    head = Head.random(device, bias=True)
    with torch.no_grad():
        head.bias[::7] = -float("inf")
    head.bias.requires_grad_(False)
    dropped = head.to(torch.float64)
    kept = torch.arange(70, device=device) % 7 != 0
    scores = F.linear(dropped.rows[0], dropped.weights[0][kept], dropped.bias[kept])
    expected = torch.special.entr(scores.softmax(1)).sum(1)
    entropy = statistics(head, torch.float64, [False, False, False, True, False])[3]
    same([entropy], [expected])
    same(head.gradients(entropy.sum()), dropped.gradients(expected.sum()))


def test_ignored_targets_give_zeros_and_no_gradient(device, chunks):
    head = Head.random(device)
    target_logit = statistics(head, torch.float64)[1]
    assert (target_logit[3:6] == 0).all()
    gradient = head.gradients(target_logit.sum())[0]
    assert (gradient[3:6] == 0).all()
    assert (gradient[6] != 0).any()


def test_without_a_target(device, chunks):
    head = Head.random(device)
    wants = [True, False, True, True, True]
    arguments = (head.rows, head.weights, None, None, 1.0, 0.0, torch.float64)
    found = glue.linear_row_statistics(*arguments, wants, False)
    same(head.gradients(mixed(found, wants)), head.gradients(mixed(expected_of(head, torch.float64), wants)))
    with pytest.raises(ValueError, match="needs a target"):
        glue.linear_row_statistics(*arguments, ALL, False)


@pytest.mark.parametrize("rows", [0, 1])
def test_no_rows_and_one_row(device, chunks, rows):
    head = Head.random(device, rows=rows)
    found, expected = statistics(head, torch.float64), expected_of(head, torch.float64)
    same(found, expected)
    same(head.gradients(mixed(found, ALL)), head.gradients(mixed(expected, ALL)))


def test_a_target_out_of_bounds_is_an_index_error():
    head = Head.random()
    head.target[7] = 70
    with pytest.raises(IndexError, match="Target 70 is out of bounds"):
        statistics(head, torch.float64)


def test_frozen_operands_get_no_gradient(device, chunks):
    head = Head.random(device, widths=(12, 3))
    head.weights[0].requires_grad_(False)
    found, expected = statistics(head, torch.float64), expected_of(head, torch.float64)
    same(head.gradients(mixed(found, ALL)), head.gradients(mixed(expected, ALL)))


def test_backward_twice_and_a_second_derivative(device):
    head = Head.random(device)
    loss = mixed(statistics(head, torch.float64), ALL)
    first, second = head.gradients(loss, retain_graph=True), head.gradients(loss, -2.0, create_graph=True)
    same([-2 * gradient for gradient in first], [gradient.detach() for gradient in second])
    with pytest.raises(RuntimeError, match="no autograd formula"):
        second[0].sum().backward()


def test_one_graph_serves_every_number_of_rows(device, monkeypatch):
    monkeypatch.setitem(loss_chunks.LIMITS, device, SMALL_CHUNKS)
    torch._dynamo.reset()

    def loss(rows, weight, target):
        found = glue.linear_row_statistics([rows], [weight], None, target, 1.0, 0.0, torch.float64, ALL, False)
        return mixed(found, ALL), found[4]

    compiler, graphs = counting("aot_eager")
    run = torch.compile(loss, backend=compiler, fullgraph=True, dynamic=True)
    for rows in (29, 7, 50):
        head = Head.random(device, rows=rows)
        total, argmax = run(head.rows[0], head.weights[0], head.target)
        expected = expected_of(head, torch.float64)
        same(head.gradients(total), head.gradients(mixed(expected, ALL)))
        assert torch.equal(argmax, expected[4])
    assert len(graphs) == 1


def test_opcheck(device):
    head = Head.random(device, torch.float32, widths=(12, 3), bias=True)
    arguments = (head.rows, head.weights, head.bias, head.target, 0.5, 8.0, torch.float32)
    torch.library.opcheck(glue.linear_row_statistics.default, (*arguments, ALL, True))
    torch.library.opcheck(glue.linear_row_statistics.default, (*arguments, [False, True, False, False, False], False))


@pytest.mark.parametrize("scale", [1.0, -0.3])
def test_rows_that_nobody_reads_are_not_computed(device, chunks, scale):
    head, wants = Head.random(device, bias=True, scale=scale), [True, True, True, False, False]
    expected, count = expected_of(head, torch.float64), head.target >= 0

    def total(values):
        return sum((value * (index + 1)).masked_fill(~count, 0).sum() for index, value in enumerate(values[:3]))

    found = statistics(head, torch.float64, wants, True)
    for value, reference in zip(found[:3], expected, strict=False):
        same([value[count]], [reference[count]])
        if device == "cpu":
            assert (value[~count] == 0).all()
    same(head.gradients(total(found)), head.gradients(total(expected)))


def test_of_rows_that_nobody_reads_the_gradient_is_nan_where_eagers_is(device, chunks):
    head, wants = Head.random(device), [True, True, False, False, False]
    with torch.no_grad():
        head.rows[0][3] = float("nan")

    def total(values):
        return (values[0] - values[1]).masked_fill(head.target < 0, 0).sum()

    gradients = head.gradients(total(statistics(head, torch.float64, wants, True)))
    same(gradients, head.gradients(total(expected_of(head, torch.float64))))
    assert gradients[1].isnan().all()
