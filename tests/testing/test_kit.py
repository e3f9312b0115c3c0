"""The testing kit: what it captures, and what its assertions say."""

import pytest
import torch

from glue_compiler.errors import GlueContractError, GlueOptionError
from glue_compiler.pipeline.graph_pass import GraphPass, PassResult
from glue_compiler.pipeline.results import Numerics, Skip
from glue_compiler.testing import (
    GraphAssertionError,
    assert_equivalent,
    assert_rewritten,
    assert_untouched,
    capture,
    count_ops,
    find,
    run_pass,
)


def twice(x):
    return x.cumsum(0) * 2 + x.cumsum(0) * 3


def once(x):
    return x.cumsum(0) * 2


class SwapSinForCos(GraphPass):
    """Wrong on purpose."""

    name, numerics = "swap_sin_for_cos", Numerics.BITWISE

    def run(self, graph, context):
        swapped = [n for n in find(graph, "sin") if context.fuel.take(f"swap {n.name}")]
        for node in swapped:
            node.target = "cos"
        graph.recompile()
        skips = () if swapped else (Skip("there is no sine to swap"),)
        return PassResult(changed=bool(swapped), counts={"swapped": len(swapped)}, skips=skips)


# -- capture


def test_a_graph_break_gives_two_graphs():
    def fn(x):
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    first, second = capture(fn, torch.ones(3))
    assert (count_ops(first, "sin"), count_ops(second, "cos")) == (1, 1)


def test_captured_graphs_are_from_before_any_pass():
    (graph,) = capture(twice, torch.arange(3))
    (rewritten,) = capture(twice, torch.arange(3), options={"passes": {"hoist_metadata": True}})
    assert count_ops(graph, "cumsum") == count_ops(rewritten, "cumsum") == 2


def test_partitioned_graphs_are_from_after_the_captured_stage():
    x = torch.arange(3.0, requires_grad=True)

    def fn(x):
        index = torch.arange(3, device=x.device)
        return x * index.cumsum(0) * torch.arange(3, device=x.device).cumsum(0)

    counts = {}
    for hoist in (False, True):
        (pair,) = capture(fn, x, stage="partitioned", options={"passes": {"hoist_metadata": hoist}})
        counts[hoist] = count_ops(pair, torch.ops.aten.arange.default, torch.ops.aten.arange.start_step)
    assert counts[True] < counts[False] or counts[True] == 1  # the partitioner merges some by itself
    assert pair.num_outputs == 1


def test_what_needs_no_gradient_has_no_pair():
    assert capture(twice, torch.arange(3), stage="partitioned") == []


def test_capture_leaves_no_trace():
    state = torch.get_rng_state()
    capture(lambda x: torch.rand_like(x), torch.ones(3))
    assert torch.equal(state, torch.get_rng_state())
    with pytest.raises(TypeError, match="result of torch.compile"):
        capture(torch.compile(twice), torch.ones(3))
    with pytest.raises(ValueError, match="joint"):
        capture(twice, torch.ones(3), stage="joint")


# -- run_pass and the assertions


def test_a_rewrite_is_counted_and_equivalent():
    x = torch.arange(4)
    (graph,) = capture(twice, x)
    result = run_pass(graph, "hoist_metadata")
    assert_rewritten(result)
    assert_rewritten(result, times=1)
    assert_equivalent(result.before, result.after, [x])
    assert (count_ops(result.before, "cumsum"), count_ops(result.after, "cumsum")) == (2, 1)
    with pytest.raises(GraphAssertionError, match="rewrote the graph:\n  merge cumsum_1 into cumsum") as error:
        assert_untouched(result)
    assert "-" in error.value.difference
    assert "cumsum_1" in error.value.difference
    with pytest.raises(GraphAssertionError, match="made 1 single rewrites, not 2"):
        assert_rewritten(result, times=2)


def test_a_graph_with_nothing_to_do_is_untouched():
    (graph,) = capture(once, torch.arange(4))
    result = run_pass(graph, "hoist_metadata")
    assert_untouched(result)
    with pytest.raises(GraphAssertionError, match="hoist_metadata changed nothing"):
        assert_rewritten(result)


def test_a_reason_is_asked_for():
    (graph,) = capture(lambda x: x.cos(), torch.ones(3))
    result = run_pass(graph, SwapSinForCos)
    assert_untouched(result, reason="no sine")
    with pytest.raises(GraphAssertionError, match="reasons:\n  there is no sine to swap"):
        assert_untouched(result, reason="too large")


def test_wrong_results_are_named():
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    (graph,) = capture(lambda x: x.sin(), x)
    result = run_pass(graph, SwapSinForCos())
    with pytest.raises(GraphAssertionError, match="output 0: differs by up to 0.301") as error:
        assert_equivalent(result.before, result.after, [x])
    assert "x.cos()" in error.value.difference.replace("l_x_", "x")


def test_a_wrong_gradient_is_found_where_outputs_agree():
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    assert_equivalent(lambda x: x * 2, lambda x: x.detach() * 2, [x], grads=False)
    with pytest.raises(GraphAssertionError, match="gradient of input 0"):
        assert_equivalent(lambda x: x * 2, lambda x: x.detach() * 2, [x])


def test_what_a_graph_leaves_in_its_inputs_is_compared():
    with pytest.raises(GraphAssertionError, match="input 0 after the call"):
        assert_equivalent(lambda x: x + 1, lambda x: x.add_(1), [torch.ones(3)])
    assert_equivalent(lambda x: x.add_(1), lambda x: x.add_(1), [torch.ones(3, requires_grad=True) * 1])


def test_random_numbers_are_the_same_in_both():
    assert_equivalent(torch.rand_like, torch.rand_like, [torch.ones(3)])
    with pytest.raises(GraphAssertionError):
        assert_equivalent(torch.rand_like, lambda x: torch.rand(2, 3)[1], [torch.ones(3)])


def test_close_is_not_bitwise():
    x = torch.randn(50)
    total = torch.sum
    in_another_order = lambda x: x.flip(0).double().sum().float()  # noqa: E731
    assert_equivalent(total, in_another_order, [x], numerics=Numerics.CLOSE)
    with pytest.raises(GraphAssertionError, match="the same bits"):
        assert_equivalent(lambda x: x / 3, lambda x: x * (1 / 3), [x])


def test_contract_errors_say_what_to_change():
    (graph,) = capture(once, torch.arange(4))

    class NoName(GraphPass):
        numerics = Numerics.BITWISE

        def run(self, graph, context):
            return PassResult(changed=False)

    class Silent(NoName):
        name = "silent"

        def run(self, graph, context):
            return None

    class Liar(NoName):
        name = "liar"

        def run(self, graph, context):
            graph.graph.find_nodes(op="output")[0].args = ((graph.graph.find_nodes(op="placeholder")[0],),)
            return PassResult(changed=False)

    class NoRun(GraphPass):
        name, numerics = "no_run", Numerics.BITWISE

    for wrong, message in [
        (NoName, "NoName has no name; write: name ="),
        (NoRun, "has no method 'run'; define it"),
        (type("Vague", (NoName,), {"name": "vague", "numerics": None}), "write: numerics = Numerics.BITWISE"),
        (3, "derive its class from glue_compiler.pipeline.graph_pass.GraphPass"),
        ("no.such.module:Pass", "cannot be imported"),
        (Silent, "returned None; return PassResult"),
        (Liar, "changed the graph and says that it did not"),
    ]:
        with pytest.raises(GlueContractError, match=message):
            run_pass(graph, wrong)
    with pytest.raises(GlueOptionError, match="did you mean 'hoist_metadata'"):
        run_pass(graph, "hoist_metadat")
