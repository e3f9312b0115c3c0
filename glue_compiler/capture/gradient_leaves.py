"""``x.requires_grad_()`` of a tensor that traced code has made, such as an embedding's output, without a graph break.

peft and transformers put that call behind the embedding of a model whose base is frozen, so that checkpoints in it see
an input that asks for a gradient. Dynamo ends the graph there (2.11), or where anything that comes of the tensor is
returned (2.13).

Lets the call through and leaves it out of the graph: what traced code reads of the tensor afterwards is as in eager
code, and what is lost is the tensor's own gradient. That is safe where nobody can have it: no other name stands for the
tensor, as one does where an operator gave its operand back; the graph returns nothing that would ask for no gradient
without the call (what the tensor alone makes ask); and nothing in the graph asks for gradients, or whether there are to
be any. The first is asked where the call is traced, the others are read from the operators in :func:`leaves_of`, which
runs them on fake tensors that do not ask. Other frames are left to Dynamo. The tensor itself may be returned, as where
layers are regions of their own, if nothing in the graph gives it a gradient: the result is made to ask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from glue_compiler.compat import dynamo_tracing, operators, symbols
from glue_compiler.compat.operator_calls import call_of
from glue_compiler.errors import GlueGradientLeafError
from glue_compiler.fx import bodies
from glue_compiler.fx.effects import EffectAnalysis, Kind
from glue_compiler.fx.reachable import reachable
from glue_compiler.fx.records import Made
from glue_compiler.fx.values import has_value, is_call, is_plain, storage_of, storages_of, tensors_in, value_of

LEAF = "glue_gradient_leaf"
"""Key in ``node.meta`` of a tensor that asks for a gradient in eager code, and not in the graph."""


class GradientLeaves(dynamo_tracing.TracingObserver):
    """Marks those of one frame."""

    def asks_for_gradient(self, node: fx.Node) -> bool:
        value = value_of(node)
        if not isinstance(value, torch.Tensor) or not is_plain(value) or value.requires_grad:
            return False
        if not _is_new(node, value):
            return False
        node.meta[LEAF] = True
        return True


def _is_new(node: fx.Node, value: torch.Tensor) -> bool:
    """Does ``node`` make a tensor in memory of its own, in eager code too, where nothing else lies by now?"""
    record = EffectAnalysis(symbols.fake_mode_of([value])).record_of(None, node)
    if record is None or len(record.result) != 1 or not isinstance(made := record.result[0], Made):
        return False
    others = [value_of(other) for other in node.graph.nodes if other is not node]
    return operators.allocates(record.operators[made.step].overload) and storage_of(value) not in storages_of(others)


def leaves_of(gm: fx.GraphModule, effects: EffectAnalysis) -> list[int]:
    """Which results of ``gm`` are tensors that a call that was left out of it made ask for a gradient.

    Raises:
        GlueGradientLeafError: if ``gm`` is not eager's program without those calls, but for these results.
    """
    if not any(LEAF in node.meta for node in gm.graph.nodes):
        return []
    effects.read_modes(gm)
    changed = _changed_in(gm, {}, effects)
    returned = _output_of(gm).args[0]
    results = returned if isinstance(returned, tuple | list) else ()
    for node in _output_of(gm).all_input_nodes:
        if node in changed and not (node in results and _has_all_of_its_gradient(node)):
            raise GlueGradientLeafError(f"'{node.name}' is returned, and asks for a gradient by requires_grad_() only")
    return [at for at, each in enumerate(results) if isinstance(each, fx.Node) and each in changed]


def _has_all_of_its_gradient(node: fx.Node) -> bool:
    """Is ``node`` a tensor that is made to ask, and does nothing in the graph give it a gradient?"""
    users = reachable([node], lambda each: each.users) - {node}
    return LEAF in node.meta and not any(any(_asks(value_of(user))) for user in users if user.op != "output")


def asking(call: Callable[..., Any], leaves: Sequence[int]) -> Callable[..., Any]:
    """``call``, whose results at ``leaves`` ask for gradients."""

    def compiled(*args: Any) -> Any:
        results = call(*args)
        for at in leaves:
            results[at].requires_grad_()
        return results

    return compiled if leaves else call


def _changed_in(gm: fx.GraphModule, changed: dict[fx.Node, Any], effects: EffectAnalysis) -> dict[fx.Node, Any]:
    """The nodes of ``gm`` that ask for a gradient in eager code and not in the graph → their values in the graph.

    Args:
        changed: the placeholders of which that is true.
    """
    calls = {call.node: call for call in bodies.run_once_calls(gm)}
    for node in gm.graph.nodes:
        found = effects.of(gm, node)
        if found.kind is Kind.BARRIER:
            raise GlueGradientLeafError(f"'{node.name}' may ask for gradients after requires_grad_()")
        if LEAF in node.meta:
            changed[node] = value_of(node).detach()
        elif is_call(node) and not changed.keys().isdisjoint(node.all_input_nodes):
            if _asks_by_what_is_wanted(gm, node, changed, effects):
                raise GlueGradientLeafError(f"'{node.name}' is no operator of torch's, and runs after requires_grad_()")
            if found.writes:  # the record of what is written to is the one that it has last
                raise GlueGradientLeafError(f"'{node.name}' writes after requires_grad_()")
            if has_value(node) and not any(_asks(value_of(node))):  # the call makes no fewer tensors ask
                continue
            if node in calls:
                value = _result_of_body(calls[node], changed, effects)
            elif node.target is operators.AUTOGRAD_FUNCTION and has_value(node):
                value = _result_of_function(node, changed)
            else:
                value = _run(gm, node, changed, effects)
            if not has_value(node) or _asks(value) != _asks(value_of(node)):
                changed[node] = value
    return changed


def _asks_by_what_is_wanted(
    gm: fx.GraphModule, node: fx.Node, changed: dict[fx.Node, Any], effects: EffectAnalysis
) -> bool:
    """May its backward compute another gradient because that of a ``changed`` operand is not wanted?

    That of a custom operator may (``ctx.needs_input_grad``), where it gives a gradient to another operand. A product
    with frozen weights of 4 bits gives none.
    """
    record = effects.record_of(gm, node)
    if record is None or not any(operators.operators_in(each.overload) for each in record.operators):
        return False
    return any(any(_asks(changed.get(operand, value_of(operand)))) for operand in node.all_input_nodes)


def _result_of_body(call: bodies.BodyCall, changed: dict[fx.Node, Any], effects: EffectAnalysis) -> Any:
    if len(call.operands) != len(call.placeholders):
        raise GlueGradientLeafError(f"the body of '{call.node.name}' does not take what it is passed")
    bound = zip(call.placeholders, call.operands, strict=True)
    given = {place: changed[arg] for place, arg in bound if isinstance(arg, fx.Node) and arg in changed}
    inside = _changed_in(call.body, given, effects)
    return fx.map_arg(_output_of(call.body).args[0], lambda node: inside.get(node, value_of(node)))


def _result_of_function(node: fx.Node, changed: dict[fx.Node, Any]) -> Any:
    """All results of an ``autograd.Function`` that may ask do so if any operand asks, and none does otherwise."""
    operands = [changed.get(operand, value_of(operand)) for operand in node.all_input_nodes]
    if any(_asks(operands)):
        return value_of(node)
    return fx.node.map_aggregate(value_of(node), lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf)


def _run(gm: fx.GraphModule, node: fx.Node, changed: dict[fx.Node, Any], effects: EffectAnalysis) -> Any:
    def argument(operand: fx.Node) -> Any:
        value = changed.get(operand, value_of(operand))
        # Aliases: what is on record is not to be written, nor to be part of another autograd graph.
        return fx.node.map_aggregate(value, lambda leaf: _alias(leaf) if isinstance(leaf, torch.Tensor) else leaf)

    mode, fake_mode = effects.mode_of(gm, node), effects.fake_mode
    args, kwargs = fx.map_arg((node.args, node.kwargs), argument)
    try:
        # What asks for a gradient on record was made with autograd on.
        with mode.entered(), torch.enable_grad(), symbols.speculation(fake_mode, fake_mode and fake_mode.shape_env):
            return call_of(node, args, kwargs)
    except Exception as failure:
        raise GlueGradientLeafError(f"'{node.name}' does not run after requires_grad_(): {failure}") from failure


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _asks(value: Any) -> list[bool]:
    return [tensor.requires_grad for tensor in tensors_in(value)]


def _output_of(gm: fx.GraphModule) -> fx.Node:
    return next(iter(reversed(gm.graph.nodes)))
