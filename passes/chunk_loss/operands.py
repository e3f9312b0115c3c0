"""Writes the operands of a loss: rows at a path, weights and bias."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from glue_compiler.fx.modes import Mode
from glue_compiler.fx.values import expression, value_of
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

    def flat(self, path: Path, mode: Mode, is_detached: bool) -> tuple[list[fx.Node], list[fx.Node], fx.Node | None]:
        """Rows ``[N, K]``, weights ``[V, K]`` and the bias, as the operators over linear logits take them."""
        rows, weights, biases = [], [], []
        for k, term in enumerate(self.head.terms):
            key = (k, mode, is_detached)
            lead = self._once(("rows", path, *key), lambda term=term: self.rows(term, path, is_detached))
            rows.append(self._once(("flat", path, *key), lambda term=term, lead=lead: self._flat(term, lead)))
            weights.append(
                self._once(("weight", *key), lambda term=term: self._cast(self.weight(term, is_detached), term))
            )
            if term.bias is not None:
                biases.append(self._once(("bias", *key), lambda term=term: self._bias(term, is_detached)))
        bias = None
        for each in biases:
            bias = each if bias is None else self._call(aten.add.Tensor, bias, each)
        return rows, weights, bias

    def lead(self, path: Path, mode: Mode, is_detached: bool) -> fx.Node:
        """Rows before they were made flat: ``[*rows, K]``."""
        return self._written["rows", path, 0, mode, is_detached]

    def rows(self, term: Term, path: Path, is_detached: bool) -> fx.Node:
        node = self.writer.node(term.rows)
        if is_detached:
            node = self._call(aten.detach.default, node)
        return self.writer.along(node, path, value_of(node).dim() - 1)

    def weight(self, term: Term, is_detached: bool) -> fx.Node:
        node = self.writer.node(term.weight.value)
        if is_detached:
            node = self._call(aten.detach.default, node)
        return self._call(aten.t.default, node) if term.weight.is_transposed else node

    def bias(self, term: Term, is_detached: bool) -> fx.Node:
        assert term.bias is not None
        node = self.writer.node(term.bias)
        if is_detached:
            node = self._call(aten.detach.default, node)
        return self.writer.reshaped(node, (self.head.classes,))

    def _bias(self, term: Term, is_detached: bool) -> fx.Node:
        node = self._cast(self.bias(term, is_detached), term)
        return node if term.scale is None else self._call(aten.mul.Scalar, node, term.scale)

    def _flat(self, term: Term, lead: fx.Node) -> fx.Node:
        node = self._cast(lead, term)
        if term.scale is not None:
            node = self._call(aten.mul.Scalar, node, term.scale)
        shape = value_of(node).shape
        return (
            node
            if len(shape) == 2
            else self._call(aten.reshape.default, node, [-1, self.writer.size(expression(shape[-1]), node)])
        )

    def _cast(self, node: fx.Node, term: Term) -> fx.Node:
        if value_of(node).dtype == term.dtype:
            return node
        return self._call(aten.to.dtype, node, term.dtype)

    def _call(self, target: Any, *args: Any) -> fx.Node:
        return self.writer.make.call(self.writer.graph, target, *args)

    def _once(self, key: Any, write: Any) -> fx.Node:
        if key not in self._written:
            self._written[key] = write()
        return self._written[key]
