"""What the compiler below returned, with deferred logits in place of those that the graph no longer makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from glue_compiler.deferred.head import Head
from glue_compiler.deferred.optimizer_steps import STEPS
from glue_compiler.deferred.tensor import defer


@dataclass(frozen=True)
class Operand:
    """Where a tensor is found when the graph has run.

    ``detached``: the graph takes it without its history (``detach``, or the head stands under ``no_grad``), so that
    no gradient goes there. ``position`` of an output counts those that are glue's own, too.
    """

    kind: Literal["input", "output"]
    position: int
    detached: bool = False


@dataclass(frozen=True)
class DeferredOutput:
    """One output of the graph: what stands there after the rewrite is ignored.

    Each makes logits of its own: two outputs that share memory in eager must not both be deferred.

    Attributes:
        position: in the graph's outputs.
        rows: the hidden states, an operand for each term of ``head``; ``weights`` likewise; ``biases`` for those that
            have one.
        keeps: how many outputs the caller gets; those after it are glue's own. The same in all of one graph.
    """

    position: int
    head: Head
    rows: tuple[Operand, ...]
    weights: tuple[Operand, ...]
    biases: tuple[Operand, ...]
    keeps: int


def defer_outputs(call: Callable[..., Any], deferred: Sequence[DeferredOutput]) -> Callable[..., Any]:
    """``call`` takes the graph's inputs and returns its outputs, and so does what is returned; it is ``call`` itself
    if nothing is ``deferred``.
    """
    if not deferred:
        return call
    # Torch marks callables as boxed that are not: Dynamo passes a graph's inputs one by one, whatever the mark says.
    keeps = deferred[0].keeps
    used = {o.position for each in deferred for o in (*each.rows, *each.weights, *each.biases) if o.kind == "input"}

    def run(*inputs: Any) -> tuple[Any, ...]:
        STEPS.free_copies(inputs[position] for position in used)
        outputs = call(*inputs)

        def find(operands: tuple[Operand, ...]) -> tuple[Tensor, ...]:
            found = ((o, (inputs if o.kind == "input" else outputs)[o.position]) for o in operands)
            return tuple(tensor.detach() if operand.detached else tensor for operand, tensor in found)

        results = list(outputs[:keeps])
        for each in deferred:
            results[each.position] = defer(each.head, find(each.rows), find(each.weights), find(each.biases))
        return tuple(results)

    return run
