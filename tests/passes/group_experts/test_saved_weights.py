"""Routing weights, rows and experts that are written before, after, or by the caller: what backward reads of them."""

import pytest
import torch
import torch.nn.functional as F

from tests.captured import count
from tests.passes.group_experts.loops import EXPERTS, compiled, inputs_for, routings
from tests.slow import one_in


def loop(x, selected, weights, gate_up):
    out = torch.zeros_like(x)
    for expert in range(EXPERTS):
        token, slot = torch.where(selected == expert)
        rows = F.linear(x[token], gate_up[expert, : x.shape[1]])
        out.index_add_(0, token, rows * weights[token, slot, None])
    return out


def untouched(x, selected, weights, gate_up, down):
    return loop(x, selected, weights * 2, gate_up) + down.sum()


def written_later(write):
    def fn(x, selected, weights, gate_up, down):
        weights = weights * 2
        out = loop(x, selected, weights, gate_up)
        write(weights)
        return out + down.sum(), weights

    return fn


def weights_of_the_caller(x, selected, weights, gate_up, down):
    return loop(x, selected, weights, gate_up) + down.sum()


def data_written_before(which):
    def fn(x, selected, weights, gate_up, down):
        {"x": x, "weights": weights, "gate_up": gate_up}[which].data.clamp_(-0.5, 0.5)
        return loop(x, selected, weights, gate_up) + down.sum()

    return fn


def detached_written_before(x, selected, weights, gate_up, down):
    gate_up = gate_up * 1
    gate_up.detach().mul_(2)
    return loop(x, selected, weights, gate_up) + down.sum()


def gradients(fn, write=lambda weights: None):
    torch.manual_seed(0)
    selected = routings()["spread"]
    # Not leaves, which no one may write.
    leaves = inputs_for(selected)
    x, *given = [leaf * 1 for leaf in leaves]
    out = fn(x, selected, *given)
    out = out[0] if isinstance(out, tuple) else out
    write(given[0])
    out.pow(2).sum().backward()
    return [leaf.grad for leaf in leaves]


def check(fn, write=lambda weights: None, **options):
    run = compiled(fn, **options)
    torch.testing.assert_close(gradients(run.call, write), gradients(fn, write))
    assert sum(report.passes[0].counts.get("loops_grouped", 0) for report in run.session.graphs) == 1
    return run


def multiplied(weights):
    weights.mul_(3)


def multiplied_out_of_sight(weights):
    weights.data.mul_(3)


def multiplied_in_a_list(weights):
    torch._foreach_mul_([weights], 3)


def one_set(weights):
    weights[0, 0] = 5


WRITES = [multiplied, multiplied_out_of_sight, multiplied_in_a_list, one_set]


@pytest.mark.parametrize("write", WRITES)
def test_weights_may_be_written_later(write):
    check(written_later(write), eager=False)


@pytest.mark.parametrize(("write", "compiler"), [*((write, "aot_eager") for write in WRITES), (multiplied, "inductor")])
def test_the_caller_may_write_the_weights_before_backward(write, compiler):
    check(weights_of_the_caller, write, eager=False, compiler=compiler)


@pytest.mark.parametrize(("fn", "copies"), [(untouched, 0), (weights_of_the_caller, 1)])
def test_weights_that_nobody_else_knows_are_not_copied(fn, copies):
    assert count(check(fn, eager=True).graph, torch.ops.glue.private_copy.default) == copies


@pytest.mark.parametrize("eager", [True, False], ids=["the graph", "compiled"])
@pytest.mark.parametrize(
    "fn",
    one_in(2, [*map(data_written_before, ("x", "weights", "gate_up")), detached_written_before]),
    ids=["x", "weights", "experts", "detached experts"],
)
def test_what_is_written_through_an_alias_has_its_gradient(fn, eager):
    check(fn, eager=eager)
