"""Many ``.item()`` of one device tensor: one copy to the host."""

import operator

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from glue_compiler.passes.memoize_metadata.host_reads import read_together
from tests.captured import compile_with_glue, count


def graph_of_reads(device, indices=(0, 1), other_use=False):
    """Reads elements of a tensor on ``device``; "meta" stands for a device that is not there."""
    graph, mode = fx.Graph(), FakeTensorMode()
    lengths = graph.placeholder("lengths")
    with mode:
        lengths.meta["example_value"] = torch.empty(3, dtype=torch.int64, device=device)
    results = []
    for index in indices:
        element = graph.call_function(operator.getitem, (lengths, index))
        with mode:
            element.meta["example_value"] = lengths.meta["example_value"][index]
        results.append(graph.call_method("item", (element,)))
        if other_use:
            results.append(graph.call_function(torch.neg, (element,)))
    graph.output(tuple(results))
    gm = fx.GraphModule(torch.nn.Module(), graph)
    read_together(gm.graph, mode)
    gm.graph.lint()
    gm.recompile()
    return gm


def test_reads_of_one_tensor_share_a_copy():
    gm = graph_of_reads("meta", (0, 2, -1))
    assert count(gm, "cpu") == 1
    elements = gm.graph.find_nodes(op="call_function", target=operator.getitem)
    assert {node.args[0].target for node in elements} == {"cpu"}
    assert {node.meta["example_value"].device.type for node in elements} == {"cpu"}
    assert gm(torch.tensor([5, 6, 7])) == (5, 7, 7)


@pytest.mark.parametrize(
    "case",
    [
        {"device": "cpu"},
        {"device": "meta", "indices": (1,)},
        {"device": "meta", "indices": (slice(0, 1), slice(1, 2))},
        {"device": "meta", "other_use": True},
    ],
    ids=["on the host already", "one read", "pieces", "used on the device too"],
)
def test_what_gains_nothing_stays(case):
    assert count(graph_of_reads(**case), "cpu") == 0


@pytest.mark.gpu
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_a_list_of_lengths_is_one_copy(compiler):
    def split(x, bounds):
        return [piece.sum(0) for piece in x.split(bounds.diff().tolist())]

    run = compile_with_glue(split, passes={"memoize_metadata": True}, compiler=compiler)
    x = torch.randn(12, 4, device="cuda")
    for bounds in ([0, 3, 7, 12], [0, 1, 2, 12], [0, 12, 12, 12]):
        bounds = torch.tensor(bounds, device="cuda")
        torch.testing.assert_close(run.call(x, bounds), split(x, bounds))
    assert count(run.graphs[0], "cpu") == 1
