"""Whether one operator in the place of several gives the gradients that they give, and may save what it needs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from glue_compiler.fx.operators import UNTRACKED, Operators, Value
from glue_compiler.fx.values import requires_grad, storages_of, tensors_in, value_of, values_of


@dataclass(frozen=True)
class Gradients:
    """Of an operator that is to take the place of ``output``, and of nodes before it."""

    output: fx.Node
    operators: Operators

    @property
    def are_cut_off(self) -> bool:
        """Is the output made without gradients, whether or not its operands need some?"""
        return not self.are_on(self.output) and not requires_grad(value_of(self.output))

    def pass_through(self, node: fx.Node) -> bool:
        """Does ``node`` pass gradients of the output on to its operands, as an operator in the output's place would?

        What is on record of its result does not say: a view made without gradients of a tensor that needs one is on
        record as needing one too, as in eager, where it is a leaf of its own.
        """
        if self.are_cut_off or not requires_grad(values_of(node.all_input_nodes)):
            return True
        if not any(each.is_floating_point() or each.is_complex() for each in tensors_in(value_of(node))):
            return True  # sizes, and indices, which nothing gives gradients
        return requires_grad(value_of(node)) and self.are_on(node)

    def reach(self, value: Value) -> bool:
        """Does ``value`` get a gradient, if it is an operand of an operator in the output's place?"""
        return not self.are_cut_off and value.step != UNTRACKED and requires_grad(value_of(value.node))

    def are_on(self, node: fx.Node) -> bool:
        """Does what is computed in the place of ``node`` pass gradients on?"""
        return self.operators.is_grad_on(node)

    def may_save(self, *nodes: fx.Node) -> bool:
        """Will backward find in the memory of all ``nodes`` what the output finds there, or leaves there?"""
        saved = storages_of(values_of(nodes))
        is_final = self.operators.numbering.is_unwritten_after(saved, self.output)
        return is_final or not requires_grad(value_of(self.output))
