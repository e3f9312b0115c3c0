"""Embeddings whose gradients are summed by torch's kernel, against eager in fp64 and in bf16."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from glue_compiler.ops import embedding as embeddings
from tests.captured import assert_same_bits, compile_with_glue, count

ROWS, WIDTH = 24, 8
IDS = torch.tensor([[3, 0, 3, 23, 7, 3], [1, 1, 3, 2, 0, 5]])
EMBEDDING = torch.ops.glue.embedding.default


def summed(fn, passes=None, **how):
    return compile_with_glue(fn, passes={"sum_embedding_grads": True, **(passes or {})}, **how)


@pytest.fixture
def small_tables(monkeypatch):
    monkeypatch.setattr(embeddings, "pays", lambda weight: weight.shape[0] == ROWS)


def table(dtype=torch.float64):
    return torch.randn(ROWS, WIDTH, dtype=dtype).requires_grad_()


def in_a_checkpoint(weight):
    return checkpoint(lambda weight: F.embedding(IDS, weight).sin(), weight, use_reentrant=False)


SPELLINGS = {
    "functional": lambda w: F.embedding(IDS, w),
    "by name": lambda w: F.embedding(weight=w, input=IDS),
    "operator": lambda w: torch.ops.aten.embedding(w, IDS),
    "overload": lambda w: torch.ops.aten.embedding.default(w, IDS, 3),
    "torch.embedding": lambda w: torch.embedding(w, IDS),
    "int32": lambda w: F.embedding(IDS.int(), w),
    "one id": lambda w: F.embedding(IDS[0, 0], w),
    "no ids": lambda w: F.embedding(IDS[:, :0], w),
    "padding": lambda w: F.embedding(IDS, w, padding_idx=3),
    "padding from the end": lambda w: F.embedding(IDS, w, padding_idx=-1),
    "by frequency": lambda w: F.embedding(IDS, w, scale_grad_by_freq=True),
    "a view": lambda w: F.embedding(IDS, w.t().t()),
    "computed": lambda w: F.embedding(IDS, w * 2),
    "written afterwards": lambda w: F.embedding(IDS, w).mul_(2),
    "of a table of indices": lambda w: F.embedding(IDS, F.embedding(torch.arange(ROWS).flip(0), w)),
    "with the head": lambda w: F.linear(F.embedding(IDS, w), w),
    "in a checkpoint": in_a_checkpoint,
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_the_gradient_is_eagers(name, small_tables):
    run = summed(SPELLINGS[name], fullgraph=True)
    for dtype in (torch.float64, torch.bfloat16):
        assert_same_bits(SPELLINGS[name], run.call, [table(dtype)])
    counts = {p.name: p.counts for graph in run.session.graphs for p in graph.passes}
    assert counts["sum_embedding_grads"]["embeddings"] == 1 + (name == "of a table of indices")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["functional", "padding", "by frequency", "with the head", "in a checkpoint"])
def test_under_inductor(name, small_tables):
    run = summed(SPELLINGS[name], compiler="inductor")
    weight = table(torch.float32)
    found, wanted = (torch.autograd.grad(fn(weight).square().sum(), weight)[0] for fn in (run.call, SPELLINGS[name]))
    torch.testing.assert_close(found, wanted)
    assert found.stride() == wanted.stride()


def test_lengths_that_vary(small_tables):
    def step(weight, ids):
        return F.embedding(ids, weight).sin()

    run = summed(step, dynamic=True)
    for length in (5, 1, 0, 12):
        ids = torch.randint(ROWS, (2, length))
        weight = table()
        found, wanted = (torch.autograd.grad(fn(weight, ids).sum(), weight)[0] for fn in (run.call, step))
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def renormalised(weight):
    return F.embedding(IDS, weight, max_norm=0.5)


def without_gradients(weight):
    with torch.no_grad():
        rows = F.embedding(IDS, weight)
    return rows * weight.sum()


LEFT = {
    "sparse": (lambda w: F.embedding(IDS, w, sparse=True).sum(), True),
    "not trained": (lambda w: F.embedding(IDS, w.detach()) * w.sum(), False),
    "without gradients": (without_gradients, False),
    "indexed": (lambda w: w[IDS], False),
    "another table": (lambda w: F.embedding(IDS.clamp(max=3), w[:4]), False),
    "renormalised": (renormalised, True),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_alone(name, small_tables):
    fn, is_reported = LEFT[name]
    run = summed(fn, fullgraph=False, eager=name in ("sparse", "renormalised"))
    run.call(table())
    reports = [p for graph in run.session.graphs for p in graph.passes if p.name == "sum_embedding_grads"]
    assert sum(count(graph, EMBEDDING) for graph in run.graphs) == 0
    assert any(skip.reason for p in reports for skip in p.skips) == is_reported


def test_small_tables_and_other_devices_are_left_alone():
    run = summed(SPELLINGS["functional"])
    run.call(table(torch.bfloat16))
    assert count(run.graph, EMBEDDING) == 0


def test_each_embedding_takes_fuel_and_the_pass_can_be_switched_off(small_tables):
    def two(one, other):
        return F.embedding(IDS, one) + F.embedding(IDS, other)

    for how, expected in (({"fuel": 1}, 1), ({"passes": {"sum_embedding_grads": False}}, 0), ({}, 2)):
        run = summed(two, **how)
        run.call(table(), table())
        assert count(run.graph, EMBEDDING) == expected


def test_a_module_that_is_trained_twice_between_updates(small_tables):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.frozen = nn.Embedding(ROWS, WIDTH), nn.Embedding(ROWS, WIDTH).requires_grad_(False)

        def forward(self, ids):
            return (self.table(ids) * self.frozen(ids)).sum()

    torch.manual_seed(0)
    model = Model()
    run = summed(model)
    grads = []
    for call in (run.call, model):
        model.zero_grad()
        for ids in (IDS, IDS.flip(1)):
            call(ids).backward()
        grads.append(model.table.weight.grad)
        assert model.frozen.weight.grad is None
    torch.testing.assert_close(*grads)
    assert count(run.graph, EMBEDDING) == 1


@pytest.mark.filterwarnings("ignore:glue's dump")  # a nested size is no number
def test_ids_that_are_nested_are_left_alone(small_tables):
    ids = torch.nested.nested_tensor([IDS[0], IDS[1, :2]], layout=torch.jagged)

    def step(weight):
        return F.embedding(ids, weight).sin().values()

    run = summed(step)
    weight = table()
    found, wanted = (torch.autograd.grad(fn(weight).sum(), weight)[0] for fn in (run.call, step))
    torch.testing.assert_close(found, wanted)
    assert count(run.graph, EMBEDDING) == 0


def test_gradients_that_are_wrapped_reach_torchs_own_operator(small_tables):
    scale = TwoTensor(torch.randn(2, 6, WIDTH, dtype=torch.float64), torch.randn(2, 6, WIDTH, dtype=torch.float64))

    def step(weight):
        return F.embedding(IDS, weight) * scale

    run = summed(step)
    weight = table()
    found, wanted = (torch.autograd.grad(fn(weight).sum(), weight)[0] for fn in (run.call, step))
    assert torch.equal(found.a, wanted.a)
    assert torch.equal(found.b, wanted.b)
    assert count(run.graph, EMBEDDING) == 1
