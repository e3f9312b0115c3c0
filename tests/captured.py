"""Run a function through glue and keep the graphs: what most tests of a captured-stage pass need."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from glue_compiler import registry
from glue_compiler.backend import GlueBackend
from glue_compiler.fx import bodies
from glue_compiler.handoff import hand_off
from glue_compiler.report.session import GraphReport, Session


@dataclass
class Run:
    """The compiled callable, and one entry for each graph that glue has handed on so far."""

    call: Any
    session: Session
    graphs: list[fx.GraphModule] = field(default_factory=list)

    @property
    def graph(self) -> fx.GraphModule:
        assert len(self.graphs) == 1, f"{len(self.graphs)} graphs"
        return self.graphs[0]

    @property
    def report(self) -> GraphReport:
        assert len(self.session.graphs) == 1
        return self.session.graphs[0]

    @property
    def counts(self) -> dict[str, int]:
        return dict(self.report.passes[0].counts)

    @property
    def skip_reasons(self) -> list[str]:
        return [skip.reason for p in self.report.passes for skip in p.skips]


def compile_with_glue(
    fn: Any, *, eager: bool = False, fullgraph: bool = True, dynamic: bool | None = None, **options: Any
) -> Run:
    """``torch.compile(fn, backend="glue")`` through AOTAutograd (or ``eager``: the rewritten graph as it is).

    memoize_metadata, which takes from a graph what most tests look for in it, and group_experts, which lets Dynamo
    capture what it could not, are off unless ``passes`` says otherwise;
    when it splits a graph, ``graphs`` has the prologue and then the rest.
    """
    run = Run(None, Session())

    def keep(gm, inputs, glue_options, uuid, edit_pair=None):
        run.graphs.append(copy_of(gm))
        return gm.forward if eager else hand_off(gm, inputs, glue_options, uuid, edit_pair)

    backend = GlueBackend(hand_off=keep, session=run.session)
    options = {"compiler": "aot_eager", "strict": True, **options}
    off = dict.fromkeys({"memoize_metadata", "group_experts"} & set(registry.pass_names()), False)
    options["passes"] = {**off, **options.get("passes", {})}
    run.call = torch.compile(fn, backend=backend, fullgraph=fullgraph, dynamic=dynamic, options=options)
    return run


def copy_of(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of the graphs alone: AOTAutograd takes ownership of the original."""
    attributes = {
        name: module if not isinstance(module, fx.GraphModule) else copy_of(module)
        for name, module in gm.named_children()
    }
    copied = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    copied.output(copied.graph_copy(gm.graph, mapping))
    root = torch.nn.Module()
    for name, module in attributes.items():
        setattr(root, name, module)
    for node in gm.graph.find_nodes(op="get_attr"):
        if not hasattr(root, str(node.target)) and "." not in str(node.target):
            setattr(root, str(node.target), getattr(gm, str(node.target)))
    return fx.GraphModule(root, copied)


def count(gm: fx.GraphModule, *targets: Any) -> int:
    """How many calls of these functions, or of methods of these names, a graph and its bodies hold."""
    return sum(
        node.op.startswith("call_") and node.target in targets
        for module in bodies.graph_modules(gm)
        for node in module.graph.nodes
    )


def result_and_gradients(fn: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Outputs of ``fn`` and the gradients of all inputs that need one, for a random projection of the outputs."""
    for tensor in inputs:
        tensor.grad = None
    out = fn(*inputs)
    outputs = list(out) if isinstance(out, tuple) else [out]
    generator = torch.Generator().manual_seed(1)
    loss = sum((o * torch.randn(o.shape, generator=generator, dtype=o.dtype)).sum() for o in outputs if o.requires_grad)
    if isinstance(loss, torch.Tensor):
        loss.backward()
    return [o.detach() for o in outputs] + [t.grad.clone() for t in inputs if t.grad is not None]


def assert_same_bits(fn: Any, compiled: Any, inputs: list[torch.Tensor]) -> None:
    """Outputs and gradients of ``compiled`` equal those of ``fn``, bit by bit."""
    expected = result_and_gradients(fn, inputs)
    actual = result_and_gradients(compiled, inputs)
    assert len(expected) == len(actual)
    for want, got in zip(expected, actual, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
