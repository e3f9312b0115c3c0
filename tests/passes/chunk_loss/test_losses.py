"""Losses in the forms in which people write them: without logits, they give what they gave."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.ops.linear_losses import multiplications
from tests.passes.chunk_loss.runs import (  # noqa: F401
    CLASSES,
    check,
    check_rewritten,
    results_of,
    rows_and_head,
    small_chunks,
)
from tests.slow import one_in


def mean(hidden, weight, target):
    return F.cross_entropy((hidden @ weight.t()).view(-1, CLASSES), target.view(-1))


def total(hidden, weight, target):
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum") / (target != -100).sum()


def smoothed(hidden, weight, target):
    return F.cross_entropy(F.linear(hidden, weight).transpose(1, 2), target, label_smoothing=0.1)


def weighted(hidden, weight, target):
    classes = torch.linspace(0.5, 2, CLASSES, dtype=hidden.dtype)
    return F.cross_entropy(F.linear(hidden, weight).permute(0, 2, 1), target, weight=classes, label_smoothing=0.2)


def shifted(hidden, weight, target):
    logits = F.linear(hidden, weight)
    return nn.CrossEntropyLoss()(logits[..., :-1, :].contiguous().view(-1, CLASSES), target[..., 1:].reshape(-1))


def shifted_in_hidden_states(hidden, weight, target):
    return F.cross_entropy(F.linear(hidden[:, :-1], weight).reshape(-1, CLASSES), target[:, 1:].reshape(-1))


def other_ignored(hidden, weight, target):
    target = target.masked_fill(target == -100, 0)
    return nn.CrossEntropyLoss(ignore_index=0, reduction="sum")(
        F.linear(hidden, weight).view(-1, CLASSES), target.view(-1)
    )


def likelihood(hidden, weight, target):
    return F.nll_loss(F.log_softmax(F.linear(hidden, weight), dim=-1).view(-1, CLASSES), target.view(-1))


def capped(hidden, weight, target):
    logits = torch.tanh(F.linear(hidden, weight) / 5.0) * 5.0
    return F.cross_entropy(logits.view(-1, CLASSES), target.view(-1))


def scaled(hidden, weight, target):
    return F.cross_entropy((F.linear(hidden, weight) * 0.3 / 2).view(-1, CLASSES), target.view(-1))


def by_einsum(hidden, weight, target):
    return F.cross_entropy(torch.einsum("btk,vk->btv", hidden, weight).view(-1, CLASSES), target.view(-1))


def with_bias(hidden, weight, target, bias):
    return F.cross_entropy(F.linear(hidden, weight, bias).view(-1, CLASSES), target.view(-1))


def with_bias_added(hidden, weight, target, bias):
    return F.cross_entropy((F.linear(hidden, weight) + bias[None]).view(-1, CLASSES), target.view(-1))


def adapted(hidden, weight, target, down, up):
    logits = F.linear(hidden, weight) + F.linear(F.linear(hidden, down), up) * 0.5
    return F.cross_entropy(logits.view(-1, CLASSES), target.view(-1))


def picked(hidden, weight, target):
    places = torch.tensor([1, 4, 6])
    return F.cross_entropy(F.linear(hidden, weight)[:, places].reshape(-1, CLASSES), target[:, places].reshape(-1))


def one_row(hidden, weight, target):
    return F.cross_entropy(F.linear(hidden, weight)[1, 2], target[1, 2])


def of_parts(hidden, weight, target):
    """torchtune's: the sums of chunks, divided once."""
    logits = F.linear(hidden, weight)
    losses = [
        F.cross_entropy(part.reshape(-1, CLASSES), labels.reshape(-1), reduction="sum")
        for part, labels in zip(logits.chunk(4, dim=1), target.chunk(4, dim=1), strict=True)
    ]
    return sum(losses) / (target != -100).sum()


BIAS = nn.Parameter(torch.randn(CLASSES, dtype=torch.float64))
LORA = (
    nn.Parameter(torch.randn(2, 4, dtype=torch.float64)),
    nn.Parameter(torch.randn(CLASSES, 2, dtype=torch.float64)),
)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("loss", "others"),
    one_in(
        3,
        [
            (mean, ()),
            (total, ()),
            (smoothed, ()),
            (weighted, ()),
            (shifted, ()),
            (shifted_in_hidden_states, ()),
            (other_ignored, ()),
            (likelihood, ()),
            (capped, ()),
            (scaled, ()),
            (by_einsum, ()),
            (with_bias, (BIAS,)),
            (with_bias_added, (BIAS,)),
            (adapted, LORA),
            (picked, ()),
            (one_row, ()),
            (of_parts, ()),
        ],
    ),
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_cross_entropy_is_computed_without_logits(loss, others, dynamic):
    counts = check_rewritten(loss, [*rows_and_head(), *others], dynamic=dynamic)
    assert counts == {"losses": 4 if loss is of_parts else 1}


def rows_of_losses(hidden, weight, target):
    return F.cross_entropy(F.linear(hidden, weight).transpose(1, 2), target, reduction="none")


def smoothed_rows(hidden, weight, target):
    logits = F.linear(hidden, weight).view(-1, CLASSES)
    return F.cross_entropy(logits, target.view(-1), reduction="none", label_smoothing=0.1).view(target.shape)


def weighted_rows(hidden, weight, target):
    classes = torch.linspace(0.5, 2, CLASSES, dtype=hidden.dtype)
    return F.cross_entropy(F.linear(hidden, weight).view(-1, CLASSES), target.view(-1), classes, reduction="none")


def token_log_probabilities(hidden, weight, target):
    """DPO's: of the tokens that count, added up by sequence."""
    logits = F.linear(hidden, weight)
    mask = target != -100
    labels = torch.where(mask, target, 0)
    found = torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
    return (found * mask).sum(-1)


def selected_log_softmax(hidden, weight, target):
    """TRL's in fp32 and fp64: the logits of the tokens, minus a logsumexp sequence by sequence."""
    logits, labels = F.linear(hidden, weight), target.clamp(min=0)
    chosen = torch.gather(logits, dim=-1, index=labels.unsqueeze(-1)).squeeze(-1)
    return chosen - torch.stack([torch.logsumexp(each, dim=-1) for each in logits])


def selected_by_sequence(hidden, weight, target):
    """TRL's in bf16: log_softmax sequence by sequence."""
    found = []
    for logits, labels in zip(F.linear(hidden, weight), target.clamp(min=0), strict=True):
        found.append(F.log_softmax(logits, dim=-1).gather(dim=-1, index=labels.unsqueeze(-1)).squeeze(-1))
    return torch.stack(found)


def z_loss(hidden, weight, target):
    logits = F.linear(hidden, weight).view(-1, CLASSES)
    return F.cross_entropy(logits, target.view(-1)) + 1e-2 * logits.logsumexp(-1).pow(2).mean()


def entropy(hidden, weight, target):
    logits = F.linear(hidden, weight)
    logs = F.log_softmax(logits, dim=-1)
    return -(torch.exp(logs) * logs).sum(-1)


def entropy_of_softmax(hidden, weight, target):
    logits = F.linear(hidden, weight)
    return torch.logsumexp(logits, dim=-1) - torch.sum(torch.softmax(logits, dim=-1) * logits, dim=-1)


def categorical_entropy(hidden, weight, target):
    """As torch.distributions.Categorical has it."""
    logits = F.linear(hidden, weight)
    logs = logits - logits.logsumexp(dim=-1, keepdim=True)
    return -(logs.exp() * logs).sum(-1)


def policy(hidden, weight, target):
    """GRPO's: log-probabilities at a temperature, with the entropy beside them."""
    logits = F.linear(hidden, weight)[:, :-1] / 0.9
    labels = target[:, 1:].clamp(min=0)
    logs = logits.log_softmax(-1)
    chosen = logs.gather(-1, labels[..., None])[..., 0]
    with torch.no_grad():
        spread = -(logs.exp() * logs).sum(-1)
    return chosen, spread


def smoother(hidden, weight, target):
    """The Trainer's label smoothing, outside of the model."""
    logs = -F.log_softmax(F.linear(hidden, weight), dim=-1)
    padding = target.unsqueeze(-1).eq(-100)
    labels = torch.clamp(target.unsqueeze(-1), min=0)
    chosen = logs.gather(dim=-1, index=labels).masked_fill(padding, 0.0)
    spread = logs.sum(dim=-1, keepdim=True).masked_fill(padding, 0.0)
    count = padding.numel() - padding.long().sum()
    return 0.9 * chosen.sum() / count + 0.1 * spread.sum() / (count * CLASSES)


def half_of_it(hidden, weight, target):
    """A loss of each row, of which some are hidden afterwards."""
    losses = F.cross_entropy(F.linear(hidden, weight).transpose(1, 2), target, reduction="none")
    return losses.sum() / (target != -100).sum()


def losses_and_z_loss(hidden, weight, target):
    """What is ignored by the one is counted by the other."""
    logits = F.linear(hidden, weight)
    losses = F.cross_entropy(logits.transpose(1, 2), target, reduction="none")
    return losses.sum() + logits.logsumexp(-1).pow(2).mean()


@pytest.mark.parametrize(
    ("loss", "share"),
    [(mean, 0.5), (likelihood, 0.5), (rows_of_losses, 0.5), (half_of_it, 0.5), (losses_and_z_loss, 1), (entropy, 1)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_no_loss_counts_is_not_computed(loss, share):
    hidden, weight, target = rows_and_head()
    all_count = torch.zeros_like(target)
    half = torch.where(torch.arange(8) % 2 == 0, all_count, -100)
    compiled = check(loss, [hidden, weight, half])
    whole, part = (
        multiplications(lambda given=given: results_of(compiled.call, [hidden, weight, given]))
        for given in (all_count, half)
    )
    assert part == whole * share


def probability_of_token(hidden, weight, target):
    logs = F.linear(hidden, weight).log_softmax(-1)
    return logs.exp().gather(-1, target.clamp(min=0)[..., None])


def with_mean(hidden, weight, target):
    logits = F.linear(hidden, weight).view(-1, CLASSES)
    return F.cross_entropy(logits, target.view(-1), label_smoothing=0.1), logits.log_softmax(-1).mean(-1)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("loss", "operators"),
    one_in(
        3,
        [
            (rows_of_losses, 1),
            (smoothed_rows, 1),
            (weighted_rows, 1),
            (token_log_probabilities, 1),
            (selected_log_softmax, 1),
            (selected_by_sequence, 3),
            (z_loss, 1),
            (entropy, 1),
            (entropy_of_softmax, 1),
            (categorical_entropy, 1),
            (policy, 1),
            (smoother, 1),
            (probability_of_token, 1),
            (with_mean, 1),
        ],
    ),
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_numbers_of_rows_are_computed_without_logits(loss, operators, dynamic):
    assert check_rewritten(loss, rows_and_head(), dynamic=dynamic) == {"statistics": operators}


def accuracy_beside(hidden, weight, target):
    logits = F.linear(hidden, weight).view(-1, CLASSES)
    loss = F.cross_entropy(logits, target.view(-1))
    return loss, (logits.argmax(-1) == target.view(-1)).sum()


def accuracy_by_max(hidden, weight, target):
    logits = F.linear(hidden, weight)
    loss = F.cross_entropy(logits.view(-1, CLASSES), target.view(-1))
    return loss, torch.max(logits.view(-1, CLASSES), dim=-1)[1]


def predictions_of_all(hidden, weight, target):
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits.view(-1, CLASSES), target.view(-1)), logits.argmax(dim=-1, keepdim=True)


@pytest.mark.parametrize(
    ("loss", "counts"),
    [
        (accuracy_beside, {"losses": 1}),
        (accuracy_by_max, {"losses": 1}),
        (predictions_of_all, {"losses": 1, "statistics": 1}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_accuracy_beside_the_loss(loss, counts):
    assert check_rewritten(loss, rows_and_head()) == counts


def predictions_without_gradients_first(hidden, weight, target):
    logits = F.linear(hidden, weight).view(-1, CLASSES)
    with torch.no_grad():
        found = logits.argmax(-1)
    return found, logits.log_softmax(-1).mean(-1)


def test_what_stands_under_no_grad_does_not_cut_off_what_comes_later():
    assert check_rewritten(predictions_without_gradients_first, rows_and_head()) == {"statistics": 2}


@pytest.mark.parametrize("target", [[-100] * 6, [-100, 3, -100, -100, -100, -100], []], ids=["ignored", "one", "none"])
@pytest.mark.parametrize("loss", one_in(2, [mean, total, likelihood, z_loss, rows_of_losses]))
def test_few_targets(loss, target):
    hidden, weight, _ = rows_and_head((1, len(target)))
    check_rewritten(loss, [hidden, weight, torch.tensor([target], dtype=torch.int64)])


def with_classes_of_no_weight(hidden, weight, target, bias):
    classes = torch.linspace(-1, 1, CLASSES, dtype=hidden.dtype).clamp(min=0)
    return F.cross_entropy(F.linear(hidden, weight, bias).transpose(1, 2), target, classes)


def rows_with_classes_of_no_weight(hidden, weight, target, bias):
    classes = torch.linspace(-1, 1, CLASSES, dtype=hidden.dtype).clamp(min=0)
    return F.cross_entropy(F.linear(hidden, weight, bias).transpose(1, 2), target, classes, reduction="none")


def beside_a_z_loss(hidden, weight, target, bias):
    """A class of infinite weight: what is ignored has none."""
    logits = F.linear(hidden, weight, bias).view(-1, CLASSES)
    classes = torch.where(torch.arange(CLASSES) == 0, float("inf"), 1.0).to(hidden.dtype)
    return F.cross_entropy(logits, target.view(-1), classes) + logits.logsumexp(-1).mean()


def entropy_of_candidates(hidden, weight, target, bias):
    logs = F.linear(hidden, weight, bias).log_softmax(-1)
    return -(logs.exp() * logs).sum(-1)


def entropy_of_scores(hidden, weight, target, bias):
    logits = F.linear(hidden, weight, bias)
    return logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)


def entr_beside(hidden, weight, target, bias):
    logits = F.linear(hidden, weight, bias)
    with torch.no_grad():
        entropy = torch.special.entr(logits.softmax(-1)).sum(-1)
    return entropy, logits.logsumexp(-1)


def as_it_is(hidden, target, bias):
    pass


def ignored_row(hidden, target, bias):
    hidden[0, 0], target[0, 0] = float("nan"), -100


def row_of_no_weight(hidden, target, bias):
    hidden[1, 3], target[1, 3] = float("nan"), 1


def no_weight_at_all(hidden, target, bias):
    target[target > 0] = 1
    target[target == 0] = 2


def no_candidates(hidden, target, bias):
    bias[::7] = float("-inf")


@pytest.mark.parametrize("change", [as_it_is, ignored_row, row_of_no_weight, no_weight_at_all, no_candidates])
@pytest.mark.parametrize(
    "loss",
    [
        with_classes_of_no_weight,
        rows_with_classes_of_no_weight,
        beside_a_z_loss,
        entropy_of_candidates,
        entropy_of_scores,
        entr_beside,
    ],
)
def test_what_is_not_finite_is_as_in_eager(loss, change):
    hidden, weight, target = rows_and_head()
    bias = torch.randn(CLASSES, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        target[target == 0] = 1  # the class of infinite weight
        change(hidden, target, bias)
    check_rewritten(loss, [hidden, weight, target, bias])
