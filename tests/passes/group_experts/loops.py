"""Loops over experts as models write them, routings to try them with, and how they are compared with eager."""

from __future__ import annotations

import re

import torch
import torch.nn.functional as F

from tests.captured import Run, compile_with_glue, count, result_and_gradients

WIDTH, INNER, EXPERTS, TOP_K = 8, 6, 4, 2
NONZERO = (torch.where, torch.nonzero, "nonzero", torch.ops.aten.nonzero.default)


def stacked_weights(experts=EXPERTS, dtype=torch.float64):
    gate_up = torch.randn(experts, 2 * INNER, WIDTH, dtype=dtype)
    return [gate_up, torch.randn(experts, WIDTH, INNER, dtype=dtype)]


def inputs_for(selected, experts=EXPERTS, dtype=torch.float64):
    """[x, slot weights, gate_up, down], all needing gradients."""
    tokens = selected.shape[0]
    tensors = [torch.randn(tokens, WIDTH, dtype=dtype), torch.rand(selected.shape, dtype=dtype)]
    return [tensor.requires_grad_() for tensor in (*tensors, *stacked_weights(experts, dtype))]


def loop_r(x, selected, weights, gate_up, down):
    """Mixtral of transformers 4.51, with stacked weights."""
    out = torch.zeros((x.shape[0], x.shape[1]), dtype=x.dtype, device=x.device)
    mask = F.one_hot(selected, num_classes=gate_up.shape[0]).permute(2, 1, 0)
    for expert in range(gate_up.shape[0]):
        slot, token = torch.where(mask[expert])
        rows = x[None, token].reshape(-1, x.shape[1])
        gate, up = F.linear(rows, gate_up[expert]).chunk(2, dim=-1)
        rows = F.linear(F.silu(gate) * up, down[expert]) * weights[token, slot, None]
        out.index_add_(0, token, rows.to(x.dtype))
    return out


def routings(experts=EXPERTS, top_k=TOP_K):
    """Name → selected experts ``[tokens, top_k]``."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.rand(11, experts, generator=generator).topk(top_k, dim=-1).indices
    return {
        "spread": spread,
        "one expert empty": torch.where(spread == 1, 0, spread),
        "all to one expert": torch.full_like(spread, experts - 1),
        "an expert twice in a token": torch.tensor([[0] * top_k, [1] * top_k, [0] * (top_k - 1) + [2]]),
        "one token": spread[:1],
    }


def compiled(loop, **options) -> Run:
    return compile_with_glue(loop, passes={"group_experts": True}, **options)


def assert_close_to_eager(loop, call, selected, inputs, **tolerance):
    """Outputs and all gradients."""

    def run(fn):
        return result_and_gradients(lambda *a: fn(a[0], selected, *a[1:]), inputs)

    expected, actual = run(loop), run(call)
    assert len(expected) == len(actual)
    for want, got in zip(expected, actual, strict=True):
        torch.testing.assert_close(got, want, **tolerance)


def assert_grouped(run: Run, loops=1):
    assert run.graphs
    for graph, report in zip(run.graphs, run.session.graphs, strict=True):
        assert count(graph, *NONZERO) == 0, report.passes[0].skips
        assert report.passes[0].counts["loops_grouped"] == loops


def assert_left_alone(run: Run, reason: str, sliced: bool = False):
    """The graph has its loop, and the report says why; ``sliced``: one sort finds the rows of the experts."""
    assert run.report.passes[0].name == "group_experts"
    assert run.report.passes[0].changed == sliced
    assert run.counts == ({"loops_sliced": 1} if sliced else {})
    assert count(run.graph, torch.ops.glue.expert_sort.default) == sliced
    assert count(run.graph, torch.ops.glue.grouped_linear.default, torch.ops.glue.grouped_linear_list.default) == 0
    assert any(re.search(reason, given) for given in run.skip_reasons), run.skip_reasons
