"""Loops over experts that cannot be grouped: one sort and one read of the counts find the rows of all experts."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests import versions
from tests.captured import compile_with_glue, count, result_and_gradients
from tests.passes.group_experts.loops import EXPERTS, NONZERO, WIDTH, routings
from tests.slow import slow_but

SORT = torch.ops.glue.expert_sort.default


def unlike_experts():
    """No two have weights of one shape, and one mixes its rows."""
    widths = [3 + i for i in range(EXPERTS)]
    kinds = [nn.GELU(), nn.Tanh(), nn.Softmax(dim=0), nn.SiLU()]
    return nn.ModuleList(
        nn.Sequential(nn.Linear(WIDTH, n, dtype=torch.float64), kind, nn.Linear(n, WIDTH, dtype=torch.float64))
        for n, kind in zip(widths, kinds, strict=True)
    )


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = unlike_experts()

    def forward(self, x, selected, weights):
        out = torch.zeros_like(x)
        mask = F.one_hot(selected, num_classes=EXPERTS).permute(2, 1, 0)
        for e, expert in enumerate(self.experts):
            slot, token = torch.where(mask[e])
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out


class Checkpointed(Layer):
    def forward(self, x, selected, weights):
        return checkpoint(super().forward, x, selected, weights, use_reentrant=False)


class ByComparison(Layer):
    """Slots of no expert, a column of ``nonzero``, and experts from the second on."""

    def forward(self, x, selected, weights):
        out = torch.zeros_like(x)
        for e in range(1, EXPERTS):
            found = torch.nonzero(selected == e)
            token, slot = found[:, 0], found[:, 1]
            out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        return out


class Twice(Layer):
    """Two loops over one routing."""

    def forward(self, x, selected, weights):
        return super().forward(super().forward(x, selected, weights), selected, weights)


def row_by_row():
    return nn.ModuleList(
        nn.Sequential(nn.Linear(WIDTH, 3 + i, dtype=torch.float64), nn.SiLU(), nn.Linear(3 + i, WIDTH).double())
        for i in range(EXPERTS)
    )


class SkipsTheEmpty(Layer):
    def __init__(self, experts):
        super().__init__()
        self.experts = experts

    def forward(self, x, selected, weights):
        out = torch.zeros_like(x)
        mask = F.one_hot(selected, num_classes=EXPERTS).permute(2, 1, 0)
        for e in range(EXPERTS):
            slot, token = torch.where(mask[e])
            if token.numel() == 0:
                continue
            out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        return out


class VisitsHits(SkipsTheEmpty):
    def forward(self, x, selected, weights):
        out = torch.zeros_like(x)
        mask = F.one_hot(selected, num_classes=EXPERTS).permute(2, 1, 0)
        for hit in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            slot, token = torch.where(mask[hit].squeeze(0))
            out.index_add_(0, token, self.experts[hit](x[token]) * weights[token, slot, None])
        return out


def assert_same_bits(model, call, selected):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(selected.shape[0], WIDTH, dtype=torch.float64, generator=generator).requires_grad_()
    weights = torch.rand(selected.shape, dtype=torch.float64, generator=generator).requires_grad_()
    results = []
    for each in (model, call):
        model.zero_grad()
        found = result_and_gradients(lambda a, b, each=each: each(a, selected, b), [x, weights])
        results.append(found + [p.grad for p in model.parameters() if p.grad is not None])
    assert len(results[0]) == len(results[1])
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def assert_sliced(run, loops=1):
    for graph, report in zip(run.graphs, run.session.graphs, strict=True):
        assert report.passes[0].counts == {"loops_sliced": loops}
        assert count(graph, *NONZERO) == 0
        assert count(graph, SORT) == loops


@pytest.mark.parametrize("routing", slow_but(("spread", "one expert empty"), routings()))
def test_experts_of_different_shapes(routing):
    model = Layer()
    run = compile_with_glue(model, passes={"group_experts": True})
    assert_same_bits(model, run.call, routings()[routing])
    assert_sliced(run)
    assert any("differ" in reason for reason in run.skip_reasons)  # why they are not grouped


@pytest.mark.parametrize("selected", [torch.tensor([[7, 1], [2, -1], [3, 3]]), torch.full((3, 2), 9)])
def test_sentinels_are_in_no_slice(selected):
    model = ByComparison()
    run = compile_with_glue(model, passes={"group_experts": True})
    assert_same_bits(model, run.call, selected)
    assert_sliced(run)


@pytest.mark.slow
def test_two_loops_over_one_routing():
    model = Twice()
    run = compile_with_glue(model, passes={"group_experts": True})
    assert_same_bits(model, run.call, routings()["spread"])
    assert_sliced(run, loops=2)


@pytest.mark.slow
def test_dynamic_token_counts():
    model = Layer()
    run = compile_with_glue(model, dynamic=True, passes={"group_experts": True})
    for routing in ("spread", "an expert twice in a token"):
        assert_same_bits(model, run.call, routings()[routing])
    assert len(run.graphs) == 1
    assert_sliced(run)


@pytest.mark.parametrize("how", ["indices", "mask"])
def test_a_mask_of_tokens_and_slots_is_no_vector_of_indices(how):
    """Of two experts and two slots: as many tokens as the mask has for each would be all rows."""

    def sums(weights, selected):
        masks = [selected == e for e in range(2)]
        rows = masks if how == "mask" else [torch.nonzero(mask, as_tuple=True) for mask in masks]
        return torch.stack([weights[each].sin().sum() for each in rows])

    run = compile_with_glue(sums, dynamic=True, passes={"group_experts": True})
    weights, selected = torch.rand(5, 2, dtype=torch.float64), torch.tensor([[0, 1], [1, 1], [2, 0], [0, 0], [1, 2]])
    torch.testing.assert_close(run.call(weights, selected), sums(weights, selected), rtol=0, atol=0)
    assert run.counts == ({"loops_sliced": 1} if how == "indices" else {})


@versions.NUMBERS_IN_CHECKPOINTS.mark
def test_under_checkpointing():
    model = Checkpointed()
    run = compile_with_glue(model, passes={"group_experts": True})
    assert_same_bits(model, run.call, routings()["one expert empty"])
    assert_sliced(run)


@pytest.mark.slow
def test_inductor_takes_the_graph():
    model = Layer()
    run = compile_with_glue(model, passes={"group_experts": True}, compiler="inductor")
    selected = routings()["one expert empty"]
    x = torch.randn(selected.shape[0], WIDTH, dtype=torch.float64)
    weights = torch.rand(selected.shape, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(run.call(x, selected, weights), model(x, selected, weights))
    assert_sliced(run)


@pytest.mark.parametrize("kind", [SkipsTheEmpty, VisitsHits])
def test_code_that_only_runs_for_experts_with_rows(kind):
    """Proved for each expert by itself: its body is row by row."""
    model = kind(row_by_row())
    run = compile_with_glue(model, passes={"group_experts": True})
    selected = torch.tensor([[0, 2], [2, 3], [0, 3]])  # in eager, no gradient for an expert without rows
    x = torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(3, 2, dtype=torch.float64, requires_grad=True)
    results = []
    for call in (model, run.call):
        model.zero_grad()
        found = result_and_gradients(lambda a, b, call=call: call(a, selected, b), [x, weights])
        results.append(found + [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()])
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert_sliced(run)


@pytest.mark.slow
def test_a_body_that_mixes_rows_is_not_run_without_any():
    """A mean over no rows is not a number, and its gradient would reach what experts share."""
    model = SkipsTheEmpty(unlike_experts())
    run = compile_with_glue(model, fullgraph=False, passes={"group_experts": True})
    selected = torch.tensor([[0, 1], [1, 3]])
    x, weights = torch.randn(2, WIDTH, dtype=torch.float64), torch.rand(2, 2, dtype=torch.float64)
    torch.testing.assert_close(run.call(x, selected, weights), model(x, selected, weights))
    assert run.session.capture_events[0].retried
