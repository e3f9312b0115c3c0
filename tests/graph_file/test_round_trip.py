"""Graphs in files: a pass does to a loaded graph what it does to the captured one."""

import json
import subprocess
import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from glue_compiler.errors import GlueGraphFileError
from glue_compiler.testing import assert_equivalent, capture, find, load, run_pass, save
from glue_compiler.testing.assertions import render
from tests.passes.hoist_metadata.test_one_graph import layer_inputs, positions_of, two_layers


def round_trip(graph, folder, name="graph.json.gz"):
    save(graph, folder / name)
    return load(folder / name)


def inputs():
    x, *weights = layer_inputs()
    return x, positions_of(5, 7), *weights


def test_counts_and_rewritten_graph_are_those_of_the_captured_one(tmp_path):
    (graph,) = capture(two_layers, *inputs())
    loaded = round_trip(graph, tmp_path)
    assert render(loaded) == render(graph)
    first, second = run_pass(graph, "hoist_metadata"), run_pass(loaded, "hoist_metadata")
    assert first.counts == second.counts
    assert first.counts["syncs_removed"] == 2
    assert first.rewrites == second.rewrites
    assert render(first.after) == render(second.after)


def test_bodies_of_checkpoints_and_their_operands(tmp_path):
    def model(x, positions, first, second):
        for weight in (first, second):
            x = checkpoint(two_layers, x, positions, weight, weight, use_reentrant=False)
        return x

    (graph,) = capture(model, *inputs())
    loaded = round_trip(graph, tmp_path)
    first, second = run_pass(graph, "hoist_metadata"), run_pass(loaded, "hoist_metadata")
    assert first.counts == second.counts
    assert first.counts["lifted"] > 0
    assert render(first.after) == render(second.after)


def test_symbols_keep_hints_ranges_and_what_is_known_of_them(tmp_path):
    def fn(x, y):
        torch._check(x.shape[0] > 4)
        return torch.cat([x, y]) + x.reshape(-1).shape[0]

    (graph,) = capture(fn, torch.ones(6, 3), torch.ones(2, 3), dynamic=True)
    loaded = round_trip(graph, tmp_path)
    (cat,), (again,) = find(graph, torch.cat), find(loaded, torch.cat)
    size, size_again = (node.meta["example_value"].shape[0] for node in (cat, again))
    assert str(size) == str(size_again)
    env, env_again = size.node.shape_env, size_again.node.shape_env
    assert env is not env_again
    assert size.node.hint == size_again.node.hint == 8
    assert str(env.bound_sympy(size.node.expr)) == str(env_again.bound_sympy(size_again.node.expr))
    for number in (0, 1):
        placeholders = [g.graph.find_nodes(op="placeholder") for g in (graph, loaded)]
        before, after = (nodes[number].meta["example_value"] for nodes in placeholders)
        assert str(before) == str(after)


def test_an_operator_on_loaded_values_makes_symbols_of_other_names(tmp_path):
    (graph,) = capture(lambda x: torch.nonzero(x).sum(0), torch.ones(3))
    (node,) = find(round_trip(graph, tmp_path), torch.nonzero)
    fake = node.meta["example_value"]
    with fake.fake_mode:
        another = torch.nonzero(torch.ones(3))
    assert str(another.shape[0]) != str(fake.shape[0])


def test_views_share_memory_and_others_do_not(tmp_path):
    def fn(x, y):
        return x.view(-1), x[1:], y + 1

    (graph,) = capture(fn, torch.ones(4, 2), torch.ones(4, 2))
    loaded = round_trip(graph, tmp_path)
    memory = {n.name: n.meta["example_value"].untyped_storage()._cdata for n in loaded.graph.nodes if n.op != "output"}
    assert len(set(memory.values())) == 3
    view, part = (node for node in loaded.graph.nodes if node.op.startswith("call_") and node.name != "add")
    assert memory[view.name] == memory[part.name]
    assert part.meta["example_value"].storage_offset() == 2


def test_gradients_and_leaves(tmp_path):
    (graph,) = capture(lambda x: x * 2, torch.ones(3, requires_grad=True))
    loaded = round_trip(graph, tmp_path)
    x, product, _ = loaded.graph.nodes
    assert x.meta["example_value"].is_leaf
    assert product.meta["example_value"].requires_grad
    assert not product.meta["example_value"].is_leaf


def in_bfloat16(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x @ x.T


CONSTANTS = {
    "bfloat16": lambda x: x.to(torch.bfloat16),
    "infinity": lambda x: torch.full_like(x, float("-inf")),
    "slices": lambda x: x[..., 1:3, None],
    "a tensor": lambda x: x * torch.tensor([1.5, float("nan"), 2.0, 3.0]),
    "keywords": lambda x: x.sum(dim=[0, 1], keepdim=True, dtype=torch.float64),
    "complex": lambda x: x * (1 + 2j),
    "device": lambda x: x + torch.arange(4, device=torch.device("cpu")),
    "memory_format": lambda x: x[None, None].contiguous(memory_format=torch.channels_last),
    "einsum": lambda x: torch.einsum("ab,cb->ac", x, x),
    "autocast": in_bfloat16,
    "split": lambda x: torch.nn.functional.silu(x.split([1, 3], -1)[1]),
}


@pytest.mark.parametrize("fn", CONSTANTS.values(), ids=CONSTANTS.keys())
def test_arguments_of_every_kind_run_the_same(fn, tmp_path):
    x = torch.randn(4, 4)
    (graph,) = capture(fn, x)
    loaded = round_trip(graph, tmp_path, "graph.json")
    assert_equivalent(graph, loaded, [x])
    run_pass(loaded, "hoist_metadata")  # its invariants are checked: metadata is what the operators give


def test_the_graphs_of_a_training_step(tmp_path):
    x, weight = torch.randn(3, 4), torch.randn(4, 4, requires_grad=True)
    (pair,) = capture(lambda x, w: (x @ w).sin(), x, weight, stage="partitioned")
    loaded = round_trip(pair, tmp_path)
    assert loaded.num_outputs == pair.num_outputs == 1
    assert_equivalent(pair, loaded, [x, weight.detach(), torch.randn(3, 4)])


def test_a_file_is_the_same_bytes_each_time(tmp_path):
    (graph,) = capture(two_layers, *inputs())
    for name in ("first.json.gz", "second.json.gz"):
        save(graph, tmp_path / name)
    assert (tmp_path / "first.json.gz").read_bytes() == (tmp_path / "second.json.gz").read_bytes()


def test_a_fresh_process_loads_without_what_the_model_came_from(tmp_path):
    (graph,) = capture(two_layers, *inputs())
    save(graph, tmp_path / "graph.json")
    script = f"""
import sys
from glue_compiler.testing import load, run_pass
print(run_pass(load({str(tmp_path / "graph.json")!r}), "hoist_metadata").counts)
assert not {{"tests", "transformers", "pytest"}} & {{name.partition(".")[0] for name in sys.modules}}
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert result.stdout == f"{run_pass(graph, 'hoist_metadata').counts}\n", result.stderr


def test_a_function_that_no_process_could_import_is_an_error(tmp_path):
    (graph,) = capture(lambda x: x.sin(), torch.ones(3))
    (node,) = find(graph, "sin")
    node.op, node.target = "call_function", lambda x: x
    with pytest.raises(GlueGraphFileError, match=f"node '{node.name}'.*cannot be found by a name"):
        save(graph, tmp_path / "graph.json")


def test_another_file_and_a_missing_function_are_errors(tmp_path):
    (graph,) = capture(lambda x: torch.sin(x), torch.ones(3))
    path = tmp_path / "graph.json"
    save(graph, path)
    path.write_text(path.read_text().replace('"torch:sin"', '"torch:sinus"'))
    with pytest.raises(GlueGraphFileError, match="torch:sinus"):
        load(path)
    path.write_text(json.dumps({"format": "something else"}))
    with pytest.raises(GlueGraphFileError, match="not a graph that glue saved"):
        load(path)
