"""Dynamo: the inputs behind a node, and guards that compute something of an input."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from glue_compiler.compat.parts import ANY, Feature, Uses

BRANCHES = Feature(
    "tracing of branches on integer inputs",
    {
        "torch._C._dynamo.guards:GuardManager.add_lambda_guard": ANY,
        "torch._dynamo.guards:GuardBuilder.add_python_lambda_leaf_guard_to_root": Uses(
            ("self", "code_parts", "verbose_code_parts", "closure_vars")
        ),
        "torch._dynamo.guards:GuardBuilder.arg_ref": Uses(("self", "guard")),
        "torch._dynamo.guards:GuardBuilder.get_guard_manager": Uses(("self", "guard")),
        "torch._dynamo.guards:_get_closure_vars": ANY,
        "torch._dynamo.guards:get_verbose_code_parts": Uses(("code_parts", "guard")),
        "torch._dynamo.guards:install_guard": ANY,
        "torch._dynamo.guards:is_from_skip_guard_source": Uses(("source",)),
        "torch._dynamo.source:GlobalStateSource": ANY,
        "torch._dynamo.output_graph:SubgraphTracer.__init__": Uses(names=("lifted_freevars", "parent")),
        "torch._guards:Source.make_guard": Uses(("self", "fn")),
        "torch.utils._python_dispatch:_disable_current_modes": ANY,
    },
)


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


def install_guard_of_several(sources: Sequence[Any], check: Callable[..., bool], text: str) -> None:
    """The same of what comes from several sources, of which each has guards of its own, or from none."""
    from torch._dynamo.guards import _get_closure_vars, get_verbose_code_parts
    from torch._dynamo.guards import install_guard as install
    from torch._dynamo.source import GlobalStateSource

    def create(builder: Any, guard: Any) -> None:
        for each in sources:
            builder.arg_ref(each.name)
        code = [f"___glue_check({', '.join(each.name for each in sources)})"]
        known = {**_get_closure_vars(), "___glue_check": check}
        builder.add_python_lambda_leaf_guard_to_root(code, get_verbose_code_parts(text, guard), known)

    install((sources[0] if sources else GlobalStateSource()).make_guard(create))


@contextlib.contextmanager
def outside_of_tracing() -> Iterator[None]:
    """Operators run on tensors as they are, without autograd: no mode of the traced program's applies."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield
