"""Compiled graphs call the kernels of glue's operators without what surrounds them in eager code."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._inductor.utils import run_and_get_code

import glue_compiler.ops  # noqa: F401  registers torch.ops.glue
from glue_compiler.ops.opaque import call_directly

glue = torch.ops.glue


def sorted_rows(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    order, inverse, _, offsets = glue.expert_sort(ids, 3)
    rows = glue.expert_gather(x, order, inverse, offsets, 2)
    return glue.expert_combine(rows.sin(), order, inverse, offsets, 2)


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(5, 4, dtype=torch.float64, requires_grad=True), torch.randint(0, 4, (5, 2))


def in_both_directions(function):
    x, ids = operands()
    out, code = run_and_get_code(function, x, ids)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    want = sorted_rows(x, ids)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(gradient, torch.autograd.grad(want.sum(), x)[0])
    return "".join(code)


@pytest.mark.slow
def test_neither_direction_calls_what_eager_calls():
    code = in_both_directions(torch.compile(sorted_rows, backend="glue", fullgraph=True))
    assert "glue_direct.expert_sort" in code
    assert "glue_direct.expert_gather" in code
    assert "torch.ops.glue.expert" not in code


def test_inductor_alone_calls_what_eager_calls():
    torch._dynamo.reset()
    code = in_both_directions(torch.compile(sorted_rows, fullgraph=True))
    assert "torch.ops.glue.expert_gather" in code
    assert "glue_direct" not in code


def test_a_pass_of_the_users_runs_first():
    seen = []

    def look(graph: fx.Graph) -> None:
        seen.extend(str(node.target) for node in graph.nodes if "glue" in str(node.target))

    options = {"post_grad_custom_pre_pass": look}
    in_both_directions(torch.compile(sorted_rows, backend="glue", fullgraph=True, options=options))
    assert "glue.expert_gather.default" in seen
    assert not [name for name in seen if "glue_direct" in name]


@pytest.mark.parametrize("name", ["expert_sort", "grouped_linear_list", "linear_cross_entropy", "varlen_attention"])
def test_both_take_and_give_the_same(name):
    whole, direct = getattr(glue, name).default, getattr(torch.ops.glue_direct, name).default
    assert str(whole._schema).split("::")[1] == str(direct._schema).split("::")[1]
    assert whole.tags == direct.tags


def test_composites_and_the_operators_of_others_stay():
    graph = fx.Graph()
    x = graph.placeholder("x")
    targets = [glue.document_offsets.default, torch.ops.aten.sin.default]
    called = [graph.call_function(target, (x,)) for target in targets]
    call_directly(graph)
    assert [node.target for node in called] == targets
