"""Copies of graphs keep what a report or a pass knows a graph by."""

import torch

from glue_compiler.fx.copying import copy_graph, has_changed


def graph_with_names_of_its_own():
    graph = torch.fx.Graph()
    x = graph.placeholder("output")
    total = graph.call_function(torch.sum, (x,), name="sum_7")
    other = graph.call_function(torch.sum, (x,), name="sum_1")
    graph.output((total, other, other))
    return graph


def test_names_stay_and_new_nodes_get_new_ones():
    graph = graph_with_names_of_its_own()
    copied, mapping = copy_graph(graph)
    assert [node.name for node in copied.nodes] == [node.name for node in graph.nodes]
    assert all(mapping[node].name == node.name for node in graph.nodes)
    with copied.inserting_before(copied.output_node()):
        names = {copied.call_function(torch.sum, (mapping[next(iter(graph.nodes))],)).name for _ in range(9)}
    assert len(names) == 9
    assert names.isdisjoint(node.name for node in graph.nodes)
    copied.lint()


def test_a_copy_has_not_changed_and_another_operand_is_a_change():
    graph = graph_with_names_of_its_own()
    earlier, _ = copy_graph(graph)
    gm = torch.fx.GraphModule({}, graph)
    assert not has_changed(gm, earlier)
    total, other = graph.find_nodes(op="call_function", target=torch.sum)
    graph.output_node().args = ((total, other, total),)
    assert has_changed(gm, earlier)
