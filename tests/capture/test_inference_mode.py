"""Inference mode in a checkpointed body, which torch's own backends leave the dispatcher in."""

import contextlib

import pytest
import torch
from torch.utils.checkpoint import checkpoint

OPTIONS = {"compiler": "aot_eager"}


def program(mode, checkpointed):
    def body(x, positions):
        starts = torch.nonzero(positions == 0).flatten()
        with mode():
            starts = starts + 1
        return torch.sin(x) * starts.sum().clone()

    def fn(x, positions):
        return checkpoint(body, x, positions, use_reentrant=False) if checkpointed else body(x, positions)

    return fn


@pytest.mark.parametrize("mode", [torch.inference_mode, lambda: torch.inference_mode(False)], ids=["on", "off"])
def test_in_a_checkpointed_body_it_leaves_the_dispatcher_as_it_was(mode):
    fn = program(mode, checkpointed=True)
    compiled = torch.compile(fn, backend="glue", options=OPTIONS)
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    for positions in (torch.tensor([0, 1, 0, 1]), torch.tensor([0, 1, 2, 3])):
        actual, expected = compiled(x, positions), fn(x, positions)
        torch.testing.assert_close(actual, expected)
        (gradient,) = torch.autograd.grad(actual.sum(), x)
        torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), x)[0])
        assert torch.nonzero(positions).shape[1] == 1  # it raised: the dispatcher was left as in the trace


@pytest.mark.parametrize(
    ("mode", "checkpointed"),
    [
        pytest.param(torch.inference_mode, False, id="not checkpointed"),
        pytest.param(torch.no_grad, True, id="without gradients"),
        pytest.param(contextlib.nullcontext, True, id="no mode"),
    ],
)
def test_elsewhere_the_graph_stays_whole(mode, checkpointed):
    fn = program(mode, checkpointed)
    compiled = torch.compile(fn, backend="glue", fullgraph=True, options=OPTIONS)
    x, positions = torch.randn(4, dtype=torch.float64, requires_grad=True), torch.tensor([0, 1, 0, 1])
    torch.testing.assert_close(compiled(x, positions), fn(x, positions))
