"""Follows logits through a graph: what is made of them, the losses they end in, and what else wants them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx

from glue_compiler.fx.effects import Kind
from glue_compiler.fx.operators import Call, Operators, Value, given_leaves
from glue_compiler.fx.value_numbering import Scope
from glue_compiler.fx.values import is_item, leaves, makes_tensor, requires_grad, tensors_in, value_of
from glue_compiler.passes.chunk_loss.heads import Head
from glue_compiler.passes.chunk_loss.losses import Site, site_of
from glue_compiler.passes.chunk_loss.row_steps import NotALoss
from glue_compiler.passes.chunk_loss.wide_values import Known, Wide, wide_result

aten = torch.ops.aten
_SIZES = (
    aten.sym_size,
    aten.sym_numel,
    aten.size,
    aten.numel,
    aten.dim,
    aten.is_floating_point,
    aten.sym_is_contiguous,
)


@dataclass
class Uses:
    """All uses of one head's logits.

    Attributes:
        wide: the values that are as wide as they are.
        nodes: those that hold such values, in order.
        sites: where they end in numbers of rows, or in one number, in order.
        outputs: (position in the graph's outputs, node, value).
        sizes: nodes that read nothing but sizes of them.
        dead: nodes whose results nothing needs.
    """

    wide: dict[Value, Wide] = field(default_factory=dict)
    nodes: list[fx.Node] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)
    outputs: list[tuple[int, fx.Node, Value]] = field(default_factory=list)
    sizes: list[fx.Node] = field(default_factory=list)
    dead: list[fx.Node] = field(default_factory=list)


class OtherUse(Exception):
    """``node`` uses the logits in a way that no loss without logits serves; the message says how."""

    def __init__(self, node: fx.Node, reason: str) -> None:
        super().__init__(reason)
        self.node = node


def dead_nodes(scope: Scope, operators: Operators) -> set[fx.Node]:
    """The nodes whose results nothing needs."""
    found: set[fx.Node] = set()
    for node in reversed(scope.graph.nodes):
        effects = operators.numbering.effects.get(node)
        if effects is not None and effects.kind is Kind.PURE and all(user in found for user in node.users):
            found.add(node)
    return found


def uses_of(head: Head, scope: Scope, operators: Operators, dead: set[fx.Node]) -> Uses:
    """All uses of the logits that ``head`` makes.

    Raises:
        OtherUse: for one that is not understood.
    """
    reader = _Reader(head, operators, dead)
    reader.read(scope.graph)
    return reader.uses


class _Reader:
    def __init__(self, head: Head, operators: Operators, dead: set[fx.Node]) -> None:
        self.operators = operators
        self.head = head
        self.dead = dead
        self.uses = Uses()
        self.known = Known(operators, self.uses.wide, {})
        self.inside = set(head.inside)
        self.ended: set[Value] = set()
        """Results of sites, and the other results of operators that end in one."""

    def read(self, graph: fx.Graph) -> None:
        meta = self.operators.meta(self.head.value)
        inside = {value.node for value in self.inside}
        grad_is_off = not all(map(self.operators.passes_gradients, inside))
        if grad_is_off and requires_grad(value_of(self.head.value.node)):
            raise NotALoss("one of its products, and not all, is made where no gradients are recorded")
        self.uses.wide[self.head.value] = Wide("logits", (), (), meta.rank - 1, meta.dtype, is_detached=grad_is_off)
        holders = set(inside)
        for node in graph.nodes:
            if node not in inside and holders.isdisjoint(node.all_input_nodes):
                continue
            if node in inside and self.head.shared is not None:  # moves of DTensors are no operators
                continue
            if node in self.dead:
                holders.add(node)
                self.uses.dead.append(node)
            else:
                self._visit(node, inside, holders)

    def _visit(self, node: fx.Node, inside: set[fx.Node], holders: set[fx.Node]) -> None:
        if node.op == "output":
            self._return(node, holders)
            return
        if is_item(node):
            self._take_item(node, holders)
            return
        known: set[Value] = self.inside | self.uses.wide.keys()
        given = [(arg, leaf) for arg, leaf in given_leaves(node) if arg in holders]
        calls = self.operators.calls(node)
        if calls is None and (given or tensors_in(value_of(node))):
            raise OtherUse(node, f"by {_name(node)}, which is not looked into")
        for arg, leaf in given:
            if self.operators.read(arg, node, leaf) not in known:
                raise OtherUse(node, "after they were written in place")
        for step, call in enumerate(calls or ()):
            self._read_call(node, step, call)
        results = [self.operators.value(node, leaf) for leaf, _ in enumerate(leaves(value_of(node)))]
        self._require_gradients(node, results)
        if any(value in self.uses.wide or value in self.inside for value in results):
            self._hold(node, holders)
        elif node not in inside and not tensors_in(value_of(node)):
            self.uses.sizes.append(node)
            if isinstance(value_of(node), tuple | list):
                holders.add(node)  # sizes are taken out of it
        elif not (self.ended - {site.value for site in self.uses.sites}).isdisjoint(results):
            holders.add(node)  # only items of it that sites give may be taken

    def _require_gradients(self, node: fx.Node, results: list[Value]) -> None:
        """What was understood of gradients is what is on record, so far as that says something."""
        if not requires_grad(value_of(self.head.value.node)):
            return
        sites = {site.value: site.is_detached or site.kind == "argmax" for site in self.uses.sites}
        for value, found in zip(results, leaves(value_of(node)), strict=True):
            is_detached = self.uses.wide[value].is_detached if value in self.uses.wide else sites.get(value, True)
            if not is_detached and not requires_grad(found):
                raise OtherUse(node, f"by {_name(node)}, which passes no gradients on")
            if is_detached and value in sites and requires_grad(found):  # as a view made under no_grad asks for one
                raise OtherUse(node, f"by {_name(node)}, which takes a gradient and passes none on")

    def _take_item(self, node: fx.Node, holders: set[fx.Node]) -> None:
        value = self.operators.value(node)
        if value in self.uses.wide:
            self._hold(node, holders)
        elif not makes_tensor(node):
            self.uses.sizes.append(node)
        elif value not in self.ended:
            raise OtherUse(node, "in a way that is not understood")

    def _hold(self, node: fx.Node, holders: set[fx.Node]) -> None:
        self.uses.nodes.append(node)
        holders.add(node)

    def _read_call(self, node: fx.Node, step: int, call: Call) -> None:
        operators, wide = self.operators, self.uses.wide
        arguments = [value for value in leaves(dict(call.arguments)) if isinstance(value, Value)]
        if not any(value in wide or value in self.inside for value in arguments):
            return
        record = operators.record(node)
        assert record is not None
        results = [Value(node, step, leaf) for leaf, _ in enumerate(record.operators[step].results)]
        if all(value in self.inside for value in results):
            return
        if call.operator in _SIZES:
            return
        if call.written:
            raise OtherUse(node, f"by {_operator(call)}, which writes in place")
        if any(value in self.inside and value not in wide for value in arguments):
            raise OtherUse(node, f"by {_operator(call)} before they are added up")
        try:
            site = site_of(call, node, step, wide, operators)
            if site is not None:
                is_detached = site.wide.is_detached or not self.operators.passes_gradients(node)
                self.uses.sites.append(site.detached() if is_detached else site)
                if site.kind == "logsumexp":
                    self.known.totals[site.value] = (site.wide, site.keepdim, is_detached)
                self.ended.update(results)
                return
            for value in results:
                found = wide_result(call, value, self.known)
                if found is None:
                    raise OtherUse(node, f"by {_operator(call)}")
                wide[value] = found
        except NotALoss as reason:
            raise OtherUse(node, f"by {_operator(call)}: {reason}") from None

    def _return(self, node: fx.Node, holders: set[fx.Node]) -> None:
        returned = node.args[0]
        for position, arg in enumerate(returned if isinstance(returned, tuple | list) else ()):
            if not isinstance(arg, fx.Node) or arg not in holders or arg in self.uses.sizes:
                continue
            value = self.operators.read(arg, node)
            wide = self.uses.wide.get(value)
            if wide is None:
                raise OtherUse(node, "by the graph's caller, after they were written or before they are added up")
            if wide.form != "logits":
                raise OtherUse(arg, f"by the graph's caller, who gets {wide.form.replace('_', ' ')} of them")
            self.uses.outputs.append((position, arg, value))


def _operator(call: Call) -> str:
    return str(call.operator).replace("aten.", "")


def _name(node: fx.Node) -> str:
    return str(node.target if node.op != "call_function" else getattr(node.target, "__name__", node.target))
