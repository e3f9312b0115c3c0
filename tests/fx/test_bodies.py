"""Operands that are passed into bodies."""

import torch
from torch import fx

from glue_compiler.fx.bodies import BodyCall


def test_operands_whose_names_the_body_has_for_others():
    body = fx.Graph()
    first = body.placeholder("x")
    body.output(body.create_node("call_function", torch.neg, (first,), name="value"))
    outer = fx.Graph()
    given = [outer.create_node("placeholder", name, name=name) for name in ("x", "value", "value_1")]
    module = fx.GraphModule({}, body)
    call = BodyCall(outer.create_node("call_function", torch.add, (None, given[0])), module, 1)
    added = [call.append_operand(node) for node in given[1:]]
    (end,) = body.find_nodes(op="output")
    end.args = ((end.args[0], *added),)
    module.recompile()
    assert [float(each) for each in module(*map(torch.tensor, (1.0, 2.0, 3.0)))] == [-1.0, 2.0, 3.0]
