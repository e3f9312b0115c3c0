"""Writes in checkpointed bodies are repeated by the recomputation as often as they are without glue."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests import versions
from tests.captured import compile_with_glue


def counts(x, p):
    return x.sin() * torch.nonzero(p).shape[0]


def writes_and_counts(x, p):
    p.data.add_(1)  # autograd would refuse another write to what a checkpoint is given
    return counts(x, p)


def reads_and_writes_a_view(x, p):
    y = x.sin() * p.sum().item()
    p.data[1:].mul_(2)
    return y


def writes_and_branches(x, p):
    y = x.sin() if (p > 0).all() else x.cos()
    p.data.add_(1)
    return y


def nested(x, p):
    p.data.add_(1)
    return checkpoint(counts, x, p, use_reentrant=False)


def writes_its_own(x, p):
    own = p.clone()
    own.add_(1)
    return counts(x, own)


def writes_outside_of_it(x, p):
    return counts(x, p)


REPEATED = [writes_and_counts, reads_and_writes_a_view, writes_and_branches, nested]
ONE_GRAPH = [writes_its_own, writes_outside_of_it]


@pytest.mark.parametrize("body", [*REPEATED, *ONE_GRAPH], ids=lambda body: body.__name__)
def test_a_body_writes_as_often_as_in_eager(body):
    def fn(x, p):
        if body is writes_outside_of_it:
            p.data.add_(1)
        return checkpoint(body, x, p, use_reentrant=False)

    def after(call):
        x, p = torch.ones(3, requires_grad=True), torch.tensor([0, 2, -1])
        out = call(x * 1, p)
        out.sum().backward()
        return [out.detach(), x.grad, p]

    run = compile_with_glue(fn, fullgraph=False)
    for got, want in zip(after(run.call), after(fn), strict=True):
        torch.testing.assert_close(got, want)
    versions.NUMBERS_IN_CHECKPOINTS.skip()
    assert (len(run.graphs) == 1 and not run.session.capture_events) == (body in ONE_GRAPH)
