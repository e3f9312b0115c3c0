"""A compiler that fails on what a pass made of a training step: the step runs without the pass, and says so."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from glue_compiler.backend import GlueBackend
from glue_compiler.errors import GlueWarning
from glue_compiler.handoff.hand_off import hand_off
from glue_compiler.pipeline.graph_pass import PairPass, PassResult
from glue_compiler.pipeline.results import Numerics
from glue_compiler.report.session import Session


class DoublesSines(PairPass):
    """Not right: results tell whether its graph runs."""

    name = "doubles_sines"
    numerics = Numerics.CLOSE

    def run_pair(self, pair, context):
        changed = 0
        for gm in (pair.forward, pair.backward):
            for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default):
                with gm.graph.inserting_after(node):
                    double = gm.graph.call_function(torch.ops.aten.add.Tensor, (node, node))
                node.replace_all_uses_with(double, delete_user_cb=lambda user, double=double: user is not double)
                double.meta["val"] = node.meta["val"]
                changed += 1
            gm.recompile()
        return PassResult(changed=changed > 0, counts={"doubled": changed})


def compiled(model, error=None, at="always", **options):
    """``model`` with glue, whose compiler raises ``error`` for edited steps, and its session and its attempts."""
    attempts = []

    def fails(gm, inputs, options, uuid, edit=None):
        attempts.append(edit is not None)
        call = hand_off(gm, inputs, options, uuid, *([edit] if edit else []))
        if error is not None and (edit is not None or at == "both"):
            raise error
        return call

    session = Session()
    backend = GlueBackend(hand_off=fails, session=session)
    options = {"compiler": "aot_eager", "extra_passes": [DoublesSines()], **options}
    return torch.compile(model, backend=backend, options=options), session, attempts


def model_and_input():
    return nn.Sequential(nn.Linear(3, 3), Sine()).double(), torch.randn(2, 3, dtype=torch.float64)


class Sine(nn.Module):
    def forward(self, x):
        return x.sin()


def step(call, model, x):
    out = call(x)
    out.sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return [out.detach(), *gradients]


def test_the_step_runs_as_it_was_and_the_report_says_why():
    model, x = model_and_input()
    call, session, attempts = compiled(model, RuntimeError("no lowering"))
    with pytest.warns(GlueWarning, match=r"failed on a training step \(RuntimeError: no lowering\).*doubles_sines"):
        found = step(call, model, x)
    torch.testing.assert_close(found, step(model, model, x))
    assert attempts == [True, False]
    report = next(p for p in session.graphs[0].passes if p.name == "doubles_sines")
    assert not report.changed
    assert "no lowering" in report.error


def test_what_compiles_keeps_its_rewrite():
    model, x = model_and_input()
    call, _, attempts = compiled(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", GlueWarning)
        found = step(call, model, x)
    torch.testing.assert_close(found[0], 2 * model(x).detach())
    assert attempts == [True]


@pytest.mark.parametrize(
    ("error", "at", "options", "each_time"),
    [
        (RuntimeError("no lowering"), "always", {"strict": True}, [True]),
        (RuntimeError("no lowering"), "both", {}, [True, False]),  # without the pass too
        (torch.OutOfMemoryError("no memory"), "always", {}, [True]),
    ],
)
def test_errors_that_reach_the_user(error, at, options, each_time):
    model, x = model_and_input()
    call, _, attempts = compiled(model, error, at, **options)
    with pytest.raises(Exception, match="no lowering|no memory"):
        step(call, model, x)
    assert attempts == each_time * (len(attempts) // len(each_time))  # the frame itself is tried again


def test_a_forward_that_inductor_refuses():
    """It has no lowering for what the forward graph calls."""

    class Breaks(DoublesSines):
        name = "breaks"

        def run_pair(self, pair, context):
            (node,) = pair.forward.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
            node.target = torch.ops.aten.histogram.bin_ct
            node.args = (node.args[0], 3)
            pair.forward.recompile()
            return PassResult(changed=True)

    model, x = model_and_input()
    call = torch.compile(model, backend="glue", options={"extra_passes": [Breaks()]})
    with pytest.warns(GlueWarning, match="failed on a training step"):
        found = step(call, model, x)
    torch.testing.assert_close(found, step(model, model, x))


def test_a_graph_that_is_retained():
    """Nothing of it is overwritten, as the backward is compiled when it is known to run again."""
    model, x = nn.Linear(3, 3).double(), torch.randn(2, 3, dtype=torch.float64)
    call = torch.compile(model, backend="glue", options={"extra_passes": [DoublesSines()]})
    loss = call(x).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for got, want in zip(found, step(model, model, x)[1:], strict=True):
        torch.testing.assert_close(got, 2 * want)
