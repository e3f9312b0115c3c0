"""What a graph computes, as a hashable value: equal for two graphs that do the same to inputs of the same kind."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from typing import Any

import sympy
import torch
from torch import fx

from glue_compiler.fx.values import Symbolic, expression, value_of


def _itself(node: fx.Node) -> Hashable:
    return node


def structure_of(
    graph: fx.Graph, asserts: Collection[fx.Node] = (), attributes: Callable[[fx.Node], Hashable] = _itself
) -> Hashable:
    """Operators, constants and results' dtypes, devices and shapes in order; names and sources are no part of it.

    Two graphs with one structure, called on equal inputs, give equal results, if both call functions that depend on
    their arguments alone. Symbols are numbered in order of appearance.

    Args:
        asserts: nodes of which only the first argument counts: what is checked, and not the message.
        attributes: what stands for an attribute; by default its node, which is equal to none.
    """
    return _Describer(asserts, attributes).graph(graph)


class _Describer:
    def __init__(self, asserts: Collection[fx.Node], attributes: Callable[[fx.Node], Hashable]) -> None:
        self.asserts, self.attributes = asserts, attributes
        self.nodes: dict[fx.Node, int] = {}
        self.symbols: dict[sympy.Symbol, sympy.Symbol] = {}

    def graph(self, graph: fx.Graph) -> Hashable:
        described = []
        for node in graph.nodes:
            self.nodes[node] = len(self.nodes)
            target = self.attributes(node) if node.op == "get_attr" else node.target
            target = None if node.op in ("placeholder", "output") else target
            arguments = node.args[:1] if node in self.asserts else (node.args, node.kwargs)
            described.append((node.op, target, self._of(arguments), self._of(value_of(node))))
        return tuple(described)

    def _of(self, value: Any) -> Hashable:
        if isinstance(value, fx.Node):
            return ("node", self.nodes[value])
        if isinstance(value, torch.Tensor):
            shape = tuple(self._number(size) for size in value.shape)
            return ("tensor", value.dtype, value.device, shape, value.layout)
        if isinstance(value, Symbolic):
            return (type(value).__name__, self._number(value))
        if isinstance(value, tuple | list):
            return (type(value).__name__, *(self._of(item) for item in value))
        if isinstance(value, dict):
            return ("dict", *((key, self._of(item)) for key, item in value.items()))
        if isinstance(value, slice):
            return ("slice", self._of((value.start, value.stop, value.step)))
        # 0, 0.0, -0.0 and False are equal in Python, and no equal constants.
        return (type(value).__name__, repr(value))

    def _number(self, number: Any) -> Hashable:
        number = expression(number)
        if not isinstance(number, sympy.Basic):
            return number
        for symbol in sorted(number.free_symbols - self.symbols.keys(), key=str):
            self.symbols[symbol] = sympy.Symbol(f"n{len(self.symbols)}", integer=True)
        return number.xreplace(self.symbols)
