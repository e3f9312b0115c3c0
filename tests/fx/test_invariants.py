"""check_graph: each invariant, broken once."""

import pytest
import torch

from glue_compiler.errors import GlueInvariantError
from glue_compiler.fx import bodies
from glue_compiler.fx.effects import EffectAnalysis
from glue_compiler.fx.invariants import check_graph
from tests.captured import compile_with_glue


def captured(fn, *args):
    run = compile_with_glue(fn, eager=True, passes={"hoist_metadata": False})
    run.call(*args)
    return run.graph


def check(gm):
    check_graph(gm, EffectAnalysis.for_graph(gm))


def checkpointed(x):
    return torch.utils.checkpoint.checkpoint(lambda y: y.sin().exp(), x, use_reentrant=False)


def data_dependent(x):
    return torch.nonzero(x).float() * 2


def test_captured_graphs_pass():
    check(captured(checkpointed, torch.ones(3, requires_grad=True)))
    check(captured(data_dependent, torch.ones(3)))


def test_dynamic_shapes_pass():
    run = compile_with_glue(lambda x: x.reshape(-1)[: x.shape[0] - 1] + 1, eager=True, dynamic=True)
    run.call(torch.ones(3, 4))
    check(run.graph)


def test_an_operand_too_many():
    gm = captured(checkpointed, torch.ones(3, requires_grad=True))
    (call,) = bodies.run_once_calls(gm)
    call.node.args = (*call.node.args, call.node.args[1])
    call.node.kwargs = {}
    with pytest.raises(GlueInvariantError, match="passes 2 operands to a body that takes 1"):
        check(gm)


def test_a_body_that_is_gone():
    gm = captured(checkpointed, torch.ones(3, requires_grad=True))
    name = str(gm.graph.find_nodes(op="get_attr")[0].target)
    delattr(gm, name)
    with pytest.raises((GlueInvariantError, RuntimeError), match=name):
        check(gm)


def test_a_shape_that_its_operands_do_not_give():
    gm = captured(lambda x: x.sum(0).sin(), torch.ones(3, 4))
    node = gm.graph.find_nodes(op="call_method", target="sum")[0]
    node.args = (node.args[0], 1)
    with pytest.raises(GlueInvariantError, match="'sum_1' is on record as"):
        check(gm)


def test_a_symbol_that_nothing_binds():
    def fn(a, b):
        return torch.nonzero(a).float() * 2, torch.nonzero(b).float() * 3

    gm = captured(fn, torch.ones(3), torch.ones(4))
    first, second = gm.graph.find_nodes(op="call_function", target=torch.nonzero)
    second.replace_all_uses_with(first)  # downstream metadata still has the second symbol
    with pytest.raises(GlueInvariantError, match="on record as|unbacked symbol"):
        check(gm)


def test_a_size_that_outlives_what_binds_it():
    gm = captured(lambda x: torch.arange(torch.nonzero(x).shape[0]) * 2, torch.ones(3))
    size = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sym_size.int)[0]
    size.args = (gm.graph.find_nodes(op="placeholder")[0], 0)  # a known size, and u0 still on record downstream
    check(gm)  # u0 may be 3, and is bound
    gm.graph.erase_node(gm.graph.find_nodes(op="call_function", target=torch.nonzero)[0])
    with pytest.raises(GlueInvariantError, match="uses the unbacked symbol u0, which nothing before it binds"):
        check(gm)


def test_autocast_inside_the_graph_and_around_a_body():
    """What runs inside has dtypes that its operands alone do not explain."""

    def fn(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = torch.utils.checkpoint.checkpoint(lambda y: (y @ y) * 2, x, use_reentrant=False) + x @ x
        return inside, x @ x

    gm = captured(fn, torch.ones(3, 3, requires_grad=True))
    check(gm)
    outside = [node for node in gm.graph.nodes if "matmul" in str(node.target)][-1]
    outside.meta["example_value"] = outside.meta["example_value"].to(torch.bfloat16)
    with pytest.raises(GlueInvariantError, match="on record as torch.bfloat16"):
        check(gm)
