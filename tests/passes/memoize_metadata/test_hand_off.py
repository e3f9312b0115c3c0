"""How the two parts are compiled, shown, and put back when something fails."""

import json

import pytest
import torch

import glue_compiler
from glue_compiler.backend import GlueBackend
from glue_compiler.errors import GlueWarning
from glue_compiler.passes import memoize_metadata
from tests.captured import compile_with_glue
from tests.passes.hoist_metadata.test_one_graph import packed_layer, positions_of


def inputs():
    return torch.randn(12, 4, dtype=torch.float64), positions_of(5, 7), torch.randn(4, 4, dtype=torch.float64)


def test_results_do_not_live_in_memory_of_a_cuda_graph():
    """Its next replay would write over them."""
    seen = []

    def hand_off(gm, example_inputs, options, uuid):
        seen.append(options.inductor.get("triton.cudagraphs"))
        return gm.forward

    torch.compile(packed_layer, backend=GlueBackend(hand_off=hand_off), mode="reduce-overhead")(*inputs())
    assert seen == [False, True]


def test_one_prologue_in_different_graphs_has_one_key_and_another_constant_has_another():
    def other(x, positions, weight):
        return packed_layer(x.sin(), positions, weight) + 1

    def window(x, positions, weight):
        return packed_layer(x, positions * 2, weight)

    keys = []
    for fn in (packed_layer, other, window):
        run = compile_with_glue(fn, passes={"memoize_metadata": True})
        run.call(*inputs())
        keys.append(run.session.graphs[0].passes[-1].prologue.key)
    assert keys[0] == keys[1]
    assert keys[0] != keys[2]


def test_a_failure_in_the_middle_restores_the_graph(monkeypatch):
    def fail(*args):
        raise RuntimeError("planned")

    monkeypatch.setattr("glue_compiler.passes.memoize_metadata.rewrite._copy_before_use", fail)

    def fn(x, positions):
        starts = torch.nonzero(positions == 0)
        return x * starts.shape[0], starts

    run, (x, positions, _) = compile_with_glue(fn, strict=False, passes={"memoize_metadata": True}), inputs()
    with pytest.warns(GlueWarning, match=f"{memoize_metadata.MemoizeMetadata.name} failed .RuntimeError: planned"):
        got = run.call(x, positions)
    for a, b in zip(got, fn(x, positions), strict=True):
        assert torch.equal(a, b)
    assert len(run.graphs) == 1


def test_the_prologue_is_dumped_and_runs_alone(tmp_path):
    options = {"compiler": "aot_eager", "dump": str(tmp_path)}
    torch.compile(packed_layer, backend="glue", options=options)(*inputs())
    (text,) = [path.read_text() for path in tmp_path.rglob("*memoize_metadata.prologue.py")]
    assert "nonzero" in text
    exec(compile(text, "prologue", "exec"), {"__name__": "__main__"})
    (graph,) = json.loads((tmp_path / "summary.json").read_text())["graphs"]
    assert [sync["once_per_batch"] for sync in graph["host_syncs"]] == [True, True]


def test_explain_tells_what_runs_once_per_batch():
    assert str(glue_compiler.explain(packed_layer, *inputs())).count("host sync once per batch: ") == 2
