"""Near misses: what looks like a loss without logits and must stay as it is, beside forms that are rewritten."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.passes.chunk_loss.runs import (  # noqa: F401
    CLASSES,
    check,
    check_left_alone,
    check_rewritten,
    rows_and_head,
    small_chunks,
)
from tests.slow import one_in


def flat(logits):
    return logits.view(-1, CLASSES)


def largest_is_used(hidden, weight, target):
    logits = flat(F.linear(hidden, weight))
    return F.cross_entropy(logits, target.view(-1)) + logits.max(-1)[0].sum()


def only_its_place_is_used(hidden, weight, target):
    logits = flat(F.linear(hidden, weight))
    return F.cross_entropy(logits, target.view(-1)), logits.max(-1)[1]


def some_classes(hidden, weight, target):
    logits = flat(F.linear(hidden, weight))
    return F.cross_entropy(logits[:, :20], target.view(-1).clamp(max=19))


def all_classes(hidden, weight, target):
    return F.cross_entropy(flat(F.linear(hidden, weight))[:, :CLASSES], target.view(-1))


def masked_classes(hidden, weight, target):
    banned = torch.arange(CLASSES) == 3
    return F.cross_entropy(flat(F.linear(hidden, weight)).masked_fill(banned, -1e9), target.view(-1))


def probabilities_as_targets(hidden, weight, target):
    wanted = torch.full((target.numel(), CLASSES), 1 / CLASSES, dtype=hidden.dtype)
    return F.cross_entropy(flat(F.linear(hidden, weight)), wanted)


def written_logits(hidden, weight, target):
    logits = flat(F.linear(hidden, weight))
    logits[0] = 0.0
    return F.cross_entropy(logits, target.view(-1))


def capped_at_nothing(hidden, weight, target):
    return F.cross_entropy(flat(F.linear(hidden, weight).tanh() * 1e-200 * 1e-200), target.view(-1))


def halved_in_place(hidden, weight, target):
    return F.cross_entropy(flat(F.linear(hidden, weight)).div_(2), target.view(-1))


def halved(hidden, weight, target):
    return F.cross_entropy(flat(F.linear(hidden, weight)).div(2), target.view(-1))


def rows_written_before(hidden, weight, target):
    rows = hidden * 2
    logits = F.linear(rows, weight)
    with torch.no_grad():
        rows.zero_()
    return F.cross_entropy(flat(logits.detach()), target.view(-1)) + (hidden * weight[0]).sum()


def target_written_later(hidden, weight, target):
    target = target.clone()
    loss = F.cross_entropy(flat(F.linear(hidden.detach(), weight.detach())), target.view(-1))
    target.zero_()
    return loss, target


def log_probabilities_returned(hidden, weight, target):
    logs = F.linear(hidden, weight).log_softmax(-1)
    return F.nll_loss(flat(logs), target.view(-1)), logs


def capped_twice(hidden, weight, target):
    return F.cross_entropy(torch.tanh(torch.tanh(flat(F.linear(hidden, weight)))), target.view(-1))


def top_tokens(hidden, weight, target):
    logits = flat(F.linear(hidden, weight))
    return F.cross_entropy(logits, target.view(-1)), logits.topk(2).indices


def scaled_by_a_tensor(hidden, weight, target):
    return F.cross_entropy(flat(F.linear(hidden, weight) * weight.sum()), target.view(-1))


def entropy_with_one_factor_detached(hidden, weight, target):
    logs = F.linear(hidden, weight).log_softmax(-1)
    return (logs.detach().exp() * logs).sum(-1)


def total_without_gradient(hidden, weight, target):
    logits = F.linear(hidden, weight)
    with torch.no_grad():
        total = logits.logsumexp(-1, keepdim=True)
    return (logits - total).gather(-1, target.clamp(min=0)[..., None])


def distilled(hidden, weight, target):
    logs = F.linear(hidden, weight).log_softmax(-1)
    return F.kl_div(logs, torch.full((*target.shape, CLASSES), 1 / CLASSES, dtype=hidden.dtype), reduction="batchmean")


def product_is_used_before_it_is_added(hidden, weight, target):
    first = F.linear(hidden, weight)
    logits = first + F.linear(hidden * 2, weight)
    return F.cross_entropy(flat(logits), target.view(-1)) + first.sum()


def masked_rows(hidden, weight, target):
    return F.cross_entropy(flat(F.linear(hidden, weight)).relu(), target.view(-1))


def one_product_without_gradients(hidden, weight, target):
    logits = F.linear(hidden, weight)
    with torch.no_grad():
        other = F.linear(hidden.tanh(), weight) * 2
    return F.cross_entropy(flat(logits + other), target.view(-1))


def all_products_without_gradients(hidden, weight, target):
    with torch.no_grad():
        logits = F.linear(hidden, weight) + F.linear(hidden.tanh(), weight) * 2
    return F.cross_entropy(flat(logits), target.view(-1)) + (hidden * weight[0]).sum()


def weight_turned_without_gradients(hidden, weight, target):
    with torch.no_grad():
        turned = weight.t()
    return F.cross_entropy(flat(hidden @ turned), target.view(-1))


def view_without_gradients(hidden, weight, target):
    logits = F.linear(hidden, weight)
    with torch.no_grad():
        row = logits[0]  # asks for a gradient, as a leaf
    return F.cross_entropy(row, target[0])


def view_for_a_metric(hidden, weight, target):
    logits = F.linear(hidden, weight)
    with torch.no_grad():
        metric = F.cross_entropy(logits[0], target[0])
    return F.cross_entropy(flat(logits), target.view(-1)), metric


def read_as_the_same_bits(hidden, weight, target):
    logits = F.linear(hidden, weight).view(hidden.dtype)  # passes no gradients on
    return F.cross_entropy(flat(logits), target.view(-1)) + (hidden * weight[0]).sum()


def taken_from_the_end(hidden, weight, target):
    logs = F.linear(hidden, weight).log_softmax(-1)
    return torch.take_along_dim(logs, target[..., None], -1)  # -100 is one of the classes


def gathered(hidden, weight, target):
    return F.linear(hidden, weight).log_softmax(-1).gather(-1, (target % CLASSES)[..., None])


class Flattened(torch.autograd.Function):
    """Takes a view of its gradient, as a quantiser of weights may."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.view(-1).view(gradient.shape)


def turned_weight_of_a_function(hidden, weight, target):
    turned = Flattened.apply(weight.t().contiguous())
    return F.cross_entropy(flat(hidden @ turned), target.view(-1))


def weight_of_a_function(hidden, weight, target):
    return F.cross_entropy(flat(Flattened.apply(hidden) @ Flattened.apply(weight).t()), target.view(-1))


def turned_weight(hidden, weight, target):
    return F.cross_entropy(flat(hidden @ weight.t().contiguous()), target.view(-1))


@pytest.mark.parametrize(
    ("loss", "reason"),
    one_in(
        3,
        [
            (turned_weight_of_a_function, "sees its strides"),
            (largest_is_used, "and not only its place"),
            (some_classes, "only some of its classes"),
            (masked_classes, "made by where"),
            (probabilities_as_targets, "probabilities"),
            (written_logits, "in place"),
            (halved_in_place, "writes in place"),
            (rows_written_before, "written in place"),
            (log_probabilities_returned, "log probabilities"),
            (capped_twice, "capped twice"),
            (capped_at_nothing, "by so little that they are zero"),
            (top_tokens, "topk"),
            (scaled_by_a_tensor, "mul"),
            (entropy_with_one_factor_detached, "one factor alone"),
            (total_without_gradient, "add"),
            (distilled, "kl_div"),
            (product_is_used_before_it_is_added, "before they are added up"),
            (masked_rows, "relu"),
            (one_product_without_gradients, "and not all, is made where no gradients"),
            (view_without_gradients, "takes a gradient and passes none on"),
            (taken_from_the_end, "take_along_dim"),
            (read_as_the_same_bits, "passes no gradients on"),
        ],
    ),
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_it_stays_as_it_is(loss, reason):
    check_left_alone(loss, rows_and_head(), reason)


@pytest.mark.parametrize(
    "loss",
    [
        only_its_place_is_used,
        weight_of_a_function,
        turned_weight,
        all_classes,
        halved,
        target_written_later,
        all_products_without_gradients,
        weight_turned_without_gradients,
        view_for_a_metric,
        gathered,
    ],
)
def test_beside_it_the_logits_go(loss):
    check_rewritten(loss, rows_and_head())


class Weight(torch.Tensor):
    """A subclass may compute anything."""


def test_a_weight_of_a_subclass():
    hidden, weight, target = rows_and_head()
    weight = weight.detach().as_subclass(Weight)

    def loss(hidden, target):
        return F.cross_entropy(flat(F.linear(hidden, weight)), target.view(-1))

    check_left_alone(loss, [hidden, target], "Weight", eager=True)  # AOTAutograd fails on it without glue too


def test_without_a_loss_nothing_is_looked_at():
    def model(hidden, weight):
        return F.linear(hidden, weight)

    from tests.passes.chunk_loss.runs import check

    compiled = check(model, rows_and_head()[:2])
    assert not compiled.report.passes[0].changed
    assert not compiled.skip_reasons


def test_small_logits_on_a_gpu_do_not_pay():
    from glue_compiler.ops.loss_costs import pays

    assert pays("cpu", 1)
    assert not pays("cuda", 2**20)
    assert pays("cuda", 2**30)
    assert pays("cuda", None)


def test_a_head_with_weights_of_classes_and_smoothing_of_single_rows():
    def loss(hidden, weight, target, classes):
        logits = flat(F.linear(hidden, weight))
        return F.cross_entropy(logits, target.view(-1), classes, reduction="none", label_smoothing=0.1)

    classes = nn.Parameter(torch.rand(CLASSES, dtype=torch.float64), requires_grad=False)
    check_left_alone(loss, [*rows_and_head(), classes], "smoothed losses of single rows")


@pytest.mark.parametrize("narrow", ["rows", "weight"])
def test_a_size_of_one_that_einsum_repeats_is_no_projection(narrow):
    def repeated(hidden, weight, target):
        hidden, weight = (hidden[..., :1], weight) if narrow == "rows" else (hidden, weight[:, :1])
        return F.cross_entropy(flat(torch.einsum("btk,vk->btv", hidden, weight)), target.view(-1))

    compiled = check(repeated, rows_and_head())
    assert not compiled.report.passes[0].changed
