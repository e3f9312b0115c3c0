"""Writes the operands of a loss: rows at a path, weights and bias."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from glue_compiler.fx.operators import Value
from glue_compiler.fx.values import expression, value_of
from glue_compiler.ops.shared_classes import own_bias, own_part, whole_rows
from glue_compiler.passes.chunk_loss.heads import Head, Term
from glue_compiler.passes.chunk_loss.row_nodes import RowWriter
from glue_compiler.passes.chunk_loss.row_steps import RowStep

aten = torch.ops.aten

Path = tuple[RowStep, ...]


@dataclass
class Operands:
    """Of one head; each is written once for each mode of autograd that it is needed in."""

    head: Head
    writer: RowWriter
    _written: dict[Any, fx.Node] = field(default_factory=dict)

    def flat(self, path: Path, is_detached: bool) -> tuple[list[fx.Node], list[fx.Node], fx.Node | None]:
        """Rows ``[N, K]``, weights ``[V, K]`` and the bias, as the operators over linear logits take them."""
        rows, weights, biases = [], [], []
        for k, term in enumerate(self.head.terms):
            key = (k, self.writer.make.mode, is_detached)
            lead = self._once(("rows", path, *key), lambda term=term: self.rows(term, path, is_detached))
            rows.append(self._once(("flat", path, *key), lambda term=term, lead=lead: self._flat(term, lead)))
            weights.append(
                self._once(("weight", *key), lambda term=term: self._cast(self.weight(term, is_detached), term))
            )
            if term.bias is not None:
                biases.append(
                    self._once(("bias", *key), lambda term=term: self._scaled(self.bias(term, is_detached), term))
                )
        bias = None
        for each in biases:
            bias = each if bias is None else self.writer.make.call(aten.add.Tensor, bias, each)
        return rows, weights, bias

    def lead(self, path: Path, is_detached: bool) -> fx.Node:
        """Rows before they were made flat: ``[*rows, K]``."""
        return self._written["rows", path, 0, self.writer.make.mode, is_detached]

    def rows(self, term: Term, path: Path, is_detached: bool) -> fx.Node:
        node = self._operand(term.rows, is_detached)
        return self.writer.along(node, path, value_of(node).dim() - 1)

    def weight(self, term: Term, is_detached: bool) -> fx.Node:
        node = self._operand(term.weight.value, is_detached)
        return self.writer.make.call(aten.t.default, node) if term.weight.is_transposed else node

    def bias(self, term: Term, is_detached: bool) -> fx.Node:
        assert term.bias is not None
        classes = self.head.classes if self.head.shared is None else self.head.shared.classes
        return self.writer.reshaped(self._operand(term.bias, is_detached), (classes,))

    def _operand(self, value: Value, is_detached: bool) -> fx.Node:
        node = self.writer.node(value)
        if self.head.shared is not None:
            (term,) = self.head.terms
            local = {term.rows: whole_rows, term.weight.value: own_part}.get(value, own_bias)
            key = ("local", value, self.writer.make.mode)
            node = self._once(key, lambda: self.writer.make.call(local, self.writer.node(value)))
        return self.writer.make.call(aten.detach.default, node) if is_detached else node

    def _scaled(self, node: fx.Node, term: Term) -> fx.Node:
        node = self._cast(node, term)
        return node if term.scale is None else self.writer.make.call(aten.mul.Scalar, node, term.scale)

    def _flat(self, term: Term, lead: fx.Node) -> fx.Node:
        node = self._scaled(lead, term)
        *rows, width = value_of(node).shape
        if len(rows) == 1:
            return node
        return self.writer.make.call(aten.reshape.default, node, [-1, self.writer.size(expression(width), node)])

    def _cast(self, node: fx.Node, term: Term) -> fx.Node:
        if value_of(node).dtype == term.dtype:
            return node
        return self.writer.make.call(aten.to.dtype, node, term.dtype)

    def _once(self, key: Any, write: Any) -> fx.Node:
        if key not in self._written:
            self._written[key] = write()
        return self._written[key]
