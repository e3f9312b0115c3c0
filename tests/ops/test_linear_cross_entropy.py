"""linear_cross_entropy: torch's cross entropy of logits that are made a chunk of rows at a time."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from glue_compiler.ops import loss_chunks
from tests.ops.conftest import relative_error
from tests.ops.linear_losses import (
    HEADS,
    IGNORED,
    SMALL_CHUNKS,
    Head,
    counting,
    glue,
    multiplications,
    no_worse,
    products,
    same,
)

LOSSES = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "smoothed": {"smoothing": 0.1},
    "weighted": {"class_weight": True},
    "weighted sum, smoothed": {"class_weight": True, "smoothing": 0.2, "reduction": "sum"},
    "weighted mean, smoothed": {"class_weight": True, "smoothing": 0.2},
}


@pytest.fixture(params=["one chunk", "chunks"])
def chunks(request, device, monkeypatch):
    if request.param == "chunks":
        monkeypatch.setitem(loss_chunks.LIMITS, device, SMALL_CHUNKS)


def losses_of(name, device, classes=70):
    how = dict(LOSSES[name])
    if how.pop("class_weight", False):
        how["class_weight"] = torch.rand(classes, dtype=torch.float64, device=device)
    return how


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("in_forward", [True, False], ids=["gradients in forward", "gradients in backward"])
def test_equals_eager_in_float64(device, chunks, head, kind, in_forward):
    head, how = Head.random(device, **HEADS[head]), losses_of(kind, device)
    needs_grad = None if in_forward else [False] * len(head.needs_grad())
    loss, predictions, gradients = head.fused(torch.float64, needs_grad=needs_grad, predictions=True, **how)
    expected = head.eager(torch.float64, **how)
    assert len(gradients) == (len(list(head.operands())) if in_forward else 0)
    same([loss], [expected])
    same(head.gradients(loss, 3.0), head.gradients(expected, 3.0))
    assert torch.equal(predictions, head.scores().argmax(1))


@pytest.mark.parametrize("head", HEADS)
def test_float32_is_within_its_rounding(device, chunks, head):
    head = Head.random(device, torch.float32, **HEADS[head])
    exact = head.to(torch.float64)
    loss, reference = head.fused(torch.float32)[0], exact.eager(torch.float64)
    assert relative_error(loss, reference) < 1e-6
    for value, expected in zip(head.gradients(loss), exact.gradients(reference), strict=True):
        assert relative_error(value, expected) < 3e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head", ["plain", "adapted", "capped"])
def test_bfloat16_is_no_further_from_float64_than_eager(device, chunks, head, dtype):
    head = Head.random(device, torch.bfloat16, rows=200, classes=130, **HEADS[head])
    exact = head.to(torch.float64)
    reference, loss, eager = exact.eager(torch.float64), head.fused(dtype)[0], head.eager(dtype)
    assert loss.dtype == eager.dtype
    # One rounding of the loss itself may fall either way, and so may the mean of those of 200 rows' logits.
    chance = torch.finfo(dtype).eps + torch.finfo(torch.bfloat16).eps / 200**0.5
    assert relative_error(loss, reference) <= relative_error(eager, reference) + chance
    ours, theirs, best = head.gradients(loss), head.gradients(eager), exact.gradients(reference)
    for value, other, expected in zip(ours, theirs, best, strict=True):
        assert value.dtype == other.dtype
        assert relative_error(value, expected) <= no_worse(device) * relative_error(other, expected)


def test_products_of_two_dtypes_are_promoted(device, chunks):
    head = Head.random(device, torch.bfloat16, widths=(12, 3), bias=True, other=torch.float32)
    exact = head.to(torch.float64)
    loss, eager, reference = head.fused(torch.float32)[0], head.eager(torch.float32), exact.eager(torch.float64)
    for value, other, expected in zip(
        head.gradients(loss), head.gradients(eager), exact.gradients(reference), strict=True
    ):
        assert value.dtype == other.dtype
        assert relative_error(value, expected) <= 1.02 * relative_error(other, expected) + 1e-6


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_all_rows_ignored(device, chunks, reduction):
    head = Head.random(device)
    head.target.fill_(IGNORED)
    loss = head.fused(torch.float64, reduction=reduction)[0]
    assert loss.isnan() if reduction == "mean" else loss == 0
    assert torch.equal(loss.isnan(), head.eager(torch.float64, reduction=reduction).isnan())
    assert all((gradient == 0).all() for gradient in head.gradients(loss))


@pytest.mark.parametrize("in_forward", [True, False])
def test_all_rows_ignored_in_a_mean_that_is_taken_outside(device, chunks, in_forward):
    head = Head.random(device)
    head.target.fill_(IGNORED)
    needs_grad = None if in_forward else [False] * 3
    kept = (head.target >= 0).sum()
    loss = head.fused(torch.float64, reduction="sum", needs_grad=needs_grad)[0] / kept
    expected = head.eager(torch.float64, reduction="sum") / kept
    same([loss], [expected])
    same(head.gradients(loss), head.gradients(expected))


def with_row(number, value, target=None):
    def change(head):
        head.rows[0][number] = value
        if target is not None:
            head.target[number] = target

    return change


def no_other_target(head):
    head.target[head.target != IGNORED] = NO_WEIGHT


IGNORED_ROW, KEPT_ROW, NO_WEIGHT, NAN, INF = 3, 7, 5, float("nan"), float("inf")
NOT_FINITE = {
    "an ignored row of NaN": [with_row(IGNORED_ROW, NAN)],
    "an ignored row of infinities": [with_row(IGNORED_ROW, INF)],
    "an ignored row with one infinity": [with_row((IGNORED_ROW, 2), -INF)],
    "a row of NaN": [with_row(KEPT_ROW, NAN)],
    "a class of no weight": [with_row(KEPT_ROW, 1.0, NO_WEIGHT)],
    "a row of NaN of no weight": [with_row(KEPT_ROW, NAN, NO_WEIGHT)],
    "no target of any weight": [no_other_target],
    "no target of any weight, and NaN": [no_other_target, with_row(IGNORED_ROW, NAN)],
    "a class that is no candidate": [lambda head: head.bias[::7].fill_(-INF)],
}


@pytest.mark.parametrize("name", NOT_FINITE)
@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("head", ["with a bias", "scaled and capped"])
@pytest.mark.parametrize("in_forward", [True, False], ids=["gradients in forward", "gradients in backward"])
def test_what_is_not_finite_and_weights_of_zero_are_as_in_eager(device, chunks, head, kind, name, in_forward):
    capped = {"scale": 0.2, "softcap": 5.0} if head == "scaled and capped" else {}
    head, how = Head.random(device, bias=True, **capped), losses_of(kind, device)
    if "class_weight" in how:
        how["class_weight"][NO_WEIGHT] = 0
    with torch.no_grad():
        for change in NOT_FINITE[name]:
            change(head)
    loss = head.fused(torch.float64, needs_grad=None if in_forward else [False] * 3, **how)[0]
    expected = head.eager(torch.float64, **how)
    same([loss], [expected])
    for upstream in (1.0, NAN):
        ours, theirs = (head.gradients(each, upstream, retain_graph=True) for each in (loss, expected))
        same(ours, theirs)


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_no_rows_and_one_row(device, chunks, rows, reduction):
    head = Head.random(device, rows=rows, bias=True)
    loss, predictions, _ = head.fused(torch.float64, reduction=reduction, predictions=True)
    expected = head.eager(torch.float64, reduction=reduction)
    same([loss], [expected])
    same(head.gradients(loss), head.gradients(expected))
    assert predictions.shape == (rows,)


def test_another_ignore_index(device, chunks):
    head = Head.random(device)
    head.target.clamp_(min=0)
    arguments = (head.rows, head.weights, None, head.target, None, "mean", 0, 0.0, 1.0, 0.0, torch.float64)
    loss, _, _ = glue.linear_cross_entropy(*arguments, head.needs_grad(), False)
    expected = F.cross_entropy(head.scores(), head.target, ignore_index=0)
    same([loss], [expected])
    same(head.gradients(loss), head.gradients(expected))


@pytest.mark.parametrize("wrong", [70, -1, -101])
def test_a_target_out_of_bounds_is_as_loud_as_in_torch(wrong):
    head = Head.random()
    head.target[7] = wrong
    with pytest.raises(IndexError, match=rf"Target {wrong} is out of bounds"):
        head.eager(torch.float64)
    with pytest.raises(IndexError, match=rf"Target {wrong} is out of bounds"):
        head.fused(torch.float64)
    head.target[7] = 69
    head.fused(torch.float64)


def with_labels(rows, kept):
    """A head of so many rows, of which every ``kept``-th counts."""
    head = Head.random(rows=rows)
    return dataclasses.replace(head, target=torch.where(torch.arange(rows) % kept == 0, 7, IGNORED))


@pytest.mark.parametrize("in_forward", [True, False], ids=["gradients in forward", "gradients in backward"])
def test_ignored_rows_cost_no_product(chunks, in_forward):
    def step(kept):
        head = with_labels(64, kept)
        head.gradients(head.fused(torch.float64, needs_grad=None if in_forward else [False] * 3)[0])

    every, second, fourth = (multiplications(lambda kept=kept: step(kept)) for kept in (1, 2, 4))
    assert every == 64 * 70 * 12 * (3 if in_forward else 4)
    assert (second, fourth) == (every // 2, every // 4)


def test_predictions_of_ignored_rows_cost_their_logits_alone(chunks):
    head = with_labels(64, 2)
    assert multiplications(lambda: head.fused(torch.float64, predictions=True)) == 64 * 70 * 12 * 2
    assert torch.equal(head.fused(torch.float64, predictions=True)[1], head.scores().argmax(1))


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("ignored", [slice(1, None), slice(-1), slice(None), slice(0)], ids=str)
def test_where_the_rows_that_count_stand(device, chunks, kind, ignored):
    head, how = Head.random(device, bias=True), losses_of(kind, device)
    head.target.clamp_(min=0)
    head.target[ignored] = IGNORED
    loss, predictions, _ = head.fused(torch.float64, predictions=True, **how)
    expected = head.eager(torch.float64, **how)
    same([loss], [expected])
    same(head.gradients(loss, 3.0), head.gradients(expected, 3.0))
    assert torch.equal(predictions, head.scores().argmax(1))


NOT_FINITE_LOGITS = {
    "a weight of NaN, and no row counts": lambda head: (head.weights[0][2].fill_(NAN), head.target.fill_(IGNORED)),
    "a bias of infinity, and no row counts": lambda head: (head.bias[2].fill_(INF), head.target.fill_(IGNORED)),
    "a row that overflows": lambda head: (head.rows[0][IGNORED_ROW].fill_(1e200), head.weights[0].mul_(1e150)),
    "a row that the scale makes overflow": lambda head: head.rows[0][IGNORED_ROW].fill_(1e306),
}


@pytest.mark.parametrize("name", NOT_FINITE_LOGITS)
def test_ignored_rows_whose_logits_are_not_finite_are_computed(chunks, name):
    head = Head.random(bias=True, scale=1e3)
    with torch.no_grad():
        NOT_FINITE_LOGITS[name](head)
    loss, expected = head.fused(torch.float64, reduction="sum")[0], head.eager(torch.float64, reduction="sum")
    ours, theirs = head.gradients(loss), head.gradients(expected)
    same([loss, *ours], [expected, *theirs])
    assert theirs[1].isnan().any()


def test_frozen_operands_get_no_gradient_and_cost_no_product():
    head = Head.random(widths=(12, 3))
    assert len(products(lambda: head.fused(torch.float64))) == 2 + 4  # its logits, and two products for each term
    head.weights[0].requires_grad_(False)
    head.rows[1].requires_grad_(False)
    assert len(products(lambda: head.fused(torch.float64))) == 2 + 2
    loss, _, gradients = head.fused(torch.float64)
    assert [gradient.shape for gradient in gradients] == [head.rows[0].shape, head.weights[1].shape]
    same(head.gradients(loss), head.gradients(head.eager(torch.float64)))
    with torch.no_grad():
        assert len(products(lambda: head.fused(torch.float64, needs_grad=[False] * 5))) == 2


def test_what_forward_did_not_make_backward_makes(device, chunks):
    head = Head.random(device, bias=True)
    loss = head.fused(torch.float64, needs_grad=[True, False, False])[0]
    same(head.gradients(loss), head.gradients(head.eager(torch.float64)))


def test_backward_twice_with_other_factors(device, chunks):
    head = Head.random(device)
    loss, expected = head.fused(torch.float64)[0], head.eager(torch.float64)
    for upstream in (1.0, -0.3):
        same(head.gradients(loss, upstream, retain_graph=True), head.gradients(expected, upstream, retain_graph=True))


def test_in_an_eager_checkpoint(device, chunks):
    head = Head.random(device)
    found = checkpoint(lambda: head.fused(torch.float64)[0], use_reentrant=False)
    same(head.gradients(found), head.gradients(head.eager(torch.float64)))


def test_the_upstream_gradient_is_not_rounded(device):
    head = Head.random(device, torch.bfloat16)
    third = head.gradients(head.fused(torch.float32)[0], 1 / 3)
    whole = head.gradients(head.fused(torch.float32)[0])
    for value, one in zip(third, whole, strict=True):
        assert torch.equal(value, (one.float() * (1 / 3)).to(torch.bfloat16))


def test_a_second_derivative_is_an_error():
    head = Head.random()
    loss = head.fused(torch.float64)[0]
    (gradient,) = torch.autograd.grad(loss, head.rows[0], create_graph=True)
    same([gradient.detach()], head.gradients(head.eager(torch.float64))[:1])
    with pytest.raises(RuntimeError, match="no autograd formula"):
        (head.rows[0].sum() + gradient.square().sum()).backward()


def test_float16_gradients_are_made_with_the_scale_of_the_loss(device, chunks):
    head = Head.random(device, torch.float16)
    with torch.no_grad():
        # Without a loss's scale the gradients of the logits would be zeros in float16.
        head.rows[0].mul_(2**-10)
        head.weights[0].mul_(2**-10)
    small = torch.full((), 2.0**-26, device=device)

    def gradients(loss):
        return head.gradients(loss * small * 2**24)

    loss, _, in_forward = head.fused(torch.float32)
    assert in_forward == []
    exact = head.to(torch.float64)
    expected = exact.gradients(exact.eager(torch.float64) * small.double() * 2**24)
    for value, other, reference in zip(gradients(loss), gradients(head.eager(torch.float32)), expected, strict=True):
        assert relative_error(value, reference) <= 1.02 * relative_error(other, reference) + 1e-3


def test_autocast_changes_nothing(device):
    head = Head.random(device, torch.float32)
    expected = head.fused(torch.float32)[0]
    gradients = head.gradients(expected)
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = head.fused(torch.float32)[0]
        found = head.gradients(head.fused(torch.float32, needs_grad=[False] * 3)[0])
    assert torch.equal(loss, expected)
    same(found, gradients, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_runs_give_equal_bits(device, chunks, dtype):
    head = Head.random(device, dtype, rows=300)
    runs = []
    for _ in range(2):
        loss = head.fused(torch.float32)[0]
        runs.append([loss, *head.gradients(loss)])
    assert all(map(torch.equal, *runs))


def test_any_strides(device, chunks):
    head = Head.random(device)
    wide = torch.randn(37, 24, device=device, dtype=torch.float64)
    head.rows = [wide[:, ::2].detach().requires_grad_()]
    head.weights = [torch.randn(12, 70, device=device, dtype=torch.float64).t().detach().requires_grad_()]
    same(head.gradients(head.fused(torch.float64)[0]), head.gradients(head.eager(torch.float64)))


def test_logits_of_all_rows_never_exist(monkeypatch):
    monkeypatch.setitem(loss_chunks.LIMITS, "cpu", SMALL_CHUNKS)
    head = Head.random(rows=400, classes=500)

    def largest(run):
        with torch.profiler.profile(profile_memory=True) as profile:
            run()
        return max(event.self_cpu_memory_usage for event in profile.events())

    assert largest(lambda: head.gradients(head.eager(torch.float64))) >= 400 * 500 * 8
    assert largest(lambda: head.gradients(head.fused(torch.float64)[0])) < 400 * 500 * 8 // 3


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph_serves_every_number_of_rows(device, backend, monkeypatch):
    monkeypatch.setitem(loss_chunks.LIMITS, device, SMALL_CHUNKS)
    torch._dynamo.reset()
    compiled, graphs = counting(backend)

    def step(rows, weight, bias, target):
        loss, predictions, _ = glue.linear_cross_entropy(
            [rows * 2], [weight], bias, target, None, "mean", IGNORED, 0.0, 1.0, 0.0, torch.float32, [True] * 3, True
        )
        return loss * 2, (predictions == target).sum()

    run = torch.compile(step, backend=compiled, fullgraph=True, dynamic=True)
    for rows in (29, 7, 50):
        head = Head.random(device, torch.float32, rows=rows, bias=True)
        loss, hits = run(head.rows[0], head.weights[0], head.bias, head.target)
        head.rows[0].retain_grad()
        exact = head.to(torch.float64)
        scores = F.linear(exact.rows[0] * 2, exact.weights[0], exact.bias)
        expected = F.cross_entropy(scores, head.target) * 2
        assert relative_error(loss, expected) < 1e-6
        assert hits == (scores.argmax(1) == head.target).sum()
        for value, reference in zip(head.gradients(loss), exact.gradients(expected), strict=True):
            assert relative_error(value, reference) < 3e-6
    assert len(graphs) == 1


def test_wrong_arguments_are_value_errors():
    good = {
        "rows": [torch.randn(5, 4)],
        "weights": [torch.randn(7, 4)],
        "bias": torch.randn(7),
        "target": torch.randint(7, (5,)),
        "class_weight": None,
        "reduction": "mean",
        "needs_grad": [True, True, False],
    }

    def run(**changed):
        how = {**good, **changed}
        needs_grad = how.pop("needs_grad")
        return glue.linear_cross_entropy(*how.values(), IGNORED, 0.0, 1.0, 0.0, torch.float32, needs_grad, False)

    run()
    for message, changed in {
        "reduction must be": {"reduction": "none"},
        "1 rows for 2 weights": {"weights": [torch.randn(7, 4)] * 2},
        "of one dtype": {"weights": [torch.randn(7, 4).double()]},
        "differ in width": {"weights": [torch.randn(7, 3)]},
        "bias is not": {"bias": torch.randn(6)},
        "int64 vector": {"target": torch.zeros(5, dtype=torch.int32)},
        "rows and targets differ": {"target": torch.zeros(4, dtype=torch.int64)},
        "class_weight must be": {"class_weight": torch.rand(6)},
        "needs_grad must name": {"needs_grad": [True, True]},
    }.items():
        with pytest.raises(ValueError, match=message):
            run(**changed)


def test_a_class_weight_that_requires_a_gradient_is_an_error():
    head, weight = Head.random(), torch.rand(70, dtype=torch.float64)
    head.fused(torch.float64, class_weight=weight)
    with pytest.raises(ValueError, match="class_weight has no gradient"):
        head.fused(torch.float64, class_weight=weight.requires_grad_())


@pytest.mark.parametrize("in_forward", [True, False])
def test_opcheck(device, in_forward):
    head = Head.random(device, torch.float32, widths=(12, 3), bias=True)
    arguments = (head.rows, head.weights, head.bias, head.target, None, "mean", IGNORED, 0.1, 1.0, 0.0, torch.float32)
    torch.library.opcheck(glue.linear_cross_entropy.default, (*arguments, [in_forward] * 5, True))
