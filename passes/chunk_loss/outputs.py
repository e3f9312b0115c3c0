"""Takes logits out of what a graph returns: what they are computed from is returned instead."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import fx

from glue_compiler.deferred.head import Head, Term
from glue_compiler.deferred.outputs import DeferredOutput, Operand
from glue_compiler.fx.values import inputs_of, value_of
from glue_compiler.passes.chunk_loss import heads
from glue_compiler.passes.chunk_loss.analysis import Output, Replacement
from glue_compiler.passes.chunk_loss.operands import Operands
from glue_compiler.passes.chunk_loss.row_nodes import RowWriter


def defer_outputs_of(replacement: Replacement, operands: Operands, keeps: int) -> tuple[DeferredOutput, ...]:
    """Rewrites the outputs of the graph, whose caller ``keeps`` so many; writes before them from then on."""
    if not replacement.outputs:
        return ()
    writer, graph = operands.writer, replacement.scope.graph
    returned = _Returned(graph, keeps)
    with writer.make.before(returned.node, writer.operators.mode(returned.node)):
        found = tuple(_deferred(output, replacement, operands, returned) for output in replacement.outputs)
    for output in replacement.outputs:
        returned.values[output.position] = None
    returned.write()
    return found


@dataclass
class _Returned:
    """What a graph returns, while it is rewritten."""

    graph: fx.Graph
    keeps: int
    values: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.node = self.graph.output_node()
        self.values = list(self.node.args[0])  # type: ignore[arg-type]
        self.inputs = {node: position for position, node in enumerate(inputs_of(self.graph))}

    def operand(self, node: fx.Node, is_detached: bool) -> Operand:
        if node in self.inputs:
            return Operand("input", self.inputs[node], is_detached)
        if node not in self.values:
            self.values.append(node)
        return Operand("output", self.values.index(node), is_detached)

    def write(self) -> None:
        self.node.args = (tuple(self.values),)


def _deferred(output: Output, replacement: Replacement, operands: Operands, returned: _Returned) -> DeferredOutput:
    wide, terms, shared = output.wide, replacement.head.terms, replacement.head.shared
    weights = [operands.weight(each, False) for each in terms]
    biases = [operands.bias(each, False) for each in terms if each.bias is not None]
    if shared is not None:  # a shape of all classes, without their memory: the logits cannot be computed
        weights, biases = (
            [_of_classes(each, replacement.head.classes, operands) for each in k] for k in (weights, biases)
        )
    return DeferredOutput(
        output.position,
        Head(tuple(_described(each, operands.writer) for each in terms), wide.steps, _SHARED if shared else ""),
        tuple(returned.operand(operands.rows(each, wide.path, False), wide.is_detached) for each in terms),
        tuple(returned.operand(weight, wide.is_detached) for weight in weights),
        tuple(returned.operand(bias, wide.is_detached) for bias in biases),
        returned.keeps,
    )


def _of_classes(part: fx.Node, classes: int, operands: Operands) -> fx.Node:
    """One rank's part, as long as that of all: its first row over and over."""
    row = operands.writer.make.proxy(part)[:1].detach()
    return row.expand(classes, *(-1,) * (value_of(part).dim() - 1)).node


_SHARED = (
    "each rank has a part of these classes, and the loss was taken without gathering the logits. Compile with "
    'options={"logits": "kept"} to read them.'
)


def _described(term: heads.Term, writer: RowWriter) -> Term:
    """With the conversions of autocast written out."""
    given = [term.rows, term.weight.value, *([term.bias] if term.bias is not None else [])]
    dtypes = {value_of(writer.node(value)).dtype for value in given}
    return Term(None if dtypes == {term.dtype} else term.dtype, term.scale, term.bias is not None)
