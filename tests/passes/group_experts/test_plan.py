"""What is read of a loop over experts, as plain data, and that reading and drafting leave the graph as it was."""

import pytest
import torch

from glue_compiler.fx.effects import EffectAnalysis
from glue_compiler.fx.operators import Operators
from glue_compiler.fx.value_numbering import number_values
from glue_compiler.passes.group_experts.checks import ReadGraph
from glue_compiler.passes.group_experts.plan import Combination, Concatenation, RoutedRows, RowIndices, SortedRows
from glue_compiler.passes.group_experts.read import read_loops, read_row_indices
from glue_compiler.passes.group_experts.steps import AllRows, Gather, Product
from glue_compiler.passes.group_experts.write import LoopWriter
from tests.captured import compile_with_glue
from tests.passes.group_experts.loops import EXPERTS, TOP_K, WIDTH, inputs_for, loop_r, routings
from tests.passes.group_experts.piece_loops import loop_split, router_inputs


def graph_of(loop, *inputs):
    run = compile_with_glue(loop, eager=True, passes={"hoist_metadata": False})
    run.call(*inputs)
    analysis = EffectAnalysis.for_graph(run.graph)
    return ReadGraph(run.graph, Operators(number_values(run.graph, analysis), analysis))


def routed():
    selected = routings()["spread"]
    x, *others = inputs_for(selected)
    return graph_of(loop_r, x, selected, *others)


def in_order():
    return graph_of(loop_split, *router_inputs())


def unlike(x, selected):
    """No two experts compute the same."""
    out = torch.zeros_like(x)
    for expert, function in enumerate((torch.sin, torch.cos, torch.tanh)):
        token, _ = torch.where(selected == expert)
        out.index_add_(0, token, function(x[token]).flip(0))
    return out


def indexed():
    selected = routings()["spread"]
    return graph_of(unlike, torch.randn(selected.shape[0], WIDTH), selected)


def all_loops(graph):
    loops = read_loops(graph).loops
    return loops + read_row_indices(graph, loops)


def test_rows_that_a_mask_selects_are_routed_and_combined():
    (loop,) = all_loops(routed())
    assert isinstance(loop.partition, RoutedRows)
    assert isinstance(loop.end, Combination)
    assert (loop.partition.first_expert, loop.num_experts, loop.partition.top_k) == (0, EXPERTS, TOP_K)
    assert isinstance(loop.steps[0], Gather)
    assert sum(isinstance(step, Product) for step in loop.steps) == 2
    assert [sink.rows.expert for sink in loop.end.sinks] == list(range(EXPERTS))
    assert loop.end.starts_at_zero
    assert loop.end.weights is not None  # the sum over a token's slots takes the last product
    assert {sink.node for sink in loop.end.sinks} <= loop.absorbed


def test_pieces_by_split_are_sorted_and_concatenated():
    loops = all_loops(in_order())
    assert len(loops) == 2  # of the first products, and of the second
    for loop in loops:
        assert isinstance(loop.partition, SortedRows)
        assert isinstance(loop.end, Concatenation)
        assert loop.end.whole.target is torch.cat
        assert [type(step) for step in loop.steps] == [AllRows, Product]
        assert not loop.partition.must_check  # counts of topk's indices are those of all rows
        assert [length.args for length in loop.partition.lengths] == [(expert,) for expert in range(EXPERTS)]
        assert len({length.func for length in loop.partition.lengths}) == 1  # items of one vector
    first, second = loops
    assert first.partition.counts is second.partition.counts


def test_experts_that_are_unlike_find_the_indices_of_their_rows():
    graph = indexed()
    plan = read_loops(graph)
    assert not plan.loops
    assert any("differ" in skip.reason for skip in plan.skips)
    (loop,) = read_row_indices(graph, plan.loops)
    assert isinstance(loop.partition, RoutedRows)
    assert isinstance(loop.end, RowIndices)
    assert (loop.steps, loop.num_experts, loop.end.axes) == ((), 3, ("token", "slot"))


@pytest.mark.parametrize("read", [routed, in_order, indexed])
def test_reading_and_drafting_change_nothing(read):
    """Until a draft is put in; then the loop is gone."""
    graph = read()
    before = graph.gm.graph.python_code("self").src
    loops = all_loops(graph)
    assert graph.gm.graph.python_code("self").src == before
    writer = LoopWriter(graph.gm, graph.operators)
    for loop in loops:
        writer.draft(loop).erase()
        assert graph.gm.graph.python_code("self").src == before
    nodes = set(graph.gm.graph.nodes)
    for draft in reversed([LoopWriter(graph.gm, graph.operators).draft(loop) for loop in loops]):
        draft.put_in()
    assert not any(loop.place in graph.gm.graph.nodes for loop in loops)
    assert nodes - set(graph.gm.graph.nodes)
    graph.gm.graph.lint()
