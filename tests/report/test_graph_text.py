"""Dumped graph files are read back node by node, and two versions are aligned by node."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import fx

from glue_compiler.compat.layers import layer_of
from glue_compiler.report.alignment import Row, align, align_graphs
from glue_compiler.report.graph_text import DumpError, GraphText, NodeLine, read_graphs
from glue_compiler.report.page_data import page_data, short_source
from glue_compiler.report.recorded import read_folder
from glue_compiler.report.transfers import find_transfers, layer_root
from tests.passes.overlap_offload.models import Blocks, step
from tests.report.test_dump import compile_and_call


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.up(x) * (x > 0).cumsum(0)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(), Layer()])

    def forward(self, x):
        kept = x
        for layer in self.layers:
            x = layer(x) + (kept > 0).cumsum(0)
        return x


@pytest.fixture
def dumped(tmp_path):
    compile_and_call(Model(), tmp_path, torch.randn(3, 4))
    return read_folder(tmp_path)


@pytest.fixture
def offloaded(tmp_path):
    options = {"compiler": "aot_eager", "dump": str(tmp_path), "offload": "checkpoints"}
    model = Blocks(4)
    step(torch.compile(model, backend="glue", options=options), model, torch.randn(4, 8))
    return read_folder(tmp_path)


def hoist(recorded):
    return next(p for p in recorded.graphs[0].passes if p.name == "hoist_metadata")


def node(name, text="f(x)", **rest):
    return NodeLine(name, text, **rest)


def test_every_node_is_read_with_shape_source_and_layer(dumped):
    (graph,) = hoist(dumped).graphs("before")
    assert graph.name == "graph"
    linears = [n for n in graph.nodes if "linear(" in n.text]
    assert [n.layer for n in linears] == ["layers.0.up", "layers.1.up"]
    assert all(n.shape == "f32[3, 4]" for n in linears)
    cumsum = next(n for n in graph.nodes if n.text.endswith(".cumsum(0)") and n.layer == "layers.0")
    assert f"{__file__}:" in cumsum.source
    assert cumsum.source.endswith("in forward")
    assert cumsum.code == "return self.up(x) * (x > 0).cumsum(0)"


def test_a_node_outside_of_layers_does_not_inherit_one(dumped):
    (graph,) = hoist(dumped).graphs("before")
    outside = [n for n in graph.nodes if n.code.startswith("x = layer(x) + (kept")]
    assert outside
    assert {n.layer for n in outside} == {""}


def test_as_many_operators_are_read_as_the_summary_counts(dumped):
    data = page_data(dumped)
    (graph,) = data["graphs"]
    changed = next(p for p in graph["passes"] if p["changed"])
    assert changed["nodes"][0] == graph["nodes_before"]


def test_writes_have_the_name_of_their_node():
    text = """
class GraphModule(torch.nn.Module):
    def forward(self, x: "f32[2]", y):
        # File: a.py:3 in f, code: x[0] = y
        x[0] = y;  setitem: "f32[2]" = x;  setitem = None
        add: "f32[2]" = x + 1;  x = None
        return (add,)
"""
    (graph,) = read_graphs(text)
    assert [n.name for n in graph.nodes] == ["x", "y", "setitem", "add", "return"]
    assert graph.nodes[2] == NodeLine("setitem", "x[0] = y", "f32[2]", "a.py:3 in f", "x[0] = y")


def test_bodies_follow_the_graph_that_calls_them():
    text = "\n".join(
        f"class {name}:\n    def forward(self, x):\n        return x" for name in ("b1", "b0", "GraphModule")
    )
    assert [graph.name for graph in read_graphs(text)] == ["graph", "b0", "b1"]


@pytest.mark.parametrize("text", ["x = ", "x = 1", ""])
def test_what_is_no_graph_is_an_error(text):
    with pytest.raises(DumpError, match="no dumped graph"):
        read_graphs(text)


def test_a_training_step_is_a_forward_and_a_backward(offloaded):
    p = offloaded.graphs[0].passes[-1]
    assert [graph.name for graph in p.graphs("after")] == ["forward", "backward"]
    assert "blocks.2.up" in {n.layer for n in p.graphs("after")[1].nodes}


def test_copies_go_from_their_start_to_their_wait(offloaded):
    timeline = find_transfers(offloaded.graphs[0].passes[-1].graphs("after"))
    assert len(timeline.to_host) == len(timeline.from_host) == 3
    assert all(bar.start < bar.end <= timeline.backward for bar in timeline.to_host)
    assert all(timeline.backward <= bar.start < bar.end for bar in timeline.from_host)
    assert all(bar.graph == "backward" for bar in timeline.from_host)
    labels = [bar.label for bar in timeline.compute]
    assert labels.index("blocks.0") < labels.index("blocks.3")


def test_graphs_without_copies_have_no_timeline(offloaded):
    assert find_transfers(offloaded.graphs[0].passes[-1].graphs("before")) is None


@pytest.mark.parametrize(
    ("path", "root"),
    [("model.layers.3.mlp.up", "model.layers.3"), ("layers.0", "layers.0"), ("model.norm", "model.norm"), ("", "")],
)
def test_a_layer_is_a_path_up_to_its_first_number(path, root):
    assert layer_root(path) == root


@pytest.mark.parametrize(
    ("path", "layer"),
    [
        ("L['self'].layers.3.mlp", "layers.3.mlp"),
        ("L['self']._modules['layers']._modules['3'].mlp", "layers.3.mlp"),
        ("L['self'].__dict__['_modules']['layers'].__dict__['_modules']['3']", "layers.3"),
        ("L['self'].layers[3]", "layers.3"),
        ("L['self']", ""),
        ("L['model'].head", "head"),
    ],
)
def test_all_spellings_of_a_layer_are_one(path, layer):
    found = fx.Graph().placeholder("x")
    found.meta["nn_module_stack"] = {"0": (path, torch.nn.Module)}
    assert layer_of(found) == layer


def test_the_page_shows_short_paths(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert short_source("/usr/lib/python3.11/site-packages/torch/nn/f.py:3 in f") == "torch/nn/f.py:3 in f"
    assert short_source(f"{tmp_path}/model.py:3 in f") == "model.py:3 in f"
    assert short_source("/elsewhere/model.py:3 in f") == "/elsewhere/model.py:3 in f"


def test_equal_changed_removed_added_and_moved_nodes():
    before = [node("a"), node("b"), node("c", "g(a)"), node("d"), node("e")]
    after = [node("e"), node("a"), node("c", "g(b)"), node("d"), node("f")]
    assert [
        (row.kind, row.before and row.before.name, row.after and row.after.name) for row in align(before, after)
    ] == [
        ("moved", None, "e"),
        ("same", "a", "a"),
        ("removed", "b", None),
        ("changed", "c", "c"),
        ("same", "d", "d"),
        ("moved", "e", None),
        ("added", None, "f"),
    ]


def test_another_source_line_is_no_change():
    (row,) = align([node("a", source="m.py:1 in f")], [node("a", source="m.py:2 in f")])
    assert row.kind == "same"


def test_another_shape_is_a_change():
    (row,) = align([node("a", shape="f32[2]")], [node("a", shape="f32[3]")])
    assert row.kind == "changed"


def test_a_body_of_one_version_alone_is_all_removed_or_added():
    aligned = align_graphs([GraphText("graph", ()), GraphText("old", (node("a"),))], [GraphText("new", (node("b"),))])
    assert [(graph.name, [row.kind for row in graph.rows]) for graph in aligned] == [
        ("graph", []),
        ("old", ["removed"]),
        ("new", ["added"]),
    ]


names = st.lists(st.integers(0, 12), unique=True, max_size=12)


# A slow machine is no failure.
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(names, names)
def test_alignment_loses_nothing_and_keeps_both_orders(before, after):
    rows = list(align([node(str(n)) for n in before], [node(str(n)) for n in after]))
    assert [int(row.before.name) for row in rows if row.before] == before
    assert [int(row.after.name) for row in rows if row.after] == after
    assert all(row.kind in ("same", "changed") for row in rows if row.before and row.after)
    both = set(before) & set(after)
    assert {int(_name(row)) for row in rows if row.kind == "moved"} <= both
    assert {int(_name(row)) for row in rows if row.kind in ("removed", "added")} == set(before) ^ set(after)


def _name(row: Row) -> str:
    found = row.before or row.after
    assert found is not None
    return found.name


def test_a_folder_without_a_summary_says_how_to_make_one(tmp_path):
    with pytest.raises(DumpError, match="GLUE_DUMP"):
        read_folder(tmp_path)


def test_the_dump_of_a_distributed_job_names_its_ranks(tmp_path):
    (tmp_path / "rank_0").mkdir()
    (tmp_path / "rank_0" / "summary.json").write_text("{}")
    with pytest.raises(DumpError, match="rank_0"):
        read_folder(tmp_path)


def test_a_foreign_summary_is_an_error(tmp_path):
    (tmp_path / "summary.json").write_text(json.dumps({"torch": "2.13"}))
    with pytest.raises(DumpError, match="not a summary of glue"):
        read_folder(tmp_path)
