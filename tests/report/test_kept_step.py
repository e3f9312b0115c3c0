"""What passes over a training step report is stored with the compiled step, and told when a cache has it."""

import dataclasses
import json

import pytest
import torch
from torch._inductor import config
from torch._inductor.utils import fresh_cache

from glue_compiler.backend import glue
from glue_compiler.compat import step_records
from glue_compiler.errors import GlueWarning
from glue_compiler.fuel import Rewrite, RewriteCounter
from glue_compiler.graph_pass import Numerics, PairPass, PassResult, Skip, Stage
from glue_compiler.options import GlueOptions
from glue_compiler.pipeline import PassReport, Pipeline
from glue_compiler.report import kept_step
from glue_compiler.report.kept_step import KeptStep, ShownPass, StepMemory, origins
from glue_compiler.testing import capture


def report(name, *numbers):
    rewrites = tuple(Rewrite(number, f"rewrite {number}") for number in numbers)
    skips = (Skip("too small", "mm", "model.py:3 in forward"),)
    return PassReport(name, Stage.PARTITIONED, Numerics.CLOSE, bool(numbers), {"done": 2}, skips, rewrites, 1.5)


def step():
    text = "graph between the two" * 10**4
    first = ShownPass(report("first", 4, 5), {"before": "graph", "after": text})
    return KeptStep((first, ShownPass(report("second", 6), {"before": text, "after": "graph"})))


def test_a_step_is_read_back_and_a_text_is_stored_once():
    assert KeptStep.from_bytes(step().to_bytes()) == step()
    one_pass = KeptStep(step().passes[:1])
    assert len(step().to_bytes()) < len(one_pass.to_bytes()) + 500


def test_rewrites_go_on_from_where_this_process_is():
    counter = RewriteCounter(10)
    numbered = step().numbered(counter)
    assert [r.number for each in numbered.passes for r in each.report.rewrites] == [11, 12, 13]
    assert numbered.passes[0].report.rewrites[1].what == "rewrite 5"
    assert counter.count == 13


@pytest.mark.parametrize("record", [None, b"", b"no record", step().to_bytes()[:-9]])
def test_what_cannot_be_read_is_told_to_nobody(record):
    counter = RewriteCounter()
    memory = StepMemory(lambda: None, None, counter)  # an observer that is told anything raises
    assert not memory.restore(record)
    assert counter.count == 0


def test_a_step_of_which_not_all_is_known_is_not_stored():
    assert StepMemory(lambda: None, None, RewriteCounter()).record() is None


def test_a_step_that_a_pass_failed_on_is_not_stored():
    """So that a process that takes it from a cache is warned, too, or raises."""
    failed = dataclasses.replace(step().passes[0].report, error="no")
    with_failure = KeptStep((*step().passes, ShownPass(failed, {})))
    assert StepMemory(lambda: with_failure, None, RewriteCounter()).record() is None
    assert StepMemory(step, None, RewriteCounter()).record() is not None


def test_a_report_that_cannot_be_stored_is_a_warning():
    counts = dataclasses.replace(step().passes[0].report, counts={"of": lambda: None})
    with pytest.warns(GlueWarning, match="compiled in each process"):
        assert StepMemory(lambda: KeptStep((ShownPass(counts, {}),)), None, RewriteCounter()).record() is None


def test_a_strict_compile_takes_nothing_that_a_pass_may_have_failed_on():
    keys = {Pipeline([Counted()], GlueOptions(strict=strict)).uuid() for strict in (False, True)}
    assert len(keys) == 2
    assert None not in keys


def test_origins_are_lines_and_layers():
    def fn(x):
        return torch.sin(x)

    def other(x):
        return torch.sin(x)

    x = torch.ones(2)
    (one,), (again,), (elsewhere,) = capture(fn, x), capture(fn, x), capture(other, x)
    assert origins(one) == origins(again) != origins(elsewhere)


class Counted(PairPass):
    """Changes nothing and says that it did, so that a dump shows the graphs."""

    name, numerics = "counted", Numerics.BITWISE

    def run_pair(self, pair, context):
        context.fuel.take("count")
        count = len(pair.forward.graph.nodes)
        return PassResult(changed=True, counts={"nodes": count}, skips=(Skip("left alone"),), drawing={"nodes": count})


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Compile and train in a new Dynamo with the caches of before; (report, hits so far)."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "caches"))
    before = torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"]

    def train():
        torch.compiler.reset()
        x = torch.ones(3, 3, requires_grad=True)
        options = {"dump": str(tmp_path / "dump"), "extra_passes": [Counted]}
        # A product needs no compiler's kernel, which would take most of the time.
        torch.compile(torch.mm, backend="glue", options=options)(x, torch.ones(3, 3)).sum().backward()
        torch.testing.assert_close(x.grad, torch.full((3, 3), 3.0))
        found = json.loads((tmp_path / "dump" / "summary.json").read_text())["graphs"][-1]
        found["text"] = (tmp_path / "dump" / f"graph_{found['id']:03d}" / "01_counted.after.py").read_text()
        return found, torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"] - before

    with fresh_cache(), config.patch(force_disable_caches=False):
        yield train


def told(graph):
    return [{**each, "ms": None} for each in graph["passes"]], graph["text"]


def test_a_hit_reports_what_the_compile_reported(train):
    first, hits = train()
    assert (first["from_cache"], hits) == (False, 0)
    again, hits = train()
    assert (again["from_cache"], hits) == (True, 1)
    assert told(again) == told(first)
    assert again["passes"][-1]["counts"]["nodes"] > 2
    assert glue.rewrites.count == again["passes"][-1]["rewrites"][-1]["number"]


@pytest.mark.parametrize("damage", ["attach", "from_bytes"])
def test_a_hit_without_its_report_is_compiled_again(train, monkeypatch, damage):
    def fails(*_):
        raise ValueError("damaged")

    with monkeypatch.context() as patch:
        if damage == "attach":
            patch.setattr(step_records, "attach", lambda *_: None)
        first, _ = train()
    if damage == "from_bytes":
        monkeypatch.setattr(kept_step.KeptStep, "from_bytes", fails)
    again, hits = train()
    assert (again["from_cache"], hits) == (False, 1)
    assert told(again) == told(first)
