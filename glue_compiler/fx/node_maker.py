"""Makes nodes of captured graphs, with the fake values that Dynamo would have recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from glue_compiler import compat
from glue_compiler.compat.operator_calls import call_of
from glue_compiler.fx.modes import Mode
from glue_compiler.fx.value_numbering import Scope
from glue_compiler.fx.values import value_of


@dataclass
class NodeMaker:
    """Nodes come to be where their graph inserts.

    Attributes:
        mode: of autograd and autocast, at that place.
        meta: what nodes get on record beside their values.
    """

    fake_mode: Any
    mode: Mode = field(default_factory=Mode)
    meta: dict[str, Any] = field(default_factory=dict)
    _operands: dict[tuple[Scope, fx.Node], fx.Node] = field(default_factory=dict)

    def call(self, graph: fx.Graph, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return self._made(graph.call_function(target, args, kwargs))

    def method(self, graph: fx.Graph, name: str, *args: Any) -> fx.Node:
        return self._made(graph.call_method(name, args))

    def _made(self, node: fx.Node) -> fx.Node:
        args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
        shape_env = getattr(self.fake_mode, "shape_env", None)
        with self.mode.entered(), compat.speculation(self.fake_mode, shape_env):
            value = call_of(node, args, kwargs)
        node.meta.update({**self.meta, "example_value": value})
        return node

    def size(self, graph: fx.Graph, node: fx.Node, dim: int) -> Any:
        size = value_of(node).shape[dim]
        return size if isinstance(size, int) else self.call(graph, torch.ops.aten.sym_size.int, node, dim)

    def brought_to(self, node: fx.Node, outer: Scope, inner: Scope) -> fx.Node:
        """A value of ``outer``, passed into ``inner`` as an operand of the calls between them."""
        if inner is outer:
            return node
        assert inner.parent is not None
        assert inner.call is not None
        node = self.brought_to(node, outer, inner.parent)
        if (inner, node) not in self._operands:
            self._operands[inner, node] = inner.call.append_operand(node)
        return self._operands[inner, node]
