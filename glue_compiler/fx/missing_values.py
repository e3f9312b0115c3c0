"""Fake values that Dynamo leaves out."""

from __future__ import annotations

import operator

import torch
from torch import fx

from glue_compiler.compat import symbols
from glue_compiler.fx import bodies
from glue_compiler.fx.effects import EffectAnalysis
from glue_compiler.fx.values import has_value, value_of


def record_missing_values(gm: fx.GraphModule, analysis: EffectAnalysis) -> None:
    """Record the items of an integer tensor that ``tolist()`` reads one by one: Dynamo (2.11 to 2.15) does not.

    Without, ``item`` on one of them could do anything, as far as the effect analysis can see.
    """
    shape_env = analysis.shape_env
    for module in bodies.graph_modules(gm):
        for node in module.graph.find_nodes(op="call_function", target=operator.getitem):
            source = value_of(node.args[0])
            if has_value(node) or not isinstance(source, torch.Tensor) or type(node.args[1]) is not int:
                continue
            if not source.is_floating_point():
                with torch.no_grad(), symbols.speculation(analysis.fake_mode, shape_env):
                    node.meta["example_value"] = source[node.args[1]]
