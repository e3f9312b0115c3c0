"""explain: what it says, and that it leaves nothing behind."""

import pytest
import torch

import glue_compiler
from glue_compiler import GlueWarning
from glue_compiler.report import recurrent_kernels
from tests.passes.hoist_metadata.test_one_graph import layer_inputs, positions_of, two_layers
from tests.passes.share_layers.models import Layers, ids, layers


def test_it_reports_graphs_rewrites_and_syncs():
    x, *weights = layer_inputs()
    report = glue_compiler.explain(two_layers, x, positions_of(5, 7), *weights)
    (graph,) = report.graphs
    assert {name: n for p in graph.passes for name, n in p.counts.items()}["syncs_removed"] == 2
    assert [sync.target for sync in graph.host_syncs] == ["nonzero", "item"]
    text = str(report)
    assert text.startswith("glue: ")
    assert "(1 graph, no graph breaks, torch" in text.splitlines()[0]
    assert "  hoist_metadata    repeated computations that go: " in text
    assert "Worth here: " in text
    assert "2 waits for the device fewer" in text
    assert "hoist_metadata: " in text
    assert "host sync once per batch: nonzero" in text
    assert "test_one_graph.py" in text


def test_it_reports_graph_breaks_with_reason_and_line():
    def fn(x):
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    report = glue_compiler.explain(fn, torch.ones(2))
    ((reason, source),) = report.graph_breaks
    assert "graph_break" in reason
    assert f"{__file__}:" in source
    assert "ends at a graph break" in str(report)


def test_it_says_why_something_was_left_alone():
    report = glue_compiler.explain(lambda x: (torch.rand_like(x), torch.rand_like(x)), torch.ones(2))
    assert "hoist_metadata: rand_like_1: the same call as 'rand_like', but it draws random numbers" in str(report)


def test_an_equal_reason_is_said_once_with_how_often():
    def fn(x):
        return [torch.rand_like(x) for _ in range(4)]

    text = str(glue_compiler.explain(fn, torch.ones(2)))
    assert text.count("but it draws random numbers") == 1
    assert "hoist_metadata x3: the same call as 'rand_like', but it draws random numbers" in text
    assert "Left: 3 places left as they were" in text


def test_two_reasons_are_said_each():
    def fn(x):
        y = x.cumsum(0)
        x.add_(1)
        return torch.rand_like(x), torch.rand_like(x), y + x.cumsum(0)

    text = str(glue_compiler.explain(fn, torch.ones(2)))
    assert "draws random numbers" in text
    assert "written between" in text


def test_where_nothing_applies_it_says_so():
    text = str(glue_compiler.explain(lambda x: x + 1, torch.ones(2)))
    assert text.startswith("glue: no rewrites apply here")
    assert "Worth" not in text
    assert "Left: nothing" in text


@pytest.mark.slow
def test_it_reports_passes_over_the_forward_and_the_backward_graph(recwarn):
    text = str(glue_compiler.explain(Layers(layers()), ids(), options={"regions": "whole"}))
    assert "share_layers: bodies 2, calls " in text
    text = str(glue_compiler.explain(Layers(layers(3)), ids(), options={"offload": "checkpoints"}))
    assert "overlap_offload: " in text
    assert "nothing to move" in text
    assert ": : " not in text  # a reason that names no node
    assert not [warning for warning in recwarn if issubclass(warning.category, GlueWarning)]


def test_options_count():
    x, *weights = layer_inputs()
    report = glue_compiler.explain(
        two_layers, x, positions_of(12), *weights, options={"passes": {"hoist_metadata": False}}
    )
    assert "hoist_metadata" not in [p.name for p in report.graphs[0].passes]
    with pytest.raises(glue_compiler.GlueOptionError):
        glue_compiler.explain(two_layers, x, positions_of(12), *weights, options={"pases": {}})


def test_nothing_is_left_behind():
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)).double()
    x = layer_inputs()[0]
    state = torch.get_rng_state()
    glue_compiler.explain(module, x)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in module.parameters())


def test_it_uses_up_no_recompiles():
    def fn(x):
        return x + 1

    for _ in range(torch._dynamo.config.recompile_limit + 2):
        assert len(glue_compiler.explain(fn, torch.ones(2)).graphs) == 1
    torch._dynamo.utils.counters.clear()
    torch.compile(fn, backend="glue", options={"compiler": "aot_eager"})(torch.ones(2))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_compiled_model_is_refused():
    with pytest.raises(TypeError, match="torch.compile"):
        glue_compiler.explain(torch.compile(torch.nn.Linear(2, 2)), torch.ones(2))


def test_it_names_the_package_with_kernels_for_a_loop_over_chunks(monkeypatch):
    def fn(x, state):
        for i in range(x.shape[1]):
            state = state.sin() + x[:, i]
        return state

    says = "Faster with kernels than as loops, if the model knows them: flash-linear-attention"
    monkeypatch.setattr(recurrent_kernels, "missing", list)
    text = str(glue_compiler.explain(fn, torch.ones(2, 9), torch.ones(2)))
    assert says in text
    assert "loops over chunks that one graph holds at any length: 1" in text
    monkeypatch.setattr(recurrent_kernels, "missing", lambda packages: [])
    assert says not in str(glue_compiler.explain(fn, torch.ones(2, 9), torch.ones(2)))
    assert says not in str(glue_compiler.explain(lambda x: x.sin(), torch.ones(2)))
