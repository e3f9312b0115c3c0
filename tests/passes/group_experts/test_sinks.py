"""Ways to put the rows of an expert back, and masks that index by themselves."""

import pytest
import torch
import torch.nn.functional as F

from tests.passes.group_experts.loops import (
    EXPERTS,
    TOP_K,
    WIDTH,
    assert_close_to_eager,
    assert_grouped,
    assert_left_alone,
    compiled,
    inputs_for,
    routings,
)
from tests.slow import one_in, slow_but


def body(rows, gate_up, down, expert):
    gate, up = F.linear(rows, gate_up[expert]).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down[expert])


def chosen(scores):
    """What ``topk`` selects: a token's experts are known to be different ones."""
    return torch.topk(scores, TOP_K, dim=-1)


def out_of_place(x, selected, weights, gate_up, down):
    out = torch.zeros_like(x)
    for expert in range(EXPERTS):
        token, slot = torch.where(selected == expert)
        rows = body(x[token], gate_up, down, expert) * weights[token, slot, None]
        out = out.index_add(0, token, rows)
    return out


def adds_to_a_value(x, selected, weights, gate_up, down):
    out = x * 2
    for expert in range(EXPERTS):
        token, slot = torch.where(selected == expert)
        out = torch.index_add(out, 0, token, body(x[token], gate_up, down, expert) * weights[token, slot, None])
    return out


def columns_of_nonzero(x, selected, weights, gate_up, down):
    out = torch.zeros_like(x)
    for expert in range(EXPERTS):
        pairs = (selected == expert).nonzero()
        token, slot = pairs[:, 0], pairs[:, 1]
        out.index_add_(0, token, body(x[token], gate_up, down, expert) * weights[token, slot, None])
    return out


def in_place_step(x, selected, weights, gate_up, down):
    """nllb_moe of transformers 5 scales its rows in place."""
    out = torch.zeros_like(x)
    for expert in range(EXPERTS):
        token, slot = torch.where(selected == expert)
        rows = body(x[token], gate_up, down, expert) * weights[token, slot, None]
        rows *= 0.9
        out.index_add_(0, token, rows)
    return out


@pytest.mark.parametrize("loop", [out_of_place, adds_to_a_value, columns_of_nonzero, in_place_step])
@pytest.mark.parametrize(
    "routing", slow_but(("an expert twice in a token",), ["spread", "one expert empty", "an expert twice in a token"])
)
def test_rows_are_added(loop, routing):
    selected = routings()[routing]
    run = compiled(loop)
    assert_close_to_eager(loop, run.call, selected, inputs_for(selected))
    assert_grouped(run)


def adds_by_assignment(x, scores, weights, gate_up, down):
    selected = chosen(scores)[1]
    out = torch.zeros_like(x)
    for expert in range(EXPERTS):
        token, slot = torch.where(selected == expert)
        out[token] += body(x[token], gate_up, down, expert) * weights[token, slot, None]
    return out


def boolean_mask(x, scores, weights, gate_up, down):
    selected = chosen(scores)[1]
    out = torch.zeros_like(x)
    for expert in range(EXPERTS):
        mask = (selected == expert).any(-1)
        weight = (weights * (selected == expert)).sum(-1)
        out[mask] += weight[mask, None] * body(x[mask], gate_up, down, expert)
    return out


def weight_by_token(x, scores, weights, gate_up, down):
    selected = chosen(scores)[1]
    out = torch.zeros_like(x)
    total = weights.sum(-1)
    for expert in range(EXPERTS):
        mask = (selected == expert).any(-1)
        out[mask] = out[mask] + total[mask].unsqueeze(-1) * body(x[mask], gate_up, down, expert)
    return out


@pytest.mark.parametrize("loop", [adds_by_assignment, boolean_mask, weight_by_token])
@pytest.mark.parametrize("tokens", [1, 11])
def test_assignments_add_where_topk_selects_each_expert_once(loop, tokens):
    scores = torch.rand(tokens, EXPERTS)
    inputs = inputs_for(chosen(scores)[1])
    run = compiled(loop)
    assert_close_to_eager(loop, run.call, scores, inputs)
    assert_grouped(run)


@pytest.mark.parametrize("loop", one_in(2, [adds_by_assignment, boolean_mask]))
def test_an_expert_that_may_be_selected_twice_is_left_alone(loop, monkeypatch):
    """An assignment adds a token once, and a sum over slots would add it twice."""
    monkeypatch.setitem(loop.__globals__, "chosen", lambda selected: (None, selected))
    selected = routings()["an expert twice in a token"]
    run = compiled(loop)
    assert_close_to_eager(loop, run.call, selected, inputs_for(selected))
    assert_left_alone(run, "twice", sliced=loop is adds_by_assignment)


def test_weights_that_are_written_after_their_sum_are_left_alone():
    def loop(x, scores, weights, gate_up, down):
        selected = chosen(scores)[1]
        weights = weights.clone()
        total = [(weights * (selected == expert)).sum(-1) for expert in range(EXPERTS)]
        weights.mul_(2)
        out = torch.zeros_like(x)
        for expert in range(EXPERTS):
            mask = (selected == expert).any(-1)
            out[mask] += total[expert][mask, None] * body(x[mask], gate_up, down, expert)
        return out * weights.sum()

    scores = torch.rand(11, EXPERTS)
    run = compiled(loop)
    with torch.no_grad():  # autograd itself refuses the write
        inputs = [each.detach() for each in inputs_for(chosen(scores)[1])]
        torch.testing.assert_close(run.call(inputs[0], scores, *inputs[1:]), loop(inputs[0], scores, *inputs[1:]))
    assert_left_alone(run, "written while the loop runs")


def test_topk_indices_that_are_written_prove_nothing():
    def loop(x, scores, weights, gate_up, down):
        selected = chosen(scores)[1]
        selected.clamp_(max=1)
        out = torch.zeros_like(x)
        for expert in range(EXPERTS):
            token, slot = torch.where(selected == expert)
            out[token] += body(x[token], gate_up, down, expert) * weights[token, slot, None]
        return out

    scores = torch.rand(11, EXPERTS)
    run = compiled(loop)
    assert_close_to_eager(loop, run.call, scores, inputs_for(chosen(scores)[1]))
    assert_left_alone(run, "twice", sliced=True)


def assigned(make):
    def loop(x, selected, weights, gate_up, down):
        out = make(x)
        for expert in range(EXPERTS):
            mask = selected == expert
            out[mask] = body(x[mask], gate_up, down, expert)
        return out * weights

    return loop


@pytest.mark.parametrize("make", [torch.zeros_like, torch.empty_like])
def test_one_slot_assigns(make):
    selected = torch.tensor([0, 3, 1, 1, 2, 0])
    inputs = [tensor if i != 1 else tensor[:, :1] for i, tensor in enumerate(inputs_for(selected[:, None]))]
    run = compiled(assigned(make))
    assert_close_to_eager(assigned(make), run.call, selected, inputs)
    assert_grouped(run)


@pytest.mark.slow
def test_assigning_into_another_layout_is_left_alone():
    """The rows of all experts cannot stand for it, and there is nothing to add them to."""

    def columns_first(x):
        return torch.empty_like(x.detach().t().contiguous().t())

    selected = torch.tensor([0, 3, 1, 1, 2, 0])
    inputs = [tensor if i != 1 else tensor[:, :1] for i, tensor in enumerate(inputs_for(selected[:, None]))]
    run = compiled(assigned(columns_first))
    assert_close_to_eager(assigned(columns_first), run.call, selected, inputs)
    assert_left_alone(run, "another layout")


def test_assigning_into_other_values_is_left_alone():
    """A token of no expert keeps them."""
    loop = assigned(torch.ones_like)
    selected = torch.tensor([0, 3, 1, 7, 2, 0])
    inputs = [tensor if i != 1 else tensor[:, :1] for i, tensor in enumerate(inputs_for(selected[:, None]))]
    run = compiled(loop)
    assert_close_to_eager(loop, run.call, selected, inputs)
    assert_left_alone(run, "keep what was")


def test_assigning_several_slots_is_left_alone():
    def loop(x, scores, weights, gate_up, down):
        selected = chosen(scores)[1]
        out = torch.zeros_like(x)
        for expert in range(EXPERTS):
            token, _ = torch.where(selected == expert)
            out[token] = body(x[token], gate_up, down, expert)
        return out

    scores = torch.rand(11, EXPERTS)
    run = compiled(loop)
    assert_close_to_eager(loop, run.call, scores, inputs_for(chosen(scores)[1]))
    assert_left_alone(run, "overwrite", sliced=True)


@pytest.mark.slow
def test_a_step_in_place_that_something_else_sees_is_left_alone():
    def loop(x, selected, weights, gate_up, down):
        out = torch.zeros_like(x)
        for expert in range(EXPERTS):
            token, _ = torch.where(selected == expert)
            rows = F.linear(x[token], gate_up[expert])
            first = rows[:, : rows.shape[1] // 2]
            first *= 2
            out.index_add_(0, token, F.linear(rows[:, : rows.shape[1] // 2], down[expert]))
        return out

    selected = routings()["spread"]
    run = compiled(loop)
    assert_close_to_eager(loop, run.call, selected, inputs_for(selected))
    assert_left_alone(run, "in place|outside of the loop", sliced=True)


def test_a_chain_that_is_read_in_between_is_left_alone():
    def loop(x, selected, weights, gate_up, down):
        out, seen = torch.zeros_like(x), []
        for expert in range(EXPERTS):
            token, slot = torch.where(selected == expert)
            out = out.index_add(0, token, body(x[token], gate_up, down, expert) * weights[token, slot, None])
            seen.append(out.sum())
        return out + seen[1]

    selected = routings()["spread"]
    run = compiled(loop)
    assert_close_to_eager(loop, run.call, selected, inputs_for(selected))
    assert_left_alone(run, "between its experts", sliced=True)


def test_experts_that_compute_nothing_are_a_group_of_their_own():
    """longcat_flash: the experts from some number on give their rows back as they are."""

    def loop(x, selected, weights, gate_up, down):
        out = torch.zeros_like(x)
        for expert in range(EXPERTS):
            token, slot = torch.where(selected == expert)
            rows = body(x[token], gate_up, down, expert) if expert < 2 else x[token]
            out.index_add_(0, token, rows * weights[token, slot, None])
        return out

    selected = routings()["spread"]
    run = compiled(loop)
    assert_close_to_eager(loop, run.call, selected, inputs_for(selected))
    assert_grouped(run, loops=2)


def test_a_bias_is_added_within_the_product():
    """gpt_oss writes ``x @ W[e] + b[e]``."""

    def biased(x, selected, weights, gate_up, down):
        out = torch.zeros_like(x)
        for expert in range(EXPERTS):
            token, _ = torch.where(selected == expert)
            out.index_add_(0, token, x[token] @ gate_up[expert] + down[expert])
        return out

    selected = routings()["spread"]
    x, weights, _, _ = inputs_for(selected)
    matrix = torch.randn(EXPERTS, WIDTH, WIDTH, dtype=x.dtype, requires_grad=True)
    bias = torch.randn(EXPERTS, WIDTH, dtype=x.dtype, requires_grad=True)
    run = compiled(biased)
    assert_close_to_eager(biased, run.call, selected, [x, weights, matrix, bias])
    assert_grouped(run)
    targets = [str(node.target) for node in run.graph.graph.nodes]
    assert "glue.grouped_linear.default" in targets
    assert "glue.grouped_repeat.default" not in targets
