"""Whether one operator in the place of several gives the gradients that they give, and may save what it needs."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from glue_compiler.fx.operators import Operators
from glue_compiler.fx.values import requires_grad, storages_of, value_of

aten = torch.ops.aten

_PRODUCTS = (aten.linear, aten.matmul, aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.einsum)
"""Their gradients are products too: what they are laid out as does not depend on how the result's gradient is."""


@dataclass(frozen=True)
class Gradients:
    """Of an operator that is to take the place of ``output``, and of nodes before it."""

    output: fx.Node
    operators: Operators

    @property
    def are_cut_off(self) -> bool:
        """Is the output made without gradients, whether or not its operands need some?"""
        return not self._is_on(self.output) and not requires_grad(value_of(self.output))

    def pass_through(self, node: fx.Node) -> bool:
        """Does ``node`` pass gradients of the output on to its operands, as an operator in the output's place would?

        What is on record of its result does not say: a view made without gradients of a tensor that needs one is on
        record as needing one too, as in eager, where it is a leaf of its own.
        """
        if self.are_cut_off or not any(requires_grad(value_of(arg)) for arg in node.all_input_nodes):
            return True
        return requires_grad(value_of(node)) and self._is_on(node)

    def may_save(self, *nodes: fx.Node) -> bool:
        """Will backward find in the memory of all ``nodes`` what the output finds there, or leaves there?"""
        saved = storages_of([value_of(node) for node in nodes])
        is_final = self.operators.numbering.is_unwritten_after(saved, self.output)
        return is_final or not requires_grad(value_of(self.output))

    def strides_are_seen(self, *nodes: fx.Node) -> bool:
        """Does code that is not torch's own get the gradients of ``nodes``, and so their strides?

        A hook, an ``autograd.Function`` or a custom operator before them, with no product between: its backward may
        take a ``view`` for which only the strides that eager's gradients have are fit.
        """
        seen: set[fx.Node] = set()
        waiting = [] if self.are_cut_off else list(nodes)
        while waiting:
            node = waiting.pop()
            if node in seen or not requires_grad(value_of(node)):
                continue
            seen.add(node)
            body = self.operators.body_of(node)
            if body is not None:
                waiting += body.graph.output_node().all_input_nodes
            elif node.op == "placeholder":
                outer = self.operators.passed(self.operators.value(node))
                waiting += [outer.node] if outer is not None else []
            elif node.op.startswith("call_"):
                calls = self.operators.calls(node)
                if calls is None and node.target is not operator.getitem:
                    return True
                if any(call.overload.namespace not in ("aten", "prims") for call in calls or ()):
                    return True
                if not any(call.operator in _PRODUCTS for call in calls or ()):
                    waiting += node.all_input_nodes
        return False

    def _is_on(self, node: fx.Node) -> bool:
        grad = self.operators.mode(node).grad
        return torch.is_grad_enabled() if grad is None else grad  # passes run in the mode around the graph
