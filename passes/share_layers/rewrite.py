"""Makes one body of the pieces that are alike, and a call of it in place of each."""

from __future__ import annotations

import operator

from torch import fx

from glue_compiler.compat import nested_graphs, tracing
from glue_compiler.fx.values import value_of
from glue_compiler.passes.share_layers.pieces import Piece
from glue_compiler.passes.share_layers.plan import SharedBody
from glue_compiler.passes.share_layers.steps import is_item


def share(gm: fx.GraphModule, bodies: tuple[SharedBody, ...], where: str) -> None:
    """Rewrite ``gm``, the ``"forward"`` or the ``"backward"``, in place."""
    writer = _Writer(gm)
    for body in bodies:
        name = nested_graphs.add_body(gm, writer.graph_of(body.pieces[0]), where)
        for piece in body.pieces:
            writer.call(name, piece)
    gm.recompile()


class _Writer:
    def __init__(self, gm: fx.GraphModule) -> None:
        self.graph = gm.graph
        self.replaced: dict[fx.Node, fx.Node] = {}
        """Steps that are gone → what has their values."""

    def graph_of(self, piece: Piece) -> fx.Graph:
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for operand in self._operands(piece):
            copies[operand] = graph.placeholder(operand.name)
            copies[operand].meta["val"] = value_of(operand)
        for node in (*piece.constants, *piece.nodes):
            copies[node] = graph.node_copy(node, copies.__getitem__)
            tracing.copy_node_attributes(node, copies[node])
        graph.output(tuple(copies[node] for node in piece.outputs))
        return graph

    def call(self, name: str, piece: Piece) -> None:
        # Items may stand further down, but none of their users stands before this.
        last = next(node for node in reversed(piece.nodes) if not is_item(node))
        with self.graph.inserting_after(last):
            body = self.graph.get_attr(name)
        with self.graph.inserting_after(body):
            call = nested_graphs.call_body(self.graph, body, name, self._operands(piece))
        call.meta["val"] = tuple(value_of(node) for node in piece.outputs)
        after = call
        results: dict[fx.Node, fx.Node] = {}
        for index, node in enumerate(piece.outputs):
            with self.graph.inserting_after(after):
                after = results[node] = self.graph.call_function(operator.getitem, (call, index))
            after.meta = {name: value for name, value in node.meta.items() if name != "eager_input_vals"}
        for node in piece.views:
            with self.graph.inserting_after(after):
                after = results[node] = self.graph.node_copy(node, lambda operand: results.get(operand, operand))
            tracing.copy_node_attributes(node, after)
        inside = set(piece.nodes)
        for node, result in results.items():
            node.replace_all_uses_with(result, delete_user_cb=lambda user: user not in inside)
        names = {result: node.name for node, result in results.items()}
        for node in reversed(piece.nodes):
            self.graph.erase_node(node)
        for result, name in names.items():
            tracing.set_name(result, name)  # a saved value has one name in both graphs
        self.replaced |= results

    def _operands(self, piece: Piece) -> list[fx.Node]:
        return [self.replaced.get(operand, operand) for operand in piece.operands]
