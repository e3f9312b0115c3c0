"""trace_vmap: code under torch.vmap is written as the plain operators that it comes to."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from glue_compiler.compat import vmap_calls
from glue_compiler.errors import first_line
from glue_compiler.fx.values import has_value, leaves, requires_grad, value_of
from glue_compiler.pipeline.graph_pass import GraphPass, PassContext, PassResult
from glue_compiler.pipeline.results import Numerics, Skip

ORIGIN = ("stack_trace", "nn_module_stack")


class TraceVmap(GraphPass):
    """Write what ``torch.vmap`` computes as operators on whole batches, so that other passes can read it.

    Counts: ``traced``.
    """

    name: ClassVar[str] = "trace_vmap"
    numerics: ClassVar[Numerics] = Numerics.BITWISE

    def run(self, graph: fx.GraphModule, context: PassContext) -> PassResult:
        skips: list[Skip] = []
        traced = 0
        for nodes in vmap_calls.segments(graph.graph):
            inside = set(nodes)
            taken = dict.fromkeys(each for node in nodes for each in node.all_input_nodes)
            operands = [node for node in taken if node not in inside]
            results = [node for node in nodes if not node.users.keys() <= inside]
            reason = _why_not(nodes, [*operands, *results])
            plain = None
            if reason is None:
                try:
                    plain = _trace(nodes, operands, results, context)
                    reason = _why_not_plain(plain)
                except Exception as error:  # what torch cannot trace stays as it is
                    reason = f"torch cannot trace code under vmap: {first_line(error)}"
            if plain is None or reason is not None:
                skips.append(Skip(str(reason), node=nodes[0].name))
            elif context.fuel.take(f"write {nodes[-2].name} without vmap"):
                _write(graph.graph, nodes, operands, results, plain)
                traced += 1
        return PassResult(bool(traced), {"traced": traced}, tuple(skips))


def _why_not(nodes: Sequence[fx.Node], seen: Sequence[fx.Node]) -> str | None:
    if any(map(vmap_calls.is_of_another_transform, nodes)):
        return "another transform of torch.func is under vmap"
    if any(node.op not in ("call_function", "call_method") for node in nodes):
        return "code under vmap calls a module or another graph"
    if any(has_value(node) and any(map(requires_grad, leaves(value_of(node)))) for node in seen):
        return "code under vmap needs a gradient"
    return None


def _why_not_plain(plain: fx.GraphModule) -> str | None:
    for node in plain.graph.nodes:
        if node.op == "get_attr":
            return "code under vmap makes a constant"
        if isinstance(node.target, torch._ops.OpOverload) and (
            node.target._schema.is_mutable or torch.Tag.nondeterministic_seeded in node.target.tags
        ):
            return f"'{node.target}' under vmap writes memory, or draws random numbers"
    return None


def _trace(
    nodes: Sequence[fx.Node], operands: Sequence[fx.Node], results: Sequence[fx.Node], context: PassContext
) -> fx.GraphModule:
    def run(*values: Any) -> list[Any]:
        known = dict(zip(operands, values, strict=True))
        depth = 0
        try:
            for node in nodes:
                args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
                if node.op == "call_function":
                    known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
                else:
                    known[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
                depth += vmap_calls.level_change(node)
        finally:
            for _ in range(depth):
                vmap_calls.close_level()
        return [known[node] for node in results]

    with context.effects.fake_mode or contextlib.nullcontext():
        return make_fx(run)(*(value_of(node) for node in operands))


def _write(
    graph: fx.Graph,
    nodes: Sequence[fx.Node],
    operands: Sequence[fx.Node],
    results: Sequence[fx.Node],
    plain: fx.GraphModule,
) -> None:
    origin: dict[str, Any] = {key: nodes[-2].meta[key] for key in ORIGIN if key in nodes[-2].meta}
    written: dict[fx.Node, fx.Node] = dict(zip(plain.graph.find_nodes(op="placeholder"), operands, strict=True))
    with graph.inserting_before(nodes[0]):
        for node in plain.graph.nodes:
            if node.op == "call_function":
                written[node] = graph.node_copy(node, written.__getitem__)
                written[node].meta = {**origin, "example_value": node.meta["val"]}
    (made,) = plain.graph.output_node().args
    for old, new in zip(results, made, strict=True):  # type: ignore[arg-type]
        old.replace_all_uses_with(written[new])
    for node in reversed(nodes):
        graph.erase_node(node)
