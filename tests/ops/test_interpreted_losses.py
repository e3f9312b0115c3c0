"""The Triton kernels over rows of logits on a CPU, through Triton's interpreter, against torch in float64.

Runs only where Triton is installed and the process was started with ``TRITON_INTERPRET=1``, since Triton reads that
variable when it is imported:

    TRITON_INTERPRET=1 python -m pytest tests/ops/test_interpreted_losses.py
"""

from __future__ import annotations

import importlib.util
import itertools
import os

import pytest
import torch
import torch.nn.functional as F

if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton and TRITON_INTERPRET=1 from the start", allow_module_level=True)

from glue_compiler.ops import loss_chunks, row_losses, row_losses_triton
from glue_compiler.ops.row_losses_triton import RowBlocks
from tests.ops.conftest import relative_error
from tests.ops.linear_losses import HEADS, SMALL_CHUNKS, Head, glue

ROWS = 5
WIDTHS = (1, 37, 64, 130, 512)
BLOCKS = RowBlocks(64, 4)


def logits_of(width):
    """Rows with columns beside them that hold NaN, as the buffer of an operator may."""
    buffer = torch.full((ROWS, -(-width // 64) * 64), float("nan"))
    buffer[:, :width] = torch.randn(ROWS, width) * 4
    return buffer[:, :width]


def scores_of(logits, scale, softcap):
    scores = logits.double() * scale
    return softcap * torch.tanh(scores) if softcap else scores


def close(value, reference):
    torch.testing.assert_close(value.double(), reference.double(), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, 0.0), (0.5, 0.0), (-0.25, 0.0), (0.1, 8.0)], ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_cross_entropy(width, scale, softcap, smoothing):
    logits, target = logits_of(width), torch.randint(width, (ROWS,))
    target[1] = -100
    leaf = logits.double().requires_grad_()
    expected = F.cross_entropy(scores_of(leaf, scale, softcap), target, reduction="none", label_smoothing=smoothing)
    (grad,) = torch.autograd.grad(expected.sum() * 3, leaf)
    kept = (target >= 0).float()
    losses, predictions = torch.full((ROWS,), -1.0), torch.full((ROWS,), -1)
    row_losses_triton.cross_entropy(
        logits, target, kept * (1 - smoothing), kept * (smoothing / width) if smoothing else None, torch.tensor(3.0),
        losses, predictions, scale, softcap, True, BLOCKS,
    )  # fmt: skip
    close(losses, expected)
    close(logits, grad)
    assert (logits[1] == 0).all()
    assert torch.equal(predictions, scores_of(leaf, scale, softcap).argmax(1))


def test_targets_and_upstream_gradients_may_have_any_strides():
    target = torch.randint(130, (2 * ROWS,))[::2]
    one = torch.full((1,), 0.5).expand(ROWS)
    losses, logits = torch.empty(ROWS), logits_of(130)
    leaf = logits.double().requires_grad_()
    expected = F.cross_entropy(leaf, target, reduction="none")
    row_losses_triton.cross_entropy(
        logits.clone(), target, one, None, torch.ones(()), losses, None, 1.0, 0.0, True, BLOCKS
    )
    close(losses, expected / 2)
    (grad,) = torch.autograd.grad(
        (leaf.logsumexp(1) + leaf.gather(1, target[:, None])[:, 0] + leaf.sum(1)).sum() / 2, leaf
    )
    sums = leaf.detach().logsumexp(1).float().repeat_interleave(2)[::2]
    row_losses_triton.statistics_gradient(logits, target, sums, one, one, one, None, 1.0, 0.0, BLOCKS)
    close(logits, grad)


def test_without_a_gradient_the_logits_stay_and_ignored_rows_are_not_read():
    logits, target = logits_of(130), torch.tensor([3, -100, 0, 129, 64])
    logits[1] = float("nan")
    before, losses = logits.clone(), torch.empty(ROWS)
    row_losses_triton.cross_entropy(
        logits, target, (target >= 0).float(), None, torch.ones(()), losses, None, 1.0, 0.0, False, BLOCKS
    )
    close(losses, F.cross_entropy(before.double(), target, reduction="none").masked_fill(target < 0, 0))
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("width", [1, 130])
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, 0.0), (-0.5, 0.0), (0.1, 8.0)], ids=str)
@pytest.mark.parametrize("wants", list(itertools.product([False, True], repeat=4)), ids=str)
def test_statistics(width, scale, softcap, wants):
    logits, target = logits_of(width), torch.randint(width, (ROWS,))
    target[2] = -1
    leaf = logits.double().requires_grad_()
    scores = scores_of(leaf, scale, softcap)
    expected = [
        scores.logsumexp(1),
        scores.gather(1, target.clamp(min=0)[:, None])[:, 0].masked_fill(target < 0, 0),
        scores.sum(1),
        torch.special.entr(scores.softmax(1)).sum(1),
    ]
    results = [torch.empty(ROWS) for _ in expected]
    found = [result if wanted else None for result, wanted in zip(results, wants, strict=True)]
    argmax = torch.empty(ROWS, dtype=torch.int64)
    row_losses_triton.statistics(logits, target, *found, argmax, scale, softcap, BLOCKS)
    for value, reference, wanted in zip(results, expected, wants, strict=True):
        if wanted:
            close(value, reference)
    assert torch.equal(argmax, scores.argmax(1))
    if not any(wants):
        return
    upstream = [torch.randn(ROWS) if wanted else None for wanted in wants]
    total = sum((u * e).sum() for u, e in zip(upstream, expected, strict=True) if u is not None)
    (grad,) = torch.autograd.grad(total, leaf, retain_graph=True)
    of_logsumexp, of_target, of_sum, of_entropy = upstream
    shares = torch.zeros(ROWS) if of_logsumexp is None else of_logsumexp
    if of_entropy is not None:
        shares = shares - of_entropy * expected[3].detach().float()
    needs_softmax = of_logsumexp is not None or of_entropy is not None
    row_losses_triton.statistics_gradient(
        logits, target, expected[0].detach().float() if needs_softmax else None, shares, of_target, of_sum,
        of_entropy, scale, softcap, BLOCKS,
    )  # fmt: skip
    torch.testing.assert_close(logits.double(), grad, rtol=2e-5, atol=2e-5)


def test_infinities_are_as_in_torch():
    inf = float("inf")
    rows = torch.randn(ROWS, 130)
    rows[0, :64] = -inf  # a whole block
    rows[1] = -inf
    rows[2, 100] = inf
    rows[3, 0] = -inf
    target = torch.tensor([70, 1, 3, 5, 0])
    leaf = rows.double().requires_grad_()
    expected = F.cross_entropy(leaf, target, reduction="none")
    (grad,) = torch.autograd.grad(expected.sum(), leaf)
    entropy, losses = torch.empty(ROWS), torch.empty(ROWS)
    row_losses_triton.statistics(rows, target, None, None, None, entropy, None, 1.0, 0.0, BLOCKS)
    row_losses_triton.cross_entropy(
        rows, target, torch.ones(ROWS), None, torch.ones(()), losses, None, 1.0, 0.0, True, BLOCKS
    )
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(rows.double(), grad, rtol=1e-5, atol=1e-5, equal_nan=True)
    close(entropy[[0, 3, 4]], torch.special.entr(leaf.softmax(1)).sum(1)[[0, 3, 4]])


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, 0.0), (-0.5, 0.0), (0.1, 8.0)], ids=str)
@pytest.mark.parametrize("width", [1, 130])
def test_nan_reaches_gradients_from_ignored_rows_and_from_rows_without_weight(width, scale, softcap, smoothing):
    logits, target = logits_of(width), torch.tensor([-100, -100, 0, 0, 0])
    logits[[0, 2]] = float("nan")
    logits[1, 1:2] = -float("inf")
    weights = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0])
    leaf = logits.double().requires_grad_()
    expected = F.cross_entropy(scores_of(leaf, scale, softcap), target, reduction="none", label_smoothing=smoothing)
    expected = expected * weights
    (grad,) = torch.autograd.grad(expected.sum(), leaf)
    spread = weights * smoothing / width if smoothing else None
    losses = torch.empty(ROWS)
    row_losses_triton.cross_entropy(
        logits, target, weights * (1 - smoothing), spread, torch.ones(()), losses, None, scale, softcap, True, BLOCKS
    )
    torch.testing.assert_close(losses.double(), expected, rtol=2e-5, atol=2e-6, equal_nan=True)
    torch.testing.assert_close(logits.double(), grad, rtol=2e-5, atol=2e-6, equal_nan=True)
    assert losses.isnan().tolist() == [False, False, True, False, False]


def test_a_picked_logit_gives_the_others_of_a_row_of_nan_no_gradient():
    logits, target, one = logits_of(130), torch.randint(130, (ROWS,)), torch.ones(ROWS)
    logits[1] = float("nan")
    row_losses_triton.statistics_gradient(logits, target, None, one, one, None, None, 1.0, 0.0, BLOCKS)
    assert torch.equal(logits, F.one_hot(target, 130).float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_rows(dtype):
    logits, target = logits_of(130).to(dtype), torch.randint(130, (ROWS,))
    leaf = logits.double().requires_grad_()
    expected = F.cross_entropy(leaf, target, reduction="none")
    (grad,) = torch.autograd.grad(expected.sum(), leaf)
    losses = torch.empty(ROWS)
    row_losses_triton.cross_entropy(
        logits, target, torch.ones(ROWS), None, torch.ones(()), losses, None, 1.0, 0.0, True, BLOCKS
    )
    close(losses, expected)
    torch.testing.assert_close(logits.double(), grad, rtol=8e-3, atol=1e-6)


def test_of_equal_largest_the_first_is_predicted():
    logits = torch.zeros(ROWS, 130)
    logits[1, [70, 129]] = 1.0
    logits[2, [3, 2, 100]] = 1.0
    argmax = torch.empty(ROWS, dtype=torch.int64)
    row_losses_triton.statistics(logits, None, None, None, None, None, argmax, 1.0, 0.0, BLOCKS)
    assert argmax.tolist() == [0, 70, 2, 0, 0]


@pytest.fixture
def kernels(monkeypatch):
    """Operators run the kernels, over several chunks."""
    monkeypatch.setattr(row_losses, "runs_triton", lambda tensor: True)
    monkeypatch.setitem(loss_chunks.LIMITS, "cpu", SMALL_CHUNKS)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("how", [{}, {"reduction": "sum", "smoothing": 0.1}, {"class_weight": True}], ids=str)
def test_linear_cross_entropy(kernels, head, how):
    head = Head.random(dtype=torch.float32, **HEADS[head])
    how = {**how, "class_weight": torch.rand(70)} if "class_weight" in how else how
    exact = head.to(torch.float64)
    loss, predictions, _ = head.fused(torch.float32, predictions=True, **how)
    expected = exact.eager(torch.float64, **how)
    assert relative_error(loss, expected) < 1e-6
    assert torch.equal(predictions, exact.scores().argmax(1))
    for value, reference in zip(head.gradients(loss, 3.0), exact.gradients(expected, 3.0), strict=True):
        assert relative_error(value, reference) < 3e-6


@pytest.mark.parametrize("how", [{}, {"reduction": "sum", "smoothing": 0.1}, {"class_weight": True}], ids=str)
def test_linear_cross_entropy_of_rows_of_nan(kernels, how):
    head = Head.random(dtype=torch.float32)
    with torch.no_grad():
        head.rows[0][[3, 7]] = float("nan")  # one is ignored
        head.target[7] = 5
    if "class_weight" in how:
        how = {"class_weight": torch.where(torch.arange(70) == 5, 0.0, 1.0)}
    exact = head.to(torch.float64)
    loss, expected = head.fused(torch.float32, **how)[0], exact.eager(torch.float64, **how)
    assert loss.isnan()
    assert expected.isnan()
    for value, reference in zip(head.gradients(loss), exact.gradients(expected), strict=True):
        if value is not None:
            torch.testing.assert_close(value.double(), reference, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("wants", [[True] * 5, [False, True, False, False, False], [False, False, False, True, False]])
def test_linear_row_statistics(kernels, head, wants):
    head = Head.random(dtype=torch.float32, **HEADS[head])
    exact = head.to(torch.float64)

    def run(head):
        arguments = (head.rows, head.weights, head.bias, head.target, head.scale, head.softcap, head.rows[0].dtype)
        results = glue.linear_row_statistics(*arguments, wants, False)
        total = sum((result * torch.sin(torch.arange(len(result)))).sum() for result in results[:4])
        return results, head.gradients(total)

    found = run(head)
    for value, reference in zip(map(list, found), map(list, run(exact)), strict=True):
        for one, other in zip(value, reference, strict=True):
            assert relative_error(one, other) < 3e-6
