"""Dynamo: branches on a tensor's value, the inputs behind a node, and guards that compute something of an input."""

from __future__ import annotations

import contextlib
import dis
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx


@contextlib.contextmanager
def traced_branches(decide: Callable[[Any, fx.Node], bool | None]) -> Iterator[None]:
    """While Dynamo traces, ask ``decide`` where it would branch on a value that only exists at run time.

    Args:
        decide: called with Dynamo's translator and the condition's node; its value, or None for Dynamo's own way.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable

    saved: list[tuple[list[Any], int, Any]] = []

    def wrapped(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def jump(self: Any, instruction: Any) -> Any:
            if isinstance(self.stack[-1], TensorVariable) and not _is_assertion(self):
                value = decide(self, self.stack[-1].as_proxy().node)
                if value is not None:
                    self.stack[-1] = ConstantVariable.create(value)
            return original(self, instruction)

        return jump

    # Translators look instructions up in tables that their classes have made of their methods.
    for translator in _with_subclasses(InstructionTranslatorBase):
        table: list[Any] = vars(translator).get("dispatch_table") or []
        for code, original in enumerate(table):
            # JUMP_IF_..._OR_POP is left out: it may leave the tensor itself behind, as a result.
            if dis.opname[code].startswith("POP_JUMP") and dis.opname[code].endswith(("_TRUE", "_FALSE")):
                saved.append((table, code, original))
                table[code] = wrapped(original)

    evaluate = SymNodeVariable.evaluate_expr

    def evaluate_expr(self: Any, output_graph: Any = None) -> Any:
        if output_graph is not None and isinstance(self.sym_num, torch.SymBool):
            value = decide(output_graph.current_tx, self.as_proxy().node)
            if value is not None:
                return value
        return evaluate(self, output_graph)

    SymNodeVariable.evaluate_expr = evaluate_expr  # type: ignore[method-assign]
    try:
        yield
    finally:
        SymNodeVariable.evaluate_expr = evaluate  # type: ignore[method-assign]
        for table, code, original in saved:
            table[code] = original


def _with_subclasses(cls: Any) -> Iterator[Any]:
    yield cls
    for subclass in cls.__subclasses__():
        yield from _with_subclasses(subclass)


def _is_assertion(frame: Any) -> bool:
    """Is the jump the one over an ``assert``'s raise? Dynamo traces those as an operator."""
    at = frame.instruction_pointer
    following = frame.instructions[at] if at is not None and at < len(frame.instructions) else None
    return following is not None and following.opname in ("LOAD_ASSERTION_ERROR", "LOAD_COMMON_CONSTANT")


def outer_node(frame: Any, node: fx.Node) -> fx.Node | None:
    """For a placeholder of a body that is being traced, what the caller passes; None for one of the whole graph."""
    tracer = frame.output.current_tracer
    while tracer is not None:
        for outer, inner in tracer.lifted_freevars.items():
            if inner.node is node:
                return outer.node
        tracer = tracer.parent
    return None


def input_of(node: fx.Node) -> tuple[Any, torch.Tensor] | None:
    """(source, the tensor of the call that is being traced) of a placeholder; None if it is no tensor with a source."""
    from torch._dynamo.guards import is_from_skip_guard_source

    argument = node.meta.get("grapharg")
    if argument is None or argument.source is None or argument.pass_arg_as_tensor or not argument.is_tensor:
        return None
    tensor = argument.example
    if not isinstance(tensor, torch.Tensor) or is_from_skip_guard_source(argument.source):
        return None
    return argument.source, tensor


def inputs_of(frame: Any) -> list[fx.Node]:
    """The placeholders of the whole graph that is being traced."""
    return list(frame.output.root_tracer.graph.find_nodes(op="placeholder"))


def install_guard(source: Any, check: Callable[[Any], bool], text: str) -> None:
    """The code that is being traced holds for calls in which ``check`` is true of what comes from ``source``.

    ``check`` gets any object, and must not raise. ``text`` is shown where torch lists guards.
    """
    from torch._dynamo.guards import get_verbose_code_parts
    from torch._dynamo.guards import install_guard as install

    def create(builder: Any, guard: Any) -> None:
        manager = builder.get_guard_manager(guard)
        manager.add_lambda_guard(check, get_verbose_code_parts(text, guard), guard.user_stack)

    install(source.make_guard(create))


@contextlib.contextmanager
def outside_of_tracing() -> Iterator[None]:
    """Operators run on tensors as they are, without autograd: no mode of the traced program's applies."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield
