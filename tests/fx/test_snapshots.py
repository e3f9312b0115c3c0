"""A snapshot tells whether a graph is still what it was, and brings it back."""

import torch

from glue_compiler.compat.symbols import fake_tensor_type
from glue_compiler.fx.effects import EffectAnalysis
from glue_compiler.fx.snapshots import Snapshot
from glue_compiler.fx.value_numbering import number_values
from glue_compiler.testing import capture
from tests.fx.named_graphs import graph_with_names_of_its_own


def sums():
    return torch.fx.GraphModule({}, graph_with_names_of_its_own())


def test_an_untouched_graph_is_as_it_was_and_another_operand_is_a_change():
    gm = sums()
    snapshot = Snapshot(gm)
    assert snapshot.is_current()
    assert not snapshot.has_other_nodes()
    total, other = gm.graph.find_nodes(op="call_function", target=torch.sum)
    gm.graph.output_node().args = ((total, other, total),)
    assert snapshot.has_other_nodes()
    assert not snapshot.is_current()


def test_equal_arguments_that_are_new_objects_are_no_other_nodes():
    gm = sums()
    snapshot = Snapshot(gm)
    output = gm.graph.output_node()
    output.args = tuple(output.args)
    assert not snapshot.has_other_nodes()


def test_another_value_on_record_is_not_what_it_was():
    gm = sums()
    snapshot = Snapshot(gm)
    next(iter(gm.graph.nodes)).meta["example_value"] = torch.ones(1)
    assert not snapshot.is_current()
    assert not snapshot.has_other_nodes()


def test_a_graph_comes_back_with_its_names_values_and_order():
    gm = sums()
    total, other = gm.graph.find_nodes(op="call_function", target=torch.sum)
    total.meta["example_value"] = "before"
    names = [node.name for node in gm.graph.nodes]
    code = gm.code
    snapshot = Snapshot(gm)
    total.meta["example_value"] = "after"
    other.replace_all_uses_with(total)
    gm.graph.erase_node(other)
    gm.recompile()
    with snapshot.restored_for_a_look():
        assert len(gm.graph.nodes) == 4
    assert len(gm.graph.nodes) == 3
    snapshot.restore()
    gm.graph.lint()
    assert [node.name for node in gm.graph.nodes] == names
    assert gm.code == code
    assert gm.graph.find_nodes(op="call_function", target=torch.sum)[0].meta["example_value"] == "before"


def test_bodies_come_back_too():
    def fn(x):
        return torch.utils.checkpoint.checkpoint(lambda y: y.sin().cos(), x, use_reentrant=False)

    (gm,) = capture(fn, torch.ones(3, requires_grad=True))
    (body,) = [module for module in gm.modules() if isinstance(module, torch.fx.GraphModule) and module is not gm]
    snapshot = Snapshot(gm)
    sine = next(node for node in body.graph.nodes if node.target == "sin")
    sine.target = "tanh"
    assert snapshot.has_other_nodes()
    snapshot.restore()
    assert [node.target for node in body.graph.nodes if node.op == "call_method"] == ["sin", "cos"]


def layers(x):
    for _ in range(3):
        x = (x + 1).relu()
    return x


def test_values_are_numbered_once_while_the_graph_stays_as_it_is():
    (gm,) = capture(layers, torch.ones(3))
    analysis = EffectAnalysis.for_graph(gm)
    numbering = number_values(gm, analysis)
    assert number_values(gm, analysis) is numbering
    add = next(node for node in gm.graph.nodes if node.op == "call_function")
    add.args = (add.args[0], 2)
    again = number_values(gm, analysis)
    assert again is not numbering
    assert number_values(gm, analysis) is again


def test_what_is_known_of_a_node_is_asked_again_when_its_call_or_its_values_change():
    (gm,) = capture(layers, torch.ones(3))
    analysis = EffectAnalysis.for_graph(gm)
    add = next(node for node in gm.graph.nodes if node.op == "call_function")
    assert not analysis.of(gm, add).random
    add.target = torch.bernoulli
    add.args = add.args[:1]
    assert analysis.of(gm, add).random
    shape = analysis.result_of(gm, add).shape
    with analysis.fake_mode:
        add.all_input_nodes[0].meta["example_value"] = torch.ones(5)
    assert isinstance(add.all_input_nodes[0].meta["example_value"], fake_tensor_type())
    assert (tuple(shape), tuple(analysis.result_of(gm, add).shape)) == ((3,), (5,))
