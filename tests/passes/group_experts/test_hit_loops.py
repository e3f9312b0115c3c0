"""Loops over the experts that are hit: traced as loops over all where that is proved the same, else left alone."""

import pytest
import torch
import torch.nn.functional as F

from tests.captured import compile_with_glue, count
from tests.passes.group_experts.loops import (
    EXPERTS,
    TOP_K,
    WIDTH,
    assert_close_to_eager,
    assert_grouped,
    compiled,
    inputs_for,
    routings,
)
from tests.slow import one_in, slow_but


def hits_of(mask):
    return torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()


def loop_h5(x, selected, weights, gate_up, down):
    """Mixtral of transformers 5."""
    out = torch.zeros_like(x)
    with torch.no_grad():
        mask = F.one_hot(selected, num_classes=EXPERTS + 1).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
    for expert in hit:
        expert = expert[0]
        if expert == EXPERTS:
            continue
        slot, token = torch.where(mask[expert])
        gate, up = F.linear(x[token], gate_up[expert]).chunk(2, dim=-1)
        rows = F.linear(F.silu(gate) * up, down[expert]) * weights[token, slot, None]
        out.index_add_(0, token, rows.to(out.dtype))
    return out


def loop_g(x, selected, weights, gate_up, down):
    """gpt_oss of transformers 4.55: dense routing weights, products from the right."""
    dense = torch.zeros(x.shape[0], EXPERTS, dtype=x.dtype).scatter(1, selected, weights)
    out = torch.zeros_like(x)
    with torch.no_grad():
        mask = F.one_hot(selected, num_classes=EXPERTS).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
    for expert in hit[:]:
        with_one = expert[0]
        _, token = torch.where(mask[with_one])
        rows = x[token] @ gate_up[with_one, :WIDTH].T + gate_up[with_one, :WIDTH, 0]
        out.index_add_(0, token, rows * dense[token, with_one, None])
    return out


@pytest.mark.parametrize("loop", [loop_h5, loop_g], ids=["H5", "G"])
@pytest.mark.parametrize("routing", slow_but(("spread", "one expert empty"), routings()))
def test_every_routing(loop, routing):
    selected = routings()[routing]
    run = compiled(loop)
    assert_close_to_eager(loop, run.call, selected, inputs_for(selected))
    assert_grouped(run)
    assert count(run.graph, torch._C._nn.one_hot) == 0
    assert run.session.capture_events == []


def test_sentinel_ids_add_nothing():
    selected = routings()["spread"].clone()
    selected[0], selected[3, 1] = EXPERTS, EXPERTS
    run = compiled(loop_h5)
    assert_close_to_eager(loop_h5, run.call, selected, inputs_for(selected))
    assert_grouped(run)


@pytest.mark.parametrize("loop", [loop_h5, loop_g])
def test_without_tokens_nothing_needs_a_gradient(loop):
    """Eager visits no expert then; what nothing was added to depends on nothing."""
    selected = torch.zeros(0, TOP_K, dtype=torch.int64)
    inputs = inputs_for(selected)
    run = compiled(loop, fullgraph=False)
    arguments = (inputs[0], selected, *inputs[1:])
    assert loop(*arguments).requires_grad == run.call(*arguments).requires_grad


def test_another_routing_of_the_same_graph():
    run = compiled(loop_h5)
    for routing in ("spread", "all to one expert", "one expert empty"):
        selected = routings()[routing]
        assert_close_to_eager(loop_h5, run.call, selected, inputs_for(selected))
    assert len(run.graphs) == 1


def test_under_checkpointing():
    def loop(x, selected, *rest):
        return torch.utils.checkpoint.checkpoint(loop_h5, x.sin(), selected, *rest, use_reentrant=False).sin()

    selected = routings()["one expert empty"]
    run = compiled(loop)
    assert_close_to_eager(loop, run.call, selected, inputs_for(selected))
    assert_grouped(run)


def rows_for(x, token, gate_up, expert):
    return F.linear(x[token], gate_up[expert, :WIDTH])


def counts_its_iterations(x, selected, weights, gate_up, down):
    mask = F.one_hot(selected, num_classes=EXPERTS).permute(2, 1, 0)
    out, iterations = torch.zeros_like(x), 0
    for expert in hits_of(mask):
        expert = expert[0]
        _, token = torch.where(mask[expert])
        out.index_add_(0, token, rows_for(x, token, gate_up, expert))
        iterations += 1
    return out * iterations


def counts_in_a_list(x, selected, weights, gate_up, down):
    mask = F.one_hot(selected, num_classes=EXPERTS).permute(2, 1, 0)
    out, seen = torch.zeros_like(x), []
    for expert in hits_of(mask):
        expert = expert[0]
        _, token = torch.where(mask[expert])
        out.index_add_(0, token, rows_for(x, token, gate_up, expert))
        seen.append(1)
    return out * len(seen)


class Counter:
    calls = 0


def counts_in_an_attribute(x, selected, weights, gate_up, down):
    counter = Counter()
    mask = F.one_hot(selected, num_classes=EXPERTS).permute(2, 1, 0)
    out = torch.zeros_like(x)
    for expert in hits_of(mask):
        expert = expert[0]
        _, token = torch.where(mask[expert])
        out.index_add_(0, token, add_and_count(counter, rows_for(x, token, gate_up, expert)))
    return out * counter.calls


def add_and_count(counter, rows):
    counter.calls += 1
    return rows


def adds_one_for_each_iteration(x, selected, weights, gate_up, down):
    mask = F.one_hot(selected, num_classes=EXPERTS).permute(2, 1, 0)
    out, total = torch.zeros_like(x), torch.zeros(())
    for expert in hits_of(mask):
        expert = expert[0]
        _, token = torch.where(mask[expert])
        out.index_add_(0, token, rows_for(x, token, gate_up, expert))
        total.add_(1)
    return out * total


def numbers_its_iterations(x, selected, weights, gate_up, down):
    mask = F.one_hot(selected, num_classes=EXPERTS).permute(2, 1, 0)
    out = torch.zeros_like(x)
    for number, expert in enumerate(hits_of(mask)):
        _, token = torch.where(mask[expert[0]])
        out.index_add_(0, token, rows_for(x, token, gate_up, number))
    return out


def stops_at_an_expert(x, selected, weights, gate_up, down):
    mask = F.one_hot(selected, num_classes=EXPERTS).permute(2, 1, 0)
    out = torch.zeros_like(x)
    for expert in hits_of(mask):
        expert = expert[0]
        if expert == 2:
            break
        _, token = torch.where(mask[expert])
        out.index_add_(0, token, rows_for(x, token, gate_up, expert))
    return out


def uses_the_last_expert(x, selected, weights, gate_up, down):
    mask = F.one_hot(selected, num_classes=EXPERTS).permute(2, 1, 0)
    out = torch.zeros_like(x)
    for expert in hits_of(mask):
        number = expert[0]
        _, token = torch.where(mask[number])
        out.index_add_(0, token, rows_for(x, token, gate_up, number))
    return out * gate_up[number, 0, 0]


def visits_experts_of_another_mask(x, selected, weights, gate_up, down):
    mask = F.one_hot(selected, num_classes=EXPERTS).permute(2, 1, 0)
    out = torch.zeros_like(x)
    for expert in hits_of(F.one_hot(selected.clamp(max=1), num_classes=EXPERTS).permute(2, 1, 0)):
        expert = expert[0]
        _, token = torch.where(mask[expert])
        out.index_add_(0, token, rows_for(x, token, gate_up, expert))
    return out


def visits_experts_with_several_rows(x, selected, weights, gate_up, down):
    mask = F.one_hot(selected, num_classes=EXPERTS).permute(2, 1, 0)
    out = torch.zeros_like(x)
    for expert in torch.greater(mask.sum(dim=(-1, -2)), 4).nonzero():
        expert = expert[0]
        _, token = torch.where(mask[expert])
        out.index_add_(0, token, rows_for(x, token, gate_up, expert))
    return out


NEAR_MISSES = [
    counts_its_iterations,
    counts_in_a_list,
    counts_in_an_attribute,
    adds_one_for_each_iteration,
    numbers_its_iterations,
    stops_at_an_expert,
    uses_the_last_expert,
    visits_experts_of_another_mask,
    visits_experts_with_several_rows,
]


@pytest.mark.parametrize("loop", one_in(3, NEAR_MISSES), ids=lambda loop: loop.__name__)
def test_falls_back_to_what_dynamo_does(loop):
    selected = routings()["one expert empty"]
    assert selected.unique().numel() < EXPERTS
    run = compiled(loop, fullgraph=False)
    assert_close_to_eager(loop, run.call, selected, inputs_for(selected))
    without = compile_with_glue(loop, fullgraph=False, passes={"group_experts": False})
    torch._dynamo.reset()
    x, *rest = inputs_for(selected)
    without.call(x, selected, *rest)
    # The first conversion is thrown away; what is kept is what there is without the pass.
    kept = run.graphs[-len(without.graphs) :] if without.graphs else []
    assert [len(g.graph.nodes) for g in kept] == [len(g.graph.nodes) for g in without.graphs]


def test_other_backends_still_break_the_graph():
    selected = routings()["spread"]
    x, *rest = inputs_for(selected)
    compiled(loop_h5).call(x, selected, *rest)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.compile(loop_h5, backend="aot_eager")(x, selected, *rest)
    assert sum(torch._dynamo.utils.counters["graph_break"].values()) > 0


def test_a_module_alone_with_a_dynamic_number_of_tokens():
    """Rows and selected experts are inputs of their own then; the graph holds for equally many of both."""
    run = compiled(loop_h5)
    for tokens in (5, 9, 7):
        selected = torch.rand(tokens, EXPERTS).topk(2, dim=-1).indices
        inputs = inputs_for(selected)
        for tensor in (selected, *inputs[:2]):
            torch._dynamo.mark_dynamic(tensor, 0)
        assert_close_to_eager(loop_h5, run.call, selected, inputs)
    assert len(run.graphs) == 1
    assert_grouped(run)


def test_a_loop_over_other_positions_is_not_traced_for_all():
    """There may be thousands of them, and nothing would be proved."""

    def loop(x):
        total = torch.zeros(())
        for position in (x > 0).nonzero():
            total = total + x[position[0]]
        return total

    run = compile_with_glue(loop, fullgraph=False, passes={"group_experts": True})
    x = torch.randn(50)
    torch.testing.assert_close(run.call(x), loop(x))
    assert not any("GlueSpeculationError" in event.reason for event in run.session.capture_events)
    assert all(len(graph.graph.nodes) < 50 for graph in run.graphs)
