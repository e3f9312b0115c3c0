"""First compiles in several threads at once."""

import functools
import json
import threading

import pytest
import torch

from glue_compiler.ops.batch_memo import BatchMemo
from tests import versions
from tests.passes.hoist_metadata.test_one_graph import packed_layer, positions_of
from tests.slow import slow_but

THREADS = 4


class Packed(torch.nn.Module):
    positions = positions_of(2, 10)

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4, dtype=torch.float64))

    def forward(self, x):
        return packed_layer(x, self.positions, self.weight)


class PackedTwice(Packed):
    def forward(self, x):
        return super().forward(super().forward(x).sin())


class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.router = torch.nn.Linear(4, 3).double()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(4, 4).double() for _ in range(3))

    def forward(self, x):
        weights, selected = self.router(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, slot = torch.where(selected == i)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(4, 12).double()

    def forward(self, x):
        q, k, v = (part.view(1, 1, 12, 4) for part in self.project(x).chunk(3, -1))
        mask = torch.ones(12, 12, dtype=torch.bool).tril()
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)[0, 0]


KINDS = (Packed, PackedTwice, Experts, Attention)


def outcome(call, model, x):
    model.zero_grad()
    x = x.clone().requires_grad_()
    out = call(x)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(parameter.grad.clone() for parameter in model.parameters())]


def at_once(works):
    """Runs the functions in threads that start together; their results. Raises what one of them raises."""
    start, results, failures = threading.Barrier(len(works)), [None] * len(works), []

    def run(i):
        start.wait()
        try:
            results[i] = works[i]()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results


def rewritten(folder):
    """What changed each graph, without their order."""
    graphs = json.loads((folder / "summary.json").read_text())["graphs"]
    return sorted([p["name"] for p in graph["passes"] if p["changed"]] for graph in graphs)


@versions.FAKE_TENSORS_IN_THREADS.mark
@pytest.mark.parametrize("seed", slow_but((0,), range(2)))
def test_four_models_that_are_compiled_for_the_first_time_at_once(tmp_path, seed):
    torch.manual_seed(seed)
    x = torch.randn(12, 4, dtype=torch.float64)
    models = [kind() for kind in KINDS]
    expected = [outcome(model, model, x) for model in models]

    def works(folder):
        options = {"compiler": "aot_eager", "strict": True, "dump": str(folder)}
        calls = [torch.compile(model, backend="glue", options=options) for model in models]
        return [functools.partial(outcome, call, model, x) for call, model in zip(calls, models, strict=True)]

    flags = torch._dynamo.config.get_config_copy()
    results = at_once(works(tmp_path / "at_once"))
    assert torch._dynamo.config.get_config_copy() == flags
    for got, want in zip(results, expected, strict=True):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)
    torch._dynamo.reset()
    for work in works(tmp_path / "in_turn"):
        work()
    assert rewritten(tmp_path / "at_once") == rewritten(tmp_path / "in_turn")
    assert all(rewritten(tmp_path / "in_turn"))


@versions.FAKE_TENSORS_IN_THREADS.mark
def test_one_model_that_four_threads_call_for_the_first_time():
    model = Packed()
    xs = [torch.randn(12, 4, dtype=torch.float64) for _ in range(THREADS)]
    call = torch.compile(model, backend="glue", options={"compiler": "aot_eager", "strict": True})
    with torch.no_grad():
        for got, x in zip(at_once([functools.partial(call, x) for x in xs]), xs, strict=True):
            torch.testing.assert_close(got, model(x))


def test_prologues_that_threads_ask_for_at_once_are_one():
    memo = BatchMemo()
    found = at_once([lambda: [memo.results_of(key) for key in range(200)]] * THREADS)
    assert all(all(a is b for a, b in zip(found[0], other, strict=True)) for other in found)
