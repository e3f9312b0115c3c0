"""A graph whose nodes have names that fx would not give them."""

import torch


def graph_with_names_of_its_own():
    graph = torch.fx.Graph()
    x = graph.placeholder("output")
    total = graph.call_function(torch.sum, (x,), name="sum_7")
    other = graph.call_function(torch.sum, (x,), name="sum_1")
    graph.output((total, other, other))
    return graph
