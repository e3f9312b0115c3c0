"""Checks each call of a compiled graph against its graph from before glue (``options={"verify": True}``)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import fx

from glue_compiler.compat import runtime
from glue_compiler.errors import GlueWarning
from glue_compiler.fx.values import inputs_of
from glue_compiler.pipeline.results import Numerics
from glue_compiler.verify import runs
from glue_compiler.verify.compare import Mismatch, Named, find_mismatch
from glue_compiler.verify.inputs import CannotCopy, Inputs, record_inputs


@dataclass(frozen=True)
class Reference:
    """The graph from before glue, and how results are compared with its.

    Attributes:
        graph: a copy that nothing else holds; it runs in eager operators, and shares no symbols with a compile.
        numerics: asked at each call, because the passes over the backward graph run late.
        is_random: it draws random numbers, which in fp64 would be others.
        fail: called with what differs and the inputs of the call; raises.
    """

    graph: fx.GraphModule
    numerics: Callable[[], Numerics]
    is_random: bool
    fail: Callable[[Mismatch, Inputs], NoReturn]

    @property
    def input_names(self) -> list[str]:
        return [str(node.target) for node in inputs_of(self.graph.graph)]


def verified(call: Callable[..., Any], reference: Reference) -> Callable[..., Any]:
    """``call``, and a check of its results, and of the gradients of a second call, in each call.

    Memory: a copy of the inputs and the activations of two more forward passes. Time: with gradients an eager step and
    a compiled step, without an eager forward, beside the call itself.
    """

    def checked(*inputs: Any) -> Any:
        if runtime.in_dispatch_mode() or runtime.in_transform():
            return call(*inputs)  # who traces or transforms this call would see the check too
        try:
            recorded = record_inputs(inputs)
        except CannotCopy as reason:
            warnings.warn(f"a call was not verified: {reason}", GlueWarning, stacklevel=2)
            return call(*inputs)
        states = runs.random_states(inputs)
        outputs = call(*inputs)
        # Inside of a checkpoint, saved tensors are counted and recomputed: those of the check must not be.
        with torch.autograd.graph.saved_tensors_hooks(_same, _same), runs.random_state(inputs):
            _Check(call, reference, recorded, states).compare(inputs, runs.as_tuple(outputs))
        return outputs

    return checked


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class _Check:
    """One call's check."""

    def __init__(self, call: Callable[..., Any], reference: Reference, inputs: Inputs, states: tuple[Any, ...]) -> None:
        self.call = call
        self.reference = reference
        self.inputs = inputs
        self.states = states
        self.names = reference.input_names
        self.gradients = torch.is_grad_enabled()

    def compare(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        expected = self._run(self.reference.graph)
        actual = runs.forward_results(outputs, inputs, self.names)
        self._compare(expected, actual, lambda results: results.forward)
        if not expected.gradients:
            return
        # The batch memo knows a batch by its tensors, and copies would push the batch out of it.
        shared = {
            i: value for i, value in enumerate(inputs) if _is_of_integers(value) and self.inputs.is_still(i, value)
        }
        again = self._run(self.call, shared=shared)
        self._compare(expected, again.gradients, lambda results: results.gradients)

    def _run(self, call: Callable[..., Any], **how: Any) -> runs.Results:
        with runs.random_state(self.inputs.memories, self.states):
            return runs.run(call, self.inputs, self.names, gradients=self.gradients, **how)

    def _compare(
        self, expected: runs.Results, actual: Sequence[Named], part: Callable[[runs.Results], Sequence[Named]]
    ) -> None:
        def exact() -> Sequence[Named] | None:
            results = self._in_fp64()
            return part(results) if results is not None else None

        numerics = self.reference.numerics()
        found = find_mismatch(part(expected), actual, numerics, exact)
        if found and numerics is Numerics.BITWISE:
            # Some kernels (sums by atomics, FlashAttention's backward) do not give the same bits twice.
            again = part(self._run(self.reference.graph))
            if find_mismatch(part(expected), again, Numerics.BITWISE):
                found = find_mismatch(part(expected), actual, Numerics.CLOSE, exact)
        if found:
            self.reference.fail(found, self.inputs)

    def _in_fp64(self) -> runs.Results | None:
        if self.reference.is_random:
            return None
        try:
            with runs.fp64_by_default():
                return self._run(runs.InFp64(self.reference.graph).run, dtype=torch.float64)
        except Exception:  # an operator that has no fp64 form; then rounding is judged without
            return None


def _is_of_integers(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())
