"""Makes nodes of captured graphs, with the fake values that Dynamo would have recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from glue_compiler.compat import symbols
from glue_compiler.compat.operator_calls import call_of
from glue_compiler.fx.modes import Mode
from glue_compiler.fx.value_numbering import Scope
from glue_compiler.fx.values import value_of

_SOURCE = ("stack_trace", "nn_module_stack")


@dataclass(eq=False)
class NodeMaker(fx.proxy.TracerBase):
    """Nodes come to be where :meth:`before` says, each by a call, or by operators on what :meth:`proxy` gives."""

    fake_mode: Any
    key: str = "example_value"
    """Where a node's value is on record: AOTAutograd's graphs have "val"."""
    graph: fx.Graph = field(init=False)
    mode: Mode = field(init=False)
    _meta: dict[str, Any] = field(default_factory=dict)
    _operands: dict[tuple[Scope, fx.Node], fx.Node] = field(default_factory=dict)

    @contextlib.contextmanager
    def before(self, node: fx.Node, mode: Mode, source: fx.Node | None = None) -> Iterator[None]:
        """Make nodes before ``node``, in ``mode``, that say to come from the program's line that ``source`` is of."""
        outside = vars(self).copy()
        self.graph, self.mode = node.graph, mode
        self._meta = {key: source.meta[key] for key in _SOURCE if key in source.meta} if source is not None else {}
        try:
            with node.graph.inserting_before(node):
                yield
        finally:
            vars(self).update(outside)

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return self.create_node("call_function", target, args, kwargs)

    def method(self, name: str, *args: Any) -> fx.Node:
        return self.create_node("call_method", name, args, {})

    def known(self, value: Any, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call, or of a name a method, whose result is on record as ``value``; it is not run."""
        kind = "call_method" if isinstance(target, str) else "call_function"
        node = self.graph.create_node(kind, target, args, kwargs)
        node.meta.update({**self._meta, self.key: value})
        return node

    def proxy(self, node: fx.Node) -> Any:
        """An ``fx.Proxy`` of ``node``, for expressions that make nodes: ``(proxy + 1).sum().node``."""
        return fx.Proxy(node, self)

    def create_arg(self, a: Any) -> Any:
        return a if isinstance(a, fx.Node) else super().create_arg(a)

    def create_node(self, op: str, target: Any, args: Any, kwargs: Any, *unused: Any) -> fx.Node:
        node = self.graph.create_node(op, target, args, kwargs)
        given, named = fx.map_arg((node.args, node.kwargs), value_of)
        shape_env = getattr(self.fake_mode, "shape_env", None)
        with self.mode.entered(), symbols.speculation(self.fake_mode, shape_env):
            value = call_of(node, given, named)
        node.meta.update({**self._meta, self.key: value})
        return node

    def size(self, node: fx.Node, dim: int) -> Any:
        """An int, or a node of one."""
        size = value_of(node).shape[dim]
        return size if isinstance(size, int) else self.call(torch.ops.aten.sym_size.int, node, dim)

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
