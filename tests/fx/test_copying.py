"""Copies of graphs keep what a report or a pass knows a graph by."""

import torch

from glue_compiler.fx.copying import copy_graph
from tests.fx.named_graphs import graph_with_names_of_its_own


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
