"""Which losses of a graph can be computed without its logits, and what takes their place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from glue_compiler.compat.graph_inputs import subclass_of
from glue_compiler.fx import bodies
from glue_compiler.fx.effects import EffectAnalysis
from glue_compiler.fx.gradient_strides import strides_are_seen
from glue_compiler.fx.index_operators import CONVERSIONS
from glue_compiler.fx.operators import UNTRACKED, Operators, Value
from glue_compiler.fx.value_numbering import Scope
from glue_compiler.fx.values import (
    expression,
    inputs_of,
    is_call,
    is_plain,
    leaves,
    most_bytes,
    requires_grad,
    storages_of,
    value_of,
    values_of,
)
from glue_compiler.ops.loss_costs import pays
from glue_compiler.passes.chunk_loss.groups import Group, groups_of
from glue_compiler.passes.chunk_loss.heads import Head, operands_of, read_head
from glue_compiler.passes.chunk_loss.losses import Site
from glue_compiler.passes.chunk_loss.row_steps import PUT_ROWS, NotALoss, is_row_operator
from glue_compiler.passes.chunk_loss.shared_heads import read_shared
from glue_compiler.passes.chunk_loss.uses import OtherUse, Uses, dead_nodes, uses_of
from glue_compiler.passes.chunk_loss.wide_values import OF_ENTROPY, Wide
from glue_compiler.pipeline.results import Skip

aten = torch.ops.aten

_LOSSES = (aten.cross_entropy_loss, aten.nll_loss_nd, aten.nll_loss, aten.nll_loss2d)
_ENDS = (*_LOSSES, aten.log_softmax, aten.logsumexp, aten.log)
"""Operators that say that what they are given are logits, or made of logits."""
_PASSED = (
    *CONVERSIONS,
    aten.tanh,
    aten.neg,
    aten.mul,
    aten.div,
    aten.log_softmax,
    aten.softmax,
    aten.exp,
    aten.sum,
    aten.gather,
)


@dataclass(frozen=True)
class Output:
    """Logits that the graph returns: output ``position``, which ``node`` holds."""

    position: int
    node: fx.Node
    wide: Wide


@dataclass
class Replacement:
    """The losses of one head."""

    scope: Scope
    head: Head
    uses: Uses
    groups: list[Group]
    outputs: list[Output]


@dataclass
class LossPlan:
    replacements: list[Replacement] = field(default_factory=list)
    skips: list[Skip] = field(default_factory=list)


@dataclass(frozen=True)
class Settings:
    """``keeps_logits``: why graphs that return them are left alone, or None. ``shape_env``: of the graph's symbols.
    ``ranks_agree``: ranks that share classes take the same losses, so that they can take them together."""

    keeps_logits: str | None
    shape_env: Any
    ranks_agree: bool


def may_have_losses(gm: fx.GraphModule, effects: EffectAnalysis) -> bool:
    """Does any node of a graph, or of a body in it, end in what takes logits?"""
    effects.read_modes(gm)
    for module in bodies.graph_modules(gm):
        for node in module.graph.nodes:
            record = effects.record_of(module, node)
            if record is not None and any(each.overload.overloadpacket in _ENDS for each in record.operators):
                return True
    return False


def plan_losses(operators: Operators, settings: Settings) -> LossPlan:
    """Plan for a graph and the bodies in it. Reads only."""
    plan = LossPlan()
    for scope in operators.numbering.scopes:
        dead: set[fx.Node] | None = None
        order = {node: place for place, node in enumerate(scope.graph.nodes)}
        for head in _heads(scope, operators, plan):
            dead = dead_nodes(scope, operators) if dead is None else dead
            try:
                plan.replacements.append(_replacement(head, scope, operators, settings, dead, order))
            except OtherUse as use:
                plan.skips.append(Skip.at(use.node, f"its logits are used {use}"))
            except NotALoss as reason:
                plan.skips.append(Skip.at(head.value.node, str(reason)))
    return plan


def _heads(scope: Scope, operators: Operators, plan: LossPlan) -> Iterator[Head]:
    """The products whose results end in losses; of losses that end none, the plan is told."""
    seen: set[Value] = set()
    for node in scope.graph.nodes:
        if not is_call(node) or not operators.dispatches(node, _ENDS):
            continue
        for call in operators.calls(node) or ():
            if call.operator not in _ENDS:
                continue
            found = _behind(call.arguments["self"], operators)
            head = (read_head(found, operators) or read_shared(found, operators)) if found is not None else None
            if head is None and call.operator in _LOSSES:
                plan.skips.append(Skip.at(node, _why_no_head(found, operators)))
            if head is not None and head.value not in seen and _holds(head, scope):
                seen.add(head.value)
                yield head


def _behind(value: Any, operators: Operators) -> Value | None:
    """What the numbers behind an operator's operand are made of, before they are scaled, cast, picked and reshaped."""
    while operators.is_tensor(value):
        call = operators.does(value)
        if call is None or not (is_row_operator(call.operator) or call.operator in _PASSED):
            return value
        source = call.arguments["self"]
        value = source if isinstance(source, Value) else call.arguments.get("other")
    return None


def _why_no_head(value: Value | None, operators: Operators) -> str:
    call = operators.does(value) if value is not None else None
    if value is not None and not isinstance(operators.shape(value)[-1], int):
        return "how many classes there are is not known when the graph is compiled"
    if value is not None and (value.step == UNTRACKED or (call is not None and call.written)):
        return "what it is a loss of was written in place"
    by = f"made by {str(call.operator).replace('aten.', '')}" if call is not None else "not made in this graph"
    return f"what it is a loss of is {by}, and not by a product of rows with a plain weight"


def _holds(head: Head, scope: Scope) -> bool:
    return all(value.node.graph is scope.graph for value in head.inside)


def _replacement(
    head: Head,
    scope: Scope,
    operators: Operators,
    settings: Settings,
    dead: set[fx.Node],
    order: dict[fx.Node, int],
) -> Replacement:
    uses = uses_of(head, scope, operators, dead)
    if not uses.sites:
        raise NotALoss("no loss of its rows is taken")
    _require_nodes(head, uses, operators)
    paths = [step.operator for wide in uses.wide.values() for step in wide.path]
    if PUT_ROWS in paths and any(term.bias is not None for term in head.terms):
        raise NotALoss("its logits are zeros where padding was, and a bias would be added there")
    if not pays(head.device.type, most_bytes(operators.meta(head.value), settings.shape_env)):
        raise NotALoss("its logits are small: computing them in chunks would cost more time than it saves memory")
    if head.shared is not None:
        _require_shared(head, uses, operators, settings)
    groups = groups_of(uses.sites, operators, order, head.shared is not None)
    outputs = [Output(position, node, uses.wide[value]) for position, node, value in uses.outputs]
    if outputs:
        _require_deferrable(head, outputs, scope, operators, settings)
    return Replacement(scope, head, uses, groups, outputs)


def _require_nodes(head: Head, uses: Uses, operators: Operators) -> None:
    """All operands lie in memory of plain tensors, and hold there until the losses are taken, and for backward."""
    graph = head.value.node.graph
    for site in uses.sites:
        if operators.node_of(site.value) is None:
            raise OtherUse(site.node, "inside of a call that does more")
        needed = [*operands_of(head), *_tensors_of(site)]
        for value in needed:
            node = operators.operand(value, site.node)
            if node is None:
                raise NotALoss(
                    "an operand of the product, or a target, is written in place before the loss is taken, "
                    "or is inside of a call that does more"
                )
            if node.graph is not graph:
                raise NotALoss("an operand of the product, or a target, is of another graph")
            is_shared = head.shared is not None and value in operands_of(head)
            if node.op == "placeholder" and not is_shared and (kind := subclass_of(node)) is not None:
                raise NotALoss(f"an operand of the product, or a target, is of a class of its own, {kind}")
        storages = storages_of([value_of(value.node) for value in needed])
        if requires_grad(value_of(site.node)) and not operators.numbering.is_unwritten_after(storages, site.node):
            raise NotALoss("an operand of the product, or a target, is written in place later, and backward reads it")
        turned = [operators.operand(term.weight.value, site.node) for term in head.terms if term.weight.is_transposed]
        if requires_grad(value_of(site.node)) and strides_are_seen([n for n in turned if n is not None], operators):
            raise NotALoss(
                "a hook or a backward of your own gets the gradient of a weight [K, V], and sees its strides"
            )


def _require_shared(head: Head, uses: Uses, operators: Operators, settings: Settings) -> None:
    """All that is taken of them can be put together from what each rank has of its own classes.

    Which writes reach the memory of a DTensor is not known: none may come after the product, whose operands are read
    where the loss is taken, and in backward.
    """
    if not settings.ranks_agree:
        raise NotALoss(
            "ranks share its classes, and no graph proves that all take the same losses; "
            "options={'assume': {'ranks_agree': True}} says so"
        )
    product = head.inside[0].node
    if any(write.time > operators.numbering.starts[product] for write in operators.numbering.writes):
        raise NotALoss("ranks share its classes, and memory is written after the product")
    for site in uses.sites:
        if site.kind == "argmax" or site.wide.form in OF_ENTROPY:
            raise NotALoss("ranks share its classes, and more is taken than sums over them and a target's logit")
        if site.loss is not None and site.loss.class_weight is not None and site.loss.label_smoothing:
            raise NotALoss("ranks share its classes, and a smoothed loss weighs them")
    if not all(requires_grad(value_of(node)) for _, node, _ in uses.outputs):
        raise NotALoss("ranks share its classes, and its logits are returned where no gradients are recorded")


def _tensors_of(site: Site) -> Iterator[Value]:
    if site.target is not None:
        yield site.target
    if site.loss is not None and site.loss.class_weight is not None:
        yield site.loss.class_weight
    given = leaves([step.arguments for step in site.wide.path])
    yield from (each for each in given if isinstance(each, Value))


def _require_deferrable(
    head: Head, outputs: list[Output], scope: Scope, operators: Operators, settings: Settings
) -> None:
    if settings.keeps_logits is not None:
        raise NotALoss(f"its logits are returned, and {settings.keeps_logits}")
    if scope.parent is not None:
        raise NotALoss("its logits leave a body that is checkpointed, or is called in another way")
    for term in head.terms:
        for value in (term.weight.value, term.bias):
            if value is not None and head.shared is None and not _is_of_an_input(value, scope):
                raise NotALoss(
                    "its logits are returned, and its weight is made in the graph; as an input it could wait"
                )
    storages = storages_of([value_of(operand.node) for operand in operands_of(head)])
    if not operators.numbering.is_unwritten_after(storages, head.value.node):
        raise NotALoss("its logits are returned, and an operand of the product is written in place later")
    needs_grad = any(requires_grad(value_of(operand.node)) for operand in operands_of(head))
    for output in outputs:
        tensor, wide = value_of(output.node), output.wide
        if wide.classes != tensor.dim() - 1 or not _is_contiguous(tensor):
            raise OtherUse(output.node, "by the graph's caller, in a layout of their own")
        if tensor.requires_grad != (needs_grad and torch.is_grad_enabled() and not wide.is_detached):
            raise OtherUse(output.node, "by the graph's caller, with other gradients than those of their operands")
    if len({operators.storage(operators.value(output.node)) for output in outputs}) < len(
        {output.node for output in outputs}
    ):
        raise NotALoss("its logits are returned twice, as views of each other")


def _is_of_an_input(value: Value, scope: Scope) -> bool:
    """Does it lie in the memory of an input?"""
    inputs = storages_of(values_of(inputs_of(scope.graph)))
    tensor = value_of(value.node)
    return isinstance(tensor, torch.Tensor) and is_plain(tensor) and storages_of([tensor]) <= inputs


def _is_contiguous(tensor: torch.Tensor) -> bool:
    step: Any = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if expression(size) != 1 and expression(stride) != step:
            return False
        step = step * expression(size)
    return True
