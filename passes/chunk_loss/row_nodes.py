"""Writes steps on rows: of hidden states, and of numbers of each row."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from glue_compiler.errors import GlueInvariantError
from glue_compiler.fx.node_maker import NodeMaker
from glue_compiler.fx.operators import UNTRACKED, Operators, Value
from glue_compiler.fx.values import Symbolic, expression, expressions, inputs_of, makes_tensor, value_of
from glue_compiler.passes.chunk_loss.row_steps import RowStep

aten = torch.ops.aten


@dataclass(frozen=True)
class RowWriter:
    """Writes where ``make`` does."""

    make: NodeMaker
    operators: Operators
    replaced: dict[fx.Node, fx.Node]
    """What took the place of nodes that are gone."""

    def along(self, node: fx.Node, path: Sequence[RowStep], rows: int) -> fx.Node:
        """``node``, whose first ``rows`` dimensions are rows, after the steps of ``path``."""
        others = value_of(node).dim() - rows
        for step in path:
            node = self._after(step, node, others)
        return node

    def reshaped(self, node: fx.Node, shape: Sequence[Any]) -> fx.Node:
        """To ``shape``: numbers and expressions, at most one of which is left to be inferred."""
        found = tuple(value_of(node).shape)
        if expressions(found) == tuple(shape):
            return node
        unknown = [size for size in shape if not isinstance(size, int)] if 0 not in shape else []
        sizes = [-1 if unknown and size is unknown[0] else self.size(size, node) for size in shape]
        return self.make.call(aten.reshape.default, node, sizes)

    def size(self, number: Any, near: fx.Node) -> Any:
        """An int, or a node of the size that is the expression ``number``; ``near`` is a tensor that may have it."""
        if isinstance(number, int | sympy.Integer):
            return int(number)
        for dim, size in enumerate(value_of(near).shape):
            if expression(size) == number:
                return self.make.size(near, dim)
        for node in inputs_of(self.make.graph):
            found = value_of(node)
            if isinstance(found, Symbolic) and expression(found) == number:
                return node
        for kind, target in ((sympy.Add, operator.add), (sympy.Mul, operator.mul)):
            if isinstance(number, kind):
                parts = [self.size(part, near) for part in number.args]
                total = parts[0]
                for part in parts[1:]:
                    total = self.make.call(target, total, part)
                return total
        for node in inputs_of(self.make.graph):
            shape = value_of(node).shape if makes_tensor(node) else ()
            for dim, size in enumerate(shape):
                if expression(size) == number:
                    return self.make.size(node, dim)
        raise GlueInvariantError(f"no node has the size {number}")

    def node(self, value: Value) -> fx.Node:
        found = value.node if value.step == UNTRACKED else self.operators.node_of(value)
        assert found is not None, "analysis asks for a node of each operand"
        while found in self.replaced:
            found = self.replaced[found]
        return found

    def _after(self, step: RowStep, node: fx.Node, others: int) -> fx.Node:
        rank = value_of(node).dim()
        tail = tuple(range(rank - others, rank))
        if step.kind == "reshape":
            sizes = expressions(value_of(node).shape)
            return self.reshaped(node, (*step.arguments, *(sizes[dim] for dim in tail)))
        if step.kind == "permute":
            return self.make.call(aten.permute.default, node, [*step.arguments, *tail])
        arguments = [self._argument(argument, node) for argument in step.arguments]
        found = self.make.call(step.operator, node, *arguments)
        if isinstance(value_of(found), tuple | list):
            return self.make.call(operator.getitem, found, step.leaf)
        return found

    def _argument(self, argument: Any, near: fx.Node) -> Any:
        if isinstance(argument, tuple):
            return [self._argument(item, near) for item in argument]
        if isinstance(argument, Value):
            return self.node(argument)
        return self.size(argument, near) if isinstance(argument, sympy.Basic) else argument
