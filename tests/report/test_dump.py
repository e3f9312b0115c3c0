"""Graph dumps: readable, runnable, and a summary that is always complete."""

import contextlib
import gc
import io
import json
import os
import re
import runpy
import subprocess
import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from glue_compiler.report.dump import render_graph
from tests.passes.hoist_metadata.test_checkpoint_bodies import checkpointed
from tests.passes.hoist_metadata.test_one_graph import layer_inputs, packed_layer, positions_of, two_layers

PASS_KEYS = {"name", "stage", "changed", "counts", "skips", "ms"}


def of_hoist_metadata(graph):
    return next(report for report in graph["passes"] if report["name"] == "hoist_metadata")


def compile_and_call(fn, folder, *args, **options):
    torch.compile(fn, backend="glue", options={"compiler": "aot_eager", "dump": str(folder), **options})(*args)
    return json.loads((folder / "summary.json").read_text())


def inputs():
    x, *weights = (tensor.requires_grad_() for tensor in layer_inputs())
    return x, positions_of(5, 7), *weights


def run_file(path):
    return subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=120)


def run_here(path):
    """What ``python path`` prints, without the seconds that a process takes to import torch."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(path), run_name="__main__")
    return printed.getvalue()


def jagged(*lengths):
    rows = [torch.randn(length, 8) for length in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)


@pytest.mark.parametrize("dynamic", [True, None])
def test_a_ragged_size_has_no_number(dynamic, tmp_path):
    def fn(x, weight):
        return torch.nn.functional.linear(x, weight).sin()

    options = {"compiler": "aot_eager", "dump": str(tmp_path)}
    call, weight = torch.compile(fn, backend="glue", dynamic=dynamic, options=options), torch.randn(8, 8)
    for lengths in ((3, 5, 2), (4, 1)):
        x = jagged(*lengths)
        torch.testing.assert_close(call(x, weight).values(), fn(x, weight).values())
    graphs = json.loads((tmp_path / "summary.json").read_text())["graphs"]
    assert graphs
    assert all((tmp_path / f"graph_{graph['id']:03d}" / "00_unchanged.py").exists() for graph in graphs)


def test_the_summary_says_what_was_done(tmp_path):
    summary = compile_and_call(two_layers, tmp_path, *inputs())
    assert summary["torch"] == torch.__version__
    (graph,) = summary["graphs"]
    assert graph["id"] == 0
    assert graph["nodes_after"] < graph["nodes_before"]
    report = of_hoist_metadata(graph)
    assert report.keys() >= PASS_KEYS
    assert (report["name"], report["stage"], report["changed"]) == ("hoist_metadata", "captured", True)
    assert report["counts"]["syncs_removed"] == 2
    assert report["ms"] > 0


def test_skips_have_reason_node_and_source(tmp_path):
    def fn(x):
        return torch.rand_like(x), torch.rand_like(x)

    summary = compile_and_call(fn, tmp_path, torch.ones(3))
    (skip,) = of_hoist_metadata(summary["graphs"][0])["skips"]
    assert "random" in skip["reason"]
    assert skip["node"] == "rand_like_1"
    assert f"{__file__}:" in skip["source"]


@pytest.mark.parametrize("model", [two_layers, checkpointed()], ids=["plain", "checkpointed"])
def test_files_before_and_after_run_and_agree(tmp_path, model):
    compile_and_call(model, tmp_path, *inputs())
    before, after = (tmp_path / f"graph_000/01_hoist_metadata.{moment}.py" for moment in ("before", "after"))
    assert run_here(before) == run_here(after) == "output 0: (12, 4)\n"
    calls = [
        re.findall(r"^ +nonzero\w*: .* = torch.nonzero\(", path.read_text(), re.MULTILINE) for path in (before, after)
    ]
    assert [len(found) for found in calls] == [2, 1]


def test_an_unchanged_graph_is_written_once_and_runs(tmp_path):
    compile_and_call(lambda x: torch.special.i0(x).to(torch.bfloat16) + float("inf"), tmp_path, torch.ones(3))
    (path,) = (tmp_path / "graph_000").iterdir()
    assert path.name == "00_unchanged.py"
    result = run_file(path)  # in a process of its own
    assert result.stdout == "output 0: (3,)\n", result.stderr


def test_constants_in_a_graph_are_in_its_file(tmp_path):
    table = torch.tensor([2.0, 3.0])
    compile_and_call(lambda x: x * table + torch.tensor([1.5, 2.5]), tmp_path, torch.ones(2))
    assert run_here(next((tmp_path / "graph_000").iterdir())) == "output 0: (2,)\n"


def test_dynamic_shapes_are_written_with_the_sizes_seen(tmp_path):
    compiled = torch.compile(
        lambda x: x.reshape(-1) * x.shape[0],
        backend="glue",
        dynamic=True,
        options={"compiler": "aot_eager", "dump": str(tmp_path)},
    )
    compiled(torch.ones(5, 3))
    assert run_here(next((tmp_path / "graph_000").iterdir())) == "output 0: (15,)\n"


def test_graphs_are_numbered_over_the_whole_process(tmp_path):
    def broken(x):
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    summary = compile_and_call(broken, tmp_path, torch.ones(3))
    assert [graph["id"] for graph in summary["graphs"]] == [0, 1]
    assert "graph_break" in summary["graphs"][0]["graph_break"]["reason"]
    summary = compile_and_call(lambda x: x - 1, tmp_path, torch.ones(3))
    assert [graph["id"] for graph in summary["graphs"]] == [0, 1, 2]


def test_the_variable_does_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("GLUE_DUMP", str(tmp_path))
    torch.compile(lambda x: x + 1, backend="glue", options={"compiler": "aot_eager"})(torch.ones(2))
    assert json.loads((tmp_path / "summary.json").read_text())["graphs"]


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_a_complete_summary(tmp_path):
    script = f"""
import os, torch
options = {{"compiler": "aot_eager", "dump": {str(tmp_path)!r}}}
torch.compile(lambda x: x + 1, backend="glue", options=options)(torch.ones(2))
os.kill(os.getpid(), 9)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=120)
    assert result.returncode == -9
    assert len(json.loads((tmp_path / "summary.json").read_text())["graphs"]) == 1


@pytest.mark.slow
def test_the_same_goes_to_torchs_structured_trace(tmp_path):
    script = """
import torch
fn = torch.compile(lambda x: (x.cumsum(0) * 2, x.cumsum(0) * 3), backend="glue", options={"compiler": "aot_eager"})
fn(torch.arange(4))
"""
    environment = {"TORCH_TRACE": str(tmp_path)}
    subprocess.run([sys.executable, "-c", script], env={**os.environ, **environment}, check=True, timeout=120)
    text = "".join(path.read_text() for path in tmp_path.iterdir())
    assert '"name": "glue_passes"' in text
    assert '"name": "glue_hoist_metadata_before"' in text
    assert '"name": "glue_hoist_metadata_after"' in text


def test_a_checkpointed_layer_alone(tmp_path):
    def model(x, positions, weight):
        return checkpoint(packed_layer, x, positions, weight, use_reentrant=False)

    x, positions, weight, _ = inputs()
    summary = compile_and_call(model, tmp_path, x, positions, weight)
    assert of_hoist_metadata(summary["graphs"][0])["counts"]["lifted"] > 0
    assert [sync["target"] for sync in summary["graphs"][0]["host_syncs"]] == ["nonzero", "item"]
    assert all("test_one_graph.py" in sync["source"] for sync in summary["graphs"][0]["host_syncs"])


def test_inputs_that_are_no_tensors(tmp_path):
    """A random generator, as flash attention that is recomputed on a GPU takes, and what no file can make."""
    graph = torch.fx.Graph()
    x, generator, unknown, missing = (graph.placeholder(name) for name in ("x", "generator", "unknown", "missing"))
    for node, value in ((x, torch.empty(3)), (generator, torch.Generator()), (unknown, object()), (missing, None)):
        node.meta["val"] = value
    drawn = graph.call_function(torch.bernoulli, (graph.call_function(torch.sigmoid, (x,)),), {"generator": generator})
    graph.output((drawn, unknown))
    path = tmp_path / "graph.py"
    path.write_text(render_graph(torch.fx.GraphModule({}, graph)))
    assert run_here(path) == "output 0: (3,)\noutput 1: None\n"
    assert "None,  # unknown: object" in path.read_text()


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y.sin(), x + 1

    @staticmethod
    def backward(ctx, first, second):
        x, y = ctx.saved_tensors
        return first * y.sin() + second, first * x * y.cos()


def load(path):
    names = {"__name__": "loaded"}
    exec(compile(path.read_text(), str(path), "exec"), names)
    return names


def test_the_bodies_of_an_autograd_function_run_forward_and_backward(tmp_path):
    x, y = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    compile_and_call(lambda x, y: sum(Scale.apply(x, y)), tmp_path, x, y)
    graph = load(next((tmp_path / "graph_000").iterdir()))["make_graph"]()
    found = torch.autograd.grad(graph(x, y)[0].sum(), (x, y))
    assert all(map(torch.equal, found, torch.autograd.grad(sum(Scale.apply(x, y)).sum(), (x, y))))


@pytest.fixture
def own_operator(tmp_path, monkeypatch):
    """A package that registers an operator, where a new process can import it."""
    (tmp_path / "registers.py").write_text(
        """
import torch
@torch.library.custom_op("glue_test_dump::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor: return x * 2
@twice.register_fake
def _(x): return torch.empty_like(x)
"""
    )
    monkeypatch.syspath_prepend(tmp_path)
    import registers

    yield registers.twice
    sys.modules.pop("registers", None)
    del registers.twice
    gc.collect()  # torch knows the operator by a weak reference


@pytest.mark.slow
def test_a_file_imports_what_registers_its_operators_or_says_what_to_import(own_operator, tmp_path, monkeypatch):
    compile_and_call(lambda x: own_operator(x) + 1, tmp_path / "dump", torch.ones(3))
    path = tmp_path / "dump" / "graph_000" / "00_unchanged.py"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = run_file(path)
    assert done.stdout == "output 0: (3,)\n", done.stderr
    monkeypatch.setitem(sys.modules, "__main__", sys.modules.pop("registers"))  # a script that nobody can import
    compile_and_call(lambda x: own_operator(x) + 2, tmp_path / "dump", torch.ones(3))
    text = (
        (tmp_path / "dump" / "graph_001" / "00_unchanged.py").read_text().replace(".glue_test_dump", ".glue_elsewhere")
    )
    with pytest.raises(ImportError, match="this graph calls glue_test_dump::twice, registered at .*registers.py"):
        run_here(written(tmp_path / "unregistered.py", text))  # this process knows the operator


def graph_of_constants(*constants):
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(1)
    found = [graph.get_attr(name) for name in constants]
    graph.output(tuple(graph.call_function(torch.mul, (x, constant)) for constant in found))
    return graph


def test_a_large_constant_is_the_same_in_each_file_whatever_is_drawn_before_it(tmp_path):
    root = torch.nn.Module()
    root.a, root.b, root.c = (torch.nn.Buffer(torch.randn(100)) for _ in range(3))
    texts = [render_graph(torch.fx.GraphModule(root, graph_of_constants(*names))) for names in ("abc", "ca")]
    first, second = (load(written(tmp_path / f"{i}.py", text))["make_graph"]() for i, text in enumerate(texts))
    assert torch.equal(first.a, second.a)
    assert torch.equal(first.c, second.c)
    assert not torch.equal(first.a, first.b)


def written(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def test_complex_constants_that_are_not_finite(tmp_path):
    root, values = torch.nn.Module(), [complex("nan+infj"), complex("-inf-nanj"), 1 - 2j]
    root.a = torch.nn.Buffer(torch.tensor(values))
    path = written(tmp_path / "graph.py", render_graph(torch.fx.GraphModule(root, graph_of_constants("a"))))
    found = load(path)["make_graph"]().a
    for part in (torch.real, torch.imag):
        torch.testing.assert_close(part(found), part(root.a), equal_nan=True)


def graph_on(value, target):
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = value
    graph.output((graph.call_function(target, (x,) * len(target._schema.arguments)),))
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def test_an_operator_of_inductors_own_is_imported(tmp_path):
    import torch._inductor.inductor_prims

    text = render_graph(graph_on(torch.ones(3), torch.ops.prims.fma.default))
    assert "import torch._inductor.inductor_prims" in text
    assert run_file(written(tmp_path / "graph.py", text)).returncode == 0
    assert "inductor_prims" not in render_graph(graph_on(torch.ones(3), torch.ops.aten.sin.default))


def test_the_state_of_a_generator_is_one(tmp_path):
    """Random bytes are none."""
    path = written(tmp_path / "graph.py", render_graph(graph_on(torch.get_rng_state(), torch.ops.aten.alias.default)))
    (found,) = load(path)["make_inputs"]()
    torch.Generator().set_state(found)


@pytest.mark.parametrize("ambient", [True, False])
def test_the_modes_around_a_graph_are_those_of_its_capture(ambient, tmp_path):
    x, weight = torch.randn(4, 4), torch.randn(4, 4)
    with torch.autocast("cpu", torch.bfloat16, enabled=ambient), torch.set_grad_enabled(not ambient):
        compile_and_call(torch.matmul, tmp_path, x, weight)
    names = load(tmp_path / "graph_000" / "00_unchanged.py")
    with names["inside"](names["make_modes"]()):
        assert names["make_graph"]()(x, weight)[0].dtype == (torch.bfloat16 if ambient else torch.float32)
        assert torch.is_grad_enabled() != ambient
