"""What a graph and its bodies are at one moment: to tell whether they still are, and to bring it back."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import fx

from glue_compiler.compat import tracing
from glue_compiler.fx import bodies
from glue_compiler.fx.values import value_of


class _Row(NamedTuple):
    """A node, and what it had: fx replaces arguments when they change, and does not edit them."""

    node: fx.Node
    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str
    type: Any
    meta: dict[str, Any]
    attribute: Any
    """What a get_attr node reads."""


class Snapshot:
    """Graphs, with the bodies in them. Copies no node until it is restored.

    Values in the metadata of nodes are shared with the graph: they are replaced and not edited.
    """

    def __init__(self, *graphs: fx.GraphModule) -> None:
        self._graphs = graphs
        modules = [module for gm in graphs for module in bodies.graph_modules(gm)]
        self._saved = [(module, module.graph, _rows(module)) for module in modules]

    def is_current(self) -> bool:
        """Are these the very same nodes, with the very same arguments and values?"""
        modules = [module for gm in self._graphs for module in bodies.graph_modules(gm)]
        if len(modules) != len(self._saved):
            return False
        pairs = zip(modules, self._saved, strict=True)
        return all(module is saved[0] and _are_same(module, saved[2]) for module, saved in pairs)

    def has_other_nodes(self) -> bool:
        """Do the graphs call anything else now, or in another order, or on other operands?"""
        return any(_differ(module.graph, rows) for module, _, rows in self._saved)

    def restore(self) -> None:
        """Bring the graphs back, with new nodes, which have the old names."""
        for module, graph, rows in self._saved:
            module.graph = _written(graph, rows)

    @contextlib.contextmanager
    def restored_for_a_look(self) -> Iterator[None]:
        now = [(module, module.graph) for module, _, _ in self._saved]
        self.restore()
        try:
            yield
        finally:
            for module, graph in now:
                module.graph = graph


def _rows(gm: fx.GraphModule) -> list[_Row]:
    return [
        _Row(
            node,
            node.op,
            node.target,
            node.args,
            node.kwargs,
            node.name,
            node.type,
            dict(node.meta),
            bodies.attribute_of(gm, node) if node.op == "get_attr" else None,
        )
        for node in gm.graph.nodes
    ]


def _are_same(gm: fx.GraphModule, rows: Sequence[_Row]) -> bool:
    nodes = gm.graph.nodes
    return len(nodes) == len(rows) and all(_is_same(gm, node, row) for node, row in zip(nodes, rows, strict=True))


def _is_same(gm: fx.GraphModule, node: fx.Node, row: _Row) -> bool:
    return (
        node is row.node
        and node.args is row.args
        and node.kwargs is row.kwargs
        and node.op == row.op
        and node.target is row.target
        and value_of(node) is row.meta.get("example_value", row.meta.get("val"))
        and (node.op != "get_attr" or bodies.attribute_of(gm, node) is row.attribute)
    )


def _differ(graph: fx.Graph, rows: Sequence[_Row]) -> bool:
    nodes = list(graph.nodes)
    if len(nodes) == len(rows) and all(
        node is row.node and node.target is row.target and node.args is row.args and node.kwargs is row.kwargs
        for node, row in zip(nodes, rows, strict=True)
    ):
        return False
    now = [(node, node.op, node.target, (node.args, node.kwargs)) for node in nodes]
    return _shape_of(now) != _shape_of([(row.node, row.op, row.target, (row.args, row.kwargs)) for row in rows])


def _shape_of(nodes: Sequence[tuple[fx.Node, str, Any, Any]]) -> list[object]:
    # Of arguments the nodes alone: comparing constants, tensors and symbols among them, could do anything.
    number = {node: i for i, (node, *_) in enumerate(nodes)}

    def operands(arguments: Any) -> list[int]:
        found: list[int] = []
        fx.map_arg(arguments, lambda operand: found.append(number[operand]))
        return found

    return [(op, target, operands(arguments)) for _, op, target, arguments in nodes]


def _written(graph: fx.Graph, rows: Sequence[_Row]) -> fx.Graph:
    written = fx.Graph(tracer_cls=graph._tracer_cls)
    nodes: dict[fx.Node, fx.Node] = {}
    for row in rows:
        args, kwargs = fx.map_arg((row.args, row.kwargs), nodes.__getitem__)
        node = nodes[row.node] = written.create_node(row.op, row.target, args, kwargs, row.name, row.type)
        node.meta = dict(row.meta)
        tracing.copy_node_attributes(row.node, node)
    for row in rows:
        tracing.set_name(nodes[row.node], row.name)  # which create_node may have changed
    written._codegen = copy.copy(graph._codegen)
    return written
