"""Losses of a head whose classes two ranks share: without whole logits, and as one process has them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from glue_compiler.backend import GlueBackend
from glue_compiler.errors import GlueDeferredError
from glue_compiler.report.session import Session

pytestmark = pytest.mark.slow

CLASSES, WIDTH, ROWS = 1024, 16, 24
IGNORED = -100


class Model(nn.Module):
    """``of``: (head, hidden states, targets) → loss, and perhaps more."""

    def __init__(self, of: Callable[..., Any], classes: int, bias: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.of = of
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, classes, bias=bias)
        self.double()

    def forward(self, hidden: Tensor, target: Tensor) -> Any:
        return self.of(self.head, self.norm(hidden), target)


def flat(logits: Tensor) -> Tensor:
    return logits.reshape(-1, logits.shape[-1])


def mean(head, hidden, target):
    return functional.cross_entropy(flat(head(hidden)), target.view(-1))


def summed_by_tokens(head, hidden, target):
    logits = head(hidden)[..., :-1, :].double()
    return functional.cross_entropy(flat(logits), target[..., 1:].reshape(-1), reduction="sum") / 7


def each_row(head, hidden, target):
    losses = functional.cross_entropy(flat(head(hidden)), target.view(-1), reduction="none")
    return (losses * torch.arange(len(losses))).sum()


def weights_of(head):
    return torch.linspace(0.5, 2, head.out_features, dtype=torch.float64)


def smoothed(head, hidden, target):
    return functional.cross_entropy(flat(head(hidden)), target.view(-1), label_smoothing=0.1)


def weighted(head, hidden, target):
    return functional.cross_entropy(flat(head(hidden)), target.view(-1), weights_of(head))


def capped_and_scaled(head, hidden, target):
    logits = (head(hidden) / 3).tanh() * 3
    return functional.cross_entropy(flat(logits * 1.5), target.view(-1))


def probabilities_of_targets(head, hidden, target):
    chosen = head(hidden).log_softmax(-1).gather(-1, target.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return (chosen * (target >= 0)).sum()


def with_z_loss(head, hidden, target):
    logits = head(hidden)
    total = logits.logsumexp(-1)
    return functional.cross_entropy(flat(logits), target.view(-1)) + 1e-2 * (total * total).mean()


def mean_over_classes(head, hidden, target):
    return head(hidden).log_softmax(-1).mean(-1).sum() + functional.cross_entropy(flat(head(hidden)), target.view(-1))


def with_logits(head, hidden, target):
    logits = head(hidden)
    return functional.cross_entropy(flat(logits), target.view(-1)), logits


REWRITTEN = (
    mean,
    summed_by_tokens,
    each_row,
    smoothed,
    weighted,
    capped_and_scaled,
    probabilities_of_targets,
    with_z_loss,
    mean_over_classes,
)


def entropy(head, hidden, target):
    logits = head(hidden)
    return (
        functional.cross_entropy(flat(logits), target.view(-1)) + torch.special.entr(logits.softmax(-1)).sum(-1).sum()
    )


def with_predictions(head, hidden, target):
    logits = head(hidden)
    loss = functional.cross_entropy(flat(logits), target.view(-1))
    return loss + 0.0 * (logits.argmax(-1) == target).sum()


def smoothed_and_weighted(head, hidden, target):
    return functional.cross_entropy(flat(head(hidden)), target.view(-1), weights_of(head), label_smoothing=0.1)


def multiplied(head, hidden, target):
    logits = head(hidden)
    return functional.cross_entropy(flat(logits), target.view(-1)) + (logits * logits).sum()


LEFT_ALONE = {
    entropy: "more is taken than sums over them",
    with_predictions: "more is taken than sums over them",
    smoothed_and_weighted: "a smoothed loss weighs them",
    multiplied: "its logits are used by mul",
}


def weight_written_meanwhile(head, hidden, target):
    logits = head(hidden)
    with torch.no_grad():
        head.weight.mul_(2)
    return functional.cross_entropy(flat(logits), target.view(-1))


def rows_written_meanwhile(head, hidden, target):
    rows = hidden.clone()
    logits = head(rows)
    rows.mul_(2)
    return functional.cross_entropy(flat(logits), target.view(-1))


@dataclass
class Found:
    losses: list[Tensor]
    gradients: list[Tensor | None]
    counts: dict[str, int]
    skips: list[str]


def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    made = []
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        hidden = torch.randn(2, ROWS // 2 + step, WIDTH, generator=generator, dtype=torch.float64)
        target = torch.randint(CLASSES, hidden.shape[:-1], generator=generator)
        target[0, :3] = IGNORED
        target[1, 0], target[1, 1] = 0, CLASSES - 1
        made.append((hidden, target))
    return made


def trained(model: nn.Module, call: Callable[..., Any], steps: int) -> tuple[list[Tensor], list[Tensor | None]]:
    losses, gradients = [], []
    for hidden, target in batches(steps):
        hidden.requires_grad_()
        found = call(hidden, target)
        loss = found[0] if isinstance(found, tuple) else found
        loss.backward()
        losses.append(loss.detach())
        found = [hidden.grad, *(weight.grad for weight in model.parameters())]
        gradients += [each.full_tensor() if hasattr(each, "full_tensor") else each for each in found]
        model.zero_grad()
    return losses, gradients


def shared(of: Callable[..., Any], classes: int, bias: bool, compiler: str) -> tuple[Any, Any, Session]:
    model = Model(of, classes, bias)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})
    session = Session()
    call = torch.compile(
        model,
        backend=GlueBackend(session=session),
        options={"compiler": compiler, "strict": True, "assume": {"ranks_agree": True}},
        dynamic=False,
    )
    return model, call, session


def case(of, classes, bias, compiler) -> Found:
    model, call, session = shared(of, classes, bias, compiler)
    losses, gradients = trained(model, call, 2)
    reports = [report for graph in session.graphs for report in graph.passes if report.name == "chunk_loss"]
    counts: dict[str, int] = {}
    for name in itertools.chain(*(report.counts for report in reports)):
        counts[name] = sum(report.counts.get(name, 0) for report in reports)
    return Found(losses, gradients, counts, [skip.reason for report in reports for skip in report.skips])


def assert_as_one_process(found: list[Found], of: Callable[..., Any], classes: int, bias: bool) -> None:
    model = Model(of, classes, bias)
    losses, gradients = trained(model, model, 2)
    for each in found:
        torch.testing.assert_close(each.losses, losses)
        for got, want in zip(each.gradients, gradients, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("of", REWRITTEN)
def test_losses_without_whole_logits(two_ranks, of, bias):
    found = two_ranks.run(case, of, CLASSES, bias, "aot_eager")
    assert_as_one_process(found, of, CLASSES, bias)
    for each in found:
        assert each.counts["statistics"] >= 2, (each.counts, each.skips)
        assert not each.skips


def test_by_inductor(two_ranks):
    assert_as_one_process(two_ranks.run(case, mean, CLASSES, False, "inductor"), mean, CLASSES, False)


@pytest.mark.parametrize("of", LEFT_ALONE)
def test_what_needs_more_is_left_alone(two_ranks, of):
    found = two_ranks.run(case, of, CLASSES, False, "aot_eager")
    assert_as_one_process(found, of, CLASSES, False)
    for each in found:
        assert not each.counts.get("statistics")
        assert any(LEFT_ALONE[of] in skip for skip in each.skips), each.skips


def test_ranks_with_other_numbers_of_classes_are_left_alone(two_ranks):
    found = two_ranks.run(case, mean, CLASSES + 1, False, "aot_eager")
    assert_as_one_process(found, mean, CLASSES + 1, False)
    assert not any(each.counts.get("statistics") for each in found)


def without_gradients(of) -> tuple[Tensor, Tensor, list[str]]:
    _, call, session = shared(of, CLASSES, False, "aot_eager")
    (batch,) = batches(1)
    with torch.no_grad():
        reports = [report for graph in session.graphs for report in graph.passes if report.name == "chunk_loss"]
        return call(*batch), Model(of, CLASSES, False)(*batch), [str(report.counts) for report in reports]


@pytest.mark.parametrize("of", [mean, weight_written_meanwhile, rows_written_meanwhile])
def test_what_is_written_before_the_loss_is_taken(two_ranks, of):
    for found, expected, _ in two_ranks.run(without_gradients, of):
        torch.testing.assert_close(found, expected)


READS = (
    torch.sum,
    lambda logits: logits.detach().numpy(),
    lambda logits: logits.float().sum(),
    lambda logits: logits.detach()[:, -1].float().argmax(-1),
    lambda logits: logits.softmax(-1, dtype=torch.float32).sum(),
    lambda logits: logits.float().pow(2).mean().backward(),
)


def products(bias: bool) -> tuple[bool, bool]:
    """Has any operator of a step made logits of all classes, and is the loss right? To read the logits is an error."""
    _, call, _ = shared(with_logits, CLASSES, bias, "aot_eager")
    (batch,) = batches(1)
    call(*batch)  # compiles
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        loss, logits = call(*batch)
        loss.backward()
    sizes = [math.prod(shape) for event in profiler.events() for shape in event.input_shapes or () if shape]
    assert ROWS * CLASSES // 2 in sizes
    assert logits.shape == (2, ROWS // 2, CLASSES)
    assert logits.requires_grad
    for read in READS:
        with pytest.raises(GlueDeferredError, match="options={.logits.: .kept.}"):
            read(logits)
    with torch.no_grad():
        evaluated, read_there = call(*batch)
    whole = Model(with_logits, CLASSES, bias)(*batch)
    is_right = torch.allclose(loss, whole[0]) and torch.allclose(evaluated, whole[0])
    assert torch.allclose(read_there, whole[1])
    return max(sizes) >= ROWS * CLASSES, is_right


@pytest.mark.parametrize("bias", [False, True])
def test_nothing_as_wide_as_all_classes_is_made_and_logits_say_how_to_get_them(two_ranks, bias):
    assert two_ranks.run(products, bias) == [(False, True)] * 2


def bias_written_before_backward() -> tuple[Tensor, Tensor]:
    model, call, _ = shared(mean, CLASSES, True, "aot_eager")
    (batch,) = batches(1)
    loss = call(*batch)
    with torch.no_grad():
        model.head.bias.mul_(5)
    loss.backward()
    return model.norm.weight.grad, model.head.weight.grad.full_tensor()


def test_a_bias_that_is_written_before_backward(two_ranks):
    model = Model(mean, CLASSES, True)
    model(*batches(1)[0]).backward()
    for of_norm, of_head in two_ranks.run(bias_written_before_backward):
        torch.testing.assert_close(of_norm, model.norm.weight.grad)
        torch.testing.assert_close(of_head, model.head.weight.grad)


def labels_of_a_rank() -> Tensor:
    _, call, _ = shared(mean, CLASSES, False, "aot_eager")
    ((hidden, target),) = batches(1)
    target[dist.get_rank()] = IGNORED
    return call(hidden, target).detach()


def test_ranks_that_do_not_agree_get_no_number(two_ranks):
    assert all(loss.isnan() for loss in two_ranks.run(labels_of_a_rank))
