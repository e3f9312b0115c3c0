"""Code that only runs for experts with rows: traced for all of them where that is proved the same, else left alone."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.captured import compile_with_glue, count, result_and_gradients
from tests.passes.group_experts.loops import EXPERTS, WIDTH, assert_close_to_eager, inputs_for, routings
from tests.slow import one_in, slow_but

NONZERO = (torch.where, torch.nonzero, "nonzero")


def compiled(fn):
    """Not ``fullgraph``: what is not proved breaks the graph, as it does without glue."""
    return compile_with_glue(fn, fullgraph=False, passes={"group_experts": True})


def mask_of(selected, classes=EXPERTS):
    return F.one_hot(selected, num_classes=classes).permute(2, 1, 0)


def hit_experts(mask):
    return torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()


def body(rows, gate_up, down, expert):
    gate, up = F.linear(rows, gate_up[expert]).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down[expert])


def skips_the_empty(x, selected, weights, gate_up, down):
    """jamba, phimoe and dbrx of transformers 4."""
    out, mask = torch.zeros_like(x), mask_of(selected)
    for expert in range(EXPERTS):
        slot, token = torch.where(mask[expert])
        if token.shape[0] == 0:
            continue
        out.index_add_(0, token, body(x[token], gate_up, down, expert) * weights[token, slot, None])
    return out


def does_the_others(x, selected, weights, gate_up, down):
    """deepseek_v3 and glm4_moe of transformers 4."""
    out, mask = torch.zeros_like(x), mask_of(selected)
    for expert in range(EXPERTS):
        slot, token = torch.where(mask[expert])
        if token.numel() > 0:
            weight = weights[token, slot]
            rows = body(x[token], gate_up, down, expert)
            out.index_add_(0, token, rows * weight.unsqueeze(-1))
    return out


def hits_and_skips(x, selected, weights, gate_up, down):
    """longcat_flash of transformers 5."""
    out, mask = torch.zeros_like(x), mask_of(selected)
    for hit in hit_experts(mask):
        expert = hit.item()
        slot, token = torch.where(mask[expert].squeeze(0))
        if token.numel() == 0:
            continue
        rows = x[token]
        if expert >= 2:  # noqa: SIM108  as the model has it: two stores to one name
            done = rows
        else:
            done = body(rows, gate_up, down, expert)
        out.index_add_(0, token, done * weights[token, slot, None])
    return out


def one_class_more(x, selected, weights, gate_up, down):
    """dbrx of transformers 5: the mask has a class for "no expert", and nothing skips it."""
    out = torch.zeros_like(x)
    with torch.no_grad():
        mask = mask_of(selected, EXPERTS + 1)
        hits = hit_experts(mask)
    for hit in hits:
        expert = hit[0]
        with torch.no_grad():
            slot, token = torch.where(mask[expert])
        out.index_add_(0, token, body(x[token], gate_up, down, expert) * weights[token, slot, None])
    return out


def asks_for_any(x, selected, weights, gate_up, down):
    out = torch.zeros_like(x)
    for expert in range(EXPERTS):
        mask = selected == expert
        if not mask.any():
            continue
        token, slot = torch.where(mask)
        out.index_add_(0, token, body(x[token], gate_up, down, expert) * weights[token, slot, None])
    return out


def asks_for_any_of_a_class(x, selected, weights, gate_up, down):
    out, mask = torch.zeros_like(x), mask_of(selected)
    for expert in range(EXPERTS):
        if mask[expert].bool().any():
            slot, token = torch.where(mask[expert].bool())
            out.index_add_(0, token, body(x[token], gate_up, down, expert) * weights[token, slot, None])
    return out


def asks_for_a_sum(x, selected, weights, gate_up, down):
    out = torch.zeros_like(x)
    for expert in range(EXPERTS):
        mask = selected == expert
        if mask.sum() == 0:
            continue
        token, slot = torch.where(mask)
        out.index_add_(0, token, body(x[token], gate_up, down, expert) * weights[token, slot, None])
    return out


def asks_for_a_number(x, selected, weights, gate_up, down):
    out = torch.zeros_like(x)
    for expert in range(EXPERTS):
        mask = selected == expert
        n = mask.sum().item()
        if n:
            token, slot = torch.where(mask)
            out.index_add_(0, token, body(x[token], gate_up, down, expert) * weights[token, slot, None])
    return out


@pytest.mark.parametrize("routing", slow_but(("spread", "one expert empty"), routings()))
@pytest.mark.parametrize(
    ("loop", "loops"),
    one_in(
        3,
        [(skips_the_empty, 1), (does_the_others, 1), (hits_and_skips, 2), (one_class_more, 1)]
        + [(loop, 1) for loop in (asks_for_any, asks_for_any_of_a_class, asks_for_a_sum, asks_for_a_number)],
    ),
)
def test_every_routing(loop, loops, routing):
    selected = routings()[routing]
    if loop is hits_and_skips:
        selected = selected.clone()
        selected[0, 0] = 0  # in eager, weights that no expert uses have no gradient to compare
    run = compiled(loop)
    assert_close_to_eager(loop, run.call, selected, inputs_for(selected))
    assert count(run.graphs[-1], *NONZERO) == 0
    assert run.session.graphs[-1].passes[0].counts["loops_grouped"] == loops


def test_a_boolean_mask_that_is_asked_first():
    def loop(x, logits, gate_up, down):
        weights, selected = torch.topk(F.softmax(logits, dim=-1), 2)
        out = torch.zeros_like(x)
        for expert in range(EXPERTS):
            mask = (selected == expert).any(-1)
            if not mask.any():
                continue
            weight = (weights * (selected == expert)).sum(-1)
            out[mask] += weight[mask].unsqueeze(-1) * body(x[mask], gate_up, down, expert)
        return out

    x, _, gate_up, down = inputs_for(routings()["spread"])
    logits = torch.randn(11, EXPERTS, dtype=torch.float64)
    logits[:, 2] -= 100
    run = compiled(loop)
    inputs = [x, logits.requires_grad_(), gate_up, down]
    for want, got in zip(result_and_gradients(loop, inputs), result_and_gradients(run.call, inputs), strict=True):
        torch.testing.assert_close(got, want)
    assert run.session.graphs[-1].passes[0].counts["loops_grouped"] == 1
    assert count(run.graph, "any", "sum", *NONZERO) == 0


def test_a_mask_of_another_expert_is_left_alone():
    def loop(x, selected, weights, gate_up, down):
        out = torch.zeros_like(x)
        for expert in range(EXPERTS):
            if not (selected == (expert + 1) % EXPERTS).any():
                continue
            token, slot = torch.where(selected == expert)
            out.index_add_(0, token, body(x[token], gate_up, down, expert) * weights[token, slot, None])
        return out

    left_as_dynamo_has_it(loop, routings()["one expert empty"], NOT_PROVED)


def test_a_mask_that_is_all_true_is_left_alone():
    """``all`` also tells two values apart, and is true of no rows."""

    def loop(x, selected, weights, gate_up, down):
        out = torch.zeros_like(x)
        for expert in range(EXPERTS):
            mask = selected == expert
            if mask.all():
                continue
            token, slot = torch.where(mask)
            out.index_add_(0, token, body(x[token], gate_up, down, expert) * weights[token, slot, None])
        return out

    left_as_dynamo_has_it(loop, routings()["all to one expert"], BRANCHING)


class Experts(nn.Module):
    """mixtral of transformers 4.57 (H4): a ModuleList that is indexed with what the loop iterates over."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(EXPERTS))

    def forward(self, x, selected, weights):
        out, mask = torch.zeros_like(x), mask_of(selected)
        for expert in hit_experts(mask):
            layer = self.experts[expert]
            slot, token = torch.where(mask[expert].squeeze(0))
            rows = x[None, token].reshape(-1, WIDTH)
            out.index_add_(0, token, layer(rows) * weights[token, slot, None])
        return out


@pytest.mark.parametrize("top_k", [1, 2])
def test_a_module_list_indexed_by_a_hit(top_k):
    model = Experts()
    selected = torch.tensor([[0, 2], [2, 3], [0, 3]])[:, :top_k]
    x, weights, *_ = inputs_for(selected)

    def run(call):
        return result_and_gradients(lambda *inputs: call(inputs[0], selected, inputs[1]), [x, weights])

    compiled_model = compiled(model)
    for want, got in zip(run(model), run(compiled_model.call), strict=True):
        torch.testing.assert_close(got, want)
    assert count(compiled_model.graph, *NONZERO) == 0


NOT_PROVED = "not proved to do nothing for experts without rows"
BRANCHING = "Data-dependent branching"


def left_as_dynamo_has_it(loop, selected, reason):
    """Glue changes nothing, for ``reason``, and the values are those of eager."""
    run = compiled(loop)
    assert_close_to_eager(loop, run.call, selected, inputs_for(selected))
    assert not any(p.changed for p in run.session.graphs[-1].passes)  # graphs before it were thrown away
    assert reason in run.session.capture_events[0].reason
    assert run.session.capture_events[0].retried


def test_a_branch_with_something_for_the_empty_is_left_alone():
    def loop(x, selected, weights, gate_up, down):
        out, mask = torch.zeros_like(x), mask_of(selected)
        for expert in range(EXPERTS):
            slot, token = torch.where(mask[expert])
            if token.numel() == 0:
                out += down[expert].sum()
                continue
            out.index_add_(0, token, body(x[token], gate_up, down, expert) * weights[token, slot, None])
        return out

    left_as_dynamo_has_it(loop, routings()["one expert empty"], BRANCHING)


def test_a_body_that_counts_its_iterations_is_left_alone():
    def loop(x, selected, weights, gate_up, down):
        out, mask, used = torch.zeros_like(x), mask_of(selected), 0
        for expert in range(EXPERTS):
            slot, token = torch.where(mask[expert])
            if token.numel() == 0:
                continue
            used += 1
            out.index_add_(0, token, body(x[token], gate_up, down, expert) * weights[token, slot, None])
        return out / used

    left_as_dynamo_has_it(loop, routings()["one expert empty"], BRANCHING)


@pytest.mark.slow
def test_a_list_of_what_was_hit_is_left_alone():
    def loop(x, selected, weights, gate_up, down):
        out, mask, used = torch.zeros_like(x), mask_of(selected), []
        for expert in range(EXPERTS):
            slot, token = torch.where(mask[expert])
            if token.numel() > 0:
                used.append(expert)
                out.index_add_(0, token, body(x[token], gate_up, down, expert) * weights[token, slot, None])
        return out * len(used)

    left_as_dynamo_has_it(loop, routings()["one expert empty"], NOT_PROVED)


def test_a_branch_on_another_row_count_is_left_alone():
    def loop(x, selected, weights, gate_up, down):
        out, mask = torch.zeros_like(x), mask_of(selected)
        for expert in range(EXPERTS):
            slot, token = torch.where(mask[expert])
            _, others = torch.where(mask[(expert + 1) % EXPERTS])
            if others.numel() == 0:
                continue
            out.index_add_(0, token, body(x[token], gate_up, down, expert) * weights[token, slot, None])
        return out

    left_as_dynamo_has_it(loop, routings()["one expert empty"], NOT_PROVED)


def test_a_hit_beside_another_index_is_left_alone():
    """``x[token, tensor([e])]`` has one dimension less than ``x[token, e:e + 1]``."""

    def loop(x, selected, weights, gate_up, down):
        dense = torch.zeros(x.shape[0], EXPERTS, dtype=x.dtype).scatter(1, selected, weights)
        out, mask = torch.zeros_like(x), mask_of(selected)
        for hit in hit_experts(mask):
            _, token = torch.where(mask[hit].squeeze(0))
            out.index_add_(0, token, x[token] * dense[token, hit].unsqueeze(-1))
        return out

    run = compiled(loop)
    selected = routings()["spread"]
    assert_close_to_eager(loop, run.call, selected, inputs_for(selected))


def test_names_set_in_both_arms_are_the_iterations_own():
    """And one that a single arm sets is not: it may be that of an iteration before."""

    def loop(x, selected, weights, gate_up, down):
        out, mask, scale = torch.zeros_like(x), mask_of(selected), 1.0
        for hit in hit_experts(mask):
            expert = hit[0]
            if expert == 2:
                scale = 2.0
            slot, token = torch.where(mask[expert])
            out.index_add_(0, token, scale * body(x[token], gate_up, down, expert) * weights[token, slot, None])
        return out

    left_as_dynamo_has_it(loop, torch.tensor([[0, 1], [3, 1]]), "backend='glue' raised")
