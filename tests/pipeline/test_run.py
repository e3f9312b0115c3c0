"""The pipeline: failures, checks."""

import pytest
import torch

from glue_compiler.errors import GlueContractError, GlueInvariantError, GlueWarning
from glue_compiler.fx import bodies
from glue_compiler.options import GlueOptions
from glue_compiler.pipeline.graph_pass import GraphPass, PassResult
from glue_compiler.pipeline.results import Numerics, Skip, Stage
from glue_compiler.pipeline.run import Pipeline
from tests.captured import compile_and_keep, compile_with_glue


def make_pass(name, run=None):
    class Made(GraphPass):
        numerics = Numerics.BITWISE

        def run(self, graph, context):
            return run(graph, context) if run else PassResult(changed=False)

    made = Made()
    made.name = name
    return made


def captured_graph(fn, *args):
    run = compile_with_glue(fn, eager=True, passes={"hoist_metadata": False})
    run.call(*args)
    return run.graph


def checkpointed(x):
    return torch.utils.checkpoint.checkpoint(lambda y: y.sin().exp(), x, use_reentrant=False)


def break_outer_and_inner(graph, context):
    for module in bodies.graph_modules(graph):
        for node in module.graph.find_nodes(op="call_method"):
            node.target = "tanh"
        for node in module.graph.find_nodes(op="call_function", target=torch.sin):
            node.target = torch.tanh
        module.recompile()
    raise ValueError("half way")


def test_a_failing_pass_restores_the_graph_and_its_bodies_and_warns():
    gm = captured_graph(checkpointed, torch.ones(3, requires_grad=True))
    before = [str(module.graph) for module in bodies.graph_modules(gm)]
    assert len(before) == 2
    with pytest.warns(GlueWarning, match="breaker failed .ValueError: half way"):
        (report,) = Pipeline([make_pass("breaker", run=break_outer_and_inner)], GlueOptions()).run(gm, Stage.CAPTURED)
    assert [str(module.graph) for module in bodies.graph_modules(gm)] == before
    assert report.error == "ValueError: half way"
    assert not report.changed
    assert torch.equal(gm(torch.ones(3))[0], torch.ones(3).sin().exp())


def test_strict_raises():
    gm = captured_graph(checkpointed, torch.ones(3, requires_grad=True))
    with pytest.raises(ValueError, match="half way"):
        Pipeline([make_pass("breaker", run=break_outer_and_inner)], GlueOptions(strict=True)).run(gm, Stage.CAPTURED)


def test_symbols_that_a_failing_pass_renamed_are_restored():
    def fn(a, b):
        return torch.nonzero(a).shape[0] + torch.nonzero(b).shape[0]

    gm = captured_graph(fn, torch.ones(3), torch.ones(4))
    sizes = [
        node.meta["example_value"].shape[0] for node in gm.graph.find_nodes(op="call_function", target=torch.nonzero)
    ]
    assert len({str(size) for size in sizes}) == 2

    def rename_and_fail(graph, context):
        context.shape_env._rename_unbacked_to(sizes[1].node.expr, sizes[0].node.expr)
        raise ValueError("after renaming")

    with pytest.warns(GlueWarning):
        Pipeline([make_pass("renamer", run=rename_and_fail)], GlueOptions()).run(gm, Stage.CAPTURED)
    assert len({str(size.node.expr) for size in sizes}) == 2


def test_an_inconsistent_graph_is_restored_like_a_failure():
    def lie_about_the_dtype(graph, context):
        node = graph.graph.find_nodes(op="call_function", target=torch.sin)[0]
        node.target = torch.isnan
        graph.recompile()
        return PassResult(changed=True)

    gm = captured_graph(lambda x: torch.sin(x) * 2, torch.ones(3))
    with pytest.warns(GlueWarning, match="GlueInvariantError"):
        Pipeline([make_pass("liar", run=lie_about_the_dtype)], GlueOptions()).run(gm, Stage.CAPTURED)
    assert torch.equal(gm(torch.ones(3))[0], torch.ones(3).sin() * 2)
    with pytest.raises(GlueInvariantError, match="on record as torch.float32"):
        Pipeline([make_pass("liar", run=lie_about_the_dtype)], GlueOptions(strict=True)).run(gm, Stage.CAPTURED)


def test_a_fault_from_before_a_pass_is_not_the_pass_s():
    def add_a_copy(graph, context):
        (tanh,) = graph.graph.find_nodes(op="call_function", target=torch.tanh)
        with graph.graph.inserting_after(tanh):
            graph.graph.node_copy(tanh)
        graph.recompile()
        return PassResult(changed=True)

    def add_another_fault(graph, context):
        graph.graph.find_nodes(op="call_function", target=torch.sin)[0].target = torch.isnan
        return add_a_copy(graph, context)

    gm = captured_graph(lambda x: torch.sin(x) + torch.tanh(x), torch.ones(3))
    gm.graph.find_nodes(op="call_function", target=torch.tanh)[0].meta["example_value"] = torch.ones(2, device="meta")
    options = GlueOptions(strict=True)
    (report,) = Pipeline([make_pass("copier", run=add_a_copy)], options).run(gm, Stage.CAPTURED)
    assert report.changed
    gm.graph.erase_node(gm.graph.find_nodes(op="call_function", target=torch.tanh)[1])
    with pytest.raises(GlueInvariantError, match="'sin' is on record as torch.float32.*gives? torch.bool"):
        Pipeline([make_pass("copier", run=add_another_fault)], options).run(gm, Stage.CAPTURED)
    assert gm.graph.find_nodes(op="call_function", target=torch.sin)


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def test_the_bodies_of_an_autograd_function_are_not_changed_by_looking_at_them():
    """Their outputs have names that a copy would not get by itself."""
    x = torch.ones(3, requires_grad=True)
    run = compile_and_keep(lambda x: Scale.apply(x).sin())
    run.call(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(3).mul(2).cos() * 2)
    assert all(p.error is None for p in run.report.passes)


def test_a_pass_that_does_not_say_what_it_changed_fails():
    def swap(graph, context):
        node = graph.graph.find_nodes(op="call_function", target=torch.sub)[0]
        node.args = node.args[::-1]
        return PassResult(changed=False)

    gm = captured_graph(lambda x, y: torch.sub(x, y), torch.ones(3), torch.ones(3))
    with pytest.raises(GlueContractError, match="changed the graph and says that it did not"):
        Pipeline([make_pass("silent", run=swap)], GlueOptions(strict=True)).run(gm, Stage.CAPTURED)


def test_a_model_still_runs_when_a_pass_fails(monkeypatch):
    from glue_compiler.pipeline import registry

    monkeypatch.setattr(registry, "all_passes", lambda: (make_pass("breaker", run=break_outer_and_inner),))
    x = torch.ones(3, requires_grad=True)
    run = compile_with_glue(checkpointed, strict=False)
    with pytest.warns(GlueWarning, match="breaker failed"):
        assert torch.equal(run.call(x), checkpointed(x))


def test_torchs_own_switch_turns_a_pass_off():
    gm = captured_graph(checkpointed, torch.ones(3, requires_grad=True))
    with torch._inductor.config.patch(disabled_passes="breaker"):
        (report,) = Pipeline([make_pass("breaker", run=break_outer_and_inner)], GlueOptions(strict=True)).run(
            gm, Stage.CAPTURED
        )
    assert not report.changed


def test_skips_and_counts_reach_the_report():
    result = PassResult(
        changed=False, counts={"merged": 0}, skips=(Skip("too large", "node", "model.py:3 in forward"),)
    )
    gm = captured_graph(checkpointed, torch.ones(3, requires_grad=True))
    (report,) = Pipeline([make_pass("reader", run=lambda graph, context: result)], GlueOptions()).run(
        gm, Stage.CAPTURED
    )
    assert report.skips == result.skips
    assert report.counts == {"merged": 0}
    assert report.milliseconds > 0


def test_the_uuid_changes_with_options_and_passes():
    from glue_compiler.pipeline import registry

    passes = registry.all_passes()
    uuid = Pipeline(passes, GlueOptions()).uuid()
    assert uuid == Pipeline(passes, GlueOptions(dump="elsewhere")).uuid()
    assert uuid != Pipeline(passes, GlueOptions(hoist_limit=1)).uuid()
    assert uuid != Pipeline(passes, GlueOptions(passes={"hoist_metadata": False})).uuid()
    # A pass may have failed in the compile that filled the cache, which is an error with strict.
    assert uuid != Pipeline(passes, GlueOptions(strict=True)).uuid()


def test_a_step_that_is_dumped_comes_from_no_cache():
    from glue_compiler.pipeline import registry

    passes = registry.all_passes()
    step_passes = [p for p in passes if p.stage is Stage.PARTITIONED]
    assert Pipeline(passes, GlueOptions()).uuid(step_passes) is not None
    assert Pipeline(passes, GlueOptions(dump="elsewhere")).uuid(step_passes) is None
