"""On a card: what its allocator says is what decides."""

from __future__ import annotations

import pytest
import torch

from glue_compiler.backend import GlueBackend
from glue_compiler.report.session import Session
from tests.passes.overlap_offload.models import equal
from tests.replan.steps import QUIET, Plain, results

pytestmark = pytest.mark.gpu
ROWS, WIDTH = 2**14, 64


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def compiled(function, budget):
    session = Session()
    options = {"compiler": "aot_eager", "strict": True, "memory_budget": budget, "passes": QUIET}
    return session, torch.compile(function, backend=GlueBackend(session=session), options=options)


def plans(session):
    return [p.counts for graph in session.graphs for p in graph.passes if p.name == "plan_memory"]


def test_what_is_allocated_beside_the_graph_has_it_planned_again():
    model, x = Plain(6, WIDTH).cuda(), torch.randn(ROWS, WIDTH, device="cuda")
    _, call = compiled(model, 2**40)
    expected = results(call, model, x)
    torch.cuda.reset_peak_memory_stats()
    results(call, model, x)
    budget = int(1.2 * torch.cuda.max_memory_allocated())
    torch._dynamo.reset()
    session, call = compiled(model, budget)
    assert equal(results(call, model, x), expected)
    other = torch.empty(budget // 3, dtype=torch.uint8, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    for _ in range(4):
        assert equal(results(call, model, x), expected)
    first, second = plans(session)
    assert second["peak"] < first["peak"]
    assert "planned again at its next call" in session.graphs[0].replan
    torch.cuda.reset_peak_memory_stats()
    results(call, model, x)
    assert torch.cuda.max_memory_allocated() <= 1.03 * budget
    del other
