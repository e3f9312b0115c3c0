"""Matches the bodies of all experts against each other, and reads them as steps over all rows at once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from glue_compiler.fx.effects import Kind
from glue_compiler.fx.operators import UNTRACKED, Call, Value
from glue_compiler.fx.reachable import reachable
from glue_compiler.fx.values import expression, makes_tensor, tensors_in, value_of
from glue_compiler.passes.group_experts.checks import ReadGraph
from glue_compiler.passes.group_experts.gathers import EXPERT_COLUMN, KEPT, Gathered, gathered, weights_behind_sum
from glue_compiler.passes.group_experts.pieces import ExpertPieces
from glue_compiler.passes.group_experts.plan import LeftAlone
from glue_compiler.passes.group_experts.row_sets import SLOT, TOKEN, RowSet, as_many_rows, is_known
from glue_compiler.passes.group_experts.row_wise import Rows, mixes_rows, out_of_place
from glue_compiler.passes.group_experts.steps import (
    AllRows,
    Gather,
    Nodes,
    PerExpert,
    Product,
    Reshape,
    Row,
    RowWise,
    Separate,
    SlotWeight,
    Stacked,
    Step,
    Vector,
    fold_biases,
)

aten = torch.ops.aten
ExpertRows = RowSet | ExpertPieces


class BodyMatcher:
    """Walks from what the experts give back to their rows, in all experts at once.

    ``body`` are the nodes walked that depend on the rows; ``peeled`` those that the steps look through: ``W[e]``.

    Args:
        rows: of each expert, in order.
        last: where the grouped form will read what the body reads.
        ends: nodes that hold rows of several experts; what is computed from them is no expert's.
    """

    def __init__(
        self,
        graph: ReadGraph,
        rows: Sequence[ExpertRows],
        last: fx.Node,
        ends: Collection[fx.Node],
    ) -> None:
        self.gm = graph.gm
        self.sets = graph.sets
        self.operators = graph.operators
        self.effects = graph.effects
        self.rows = rows
        self.last = last
        self.counts = [each.count for each in rows]
        self.pieces = {each.node: each for pieces in rows if isinstance(pieces, ExpertPieces) for each in pieces.pieces}
        self.dependent = _dependents(rows, ends)
        self._rows_alone = self.dependent.keys() - set(ends)
        self.body: set[fx.Node] = set()
        self.peeled: set[fx.Node] = set()
        self._steps: list[Step] = []
        self._seen: dict[Nodes, Row] = {}

    def match(self, added: Sequence[fx.Node]) -> tuple[Step, ...]:
        """The steps that compute the rows that all experts add. Raises LeftAlone."""
        if not all(node in self.dependent for node in added):
            raise LeftAlone("what the experts add does not depend on their rows")
        last = self._row(tuple(added))
        return fold_biases(self._steps[: last.step + 1], self.operators)

    # -- values

    def _row(self, nodes: Nodes) -> Row:
        if nodes not in self._seen:
            step = self._step(nodes)
            self._steps.append(step)
            self._seen[nodes] = Row(len(self._steps) - 1)
            self.body.update(nodes)
        return self._seen[nodes]

    def _step(self, nodes: Nodes) -> Step:
        first = nodes[0]
        for node, rows in zip(nodes, self.rows, strict=True):
            if self.dependent[node] != {rows.root}:
                raise LeftAlone("the experts depend on each other's rows", node)
            if (node.op, node.target) != (first.op, first.target):
                raise LeftAlone(
                    f"the experts' bodies differ: '{_call(first)}' in that of expert 0, '{_call(node)}' in that of "
                    f"expert {rows.expert}",
                    node,
                )
            if self.effects[node].writes and out_of_place(self.operators, node) is None:
                raise LeftAlone("the body writes a tensor in place; out of place it would be grouped", node)
            if not isinstance(value_of(node), torch.Tensor | tuple | list):
                raise LeftAlone("the body computes with the number of its rows", node)
        self._check_same_kind(nodes)
        return self._leaf(nodes) or self._reshape(nodes) or self._product(nodes) or self._row_wise(nodes)

    def _check_same_kind(self, nodes: Nodes) -> None:
        """Equal dtypes, devices and shapes, but for the number of rows."""
        described = [
            [(t.dtype, t.device, self._shape(t, i)) for t in tensors_in(value_of(node))] for i, node in enumerate(nodes)
        ]
        for i, other in enumerate(described):
            if other != described[0]:
                raise LeftAlone("the experts' values have different shapes or dtypes", nodes[i])

    def _shape(self, tensor: torch.Tensor, expert: int) -> tuple[Any, ...]:
        return tuple("rows" if expression(s) == self.counts[expert] else expression(s) for s in tensor.shape)

    def _tail(self, node: fx.Node) -> tuple[Any, ...]:
        """Sizes after the rows; leading dimensions of size 1 are dropped from the grouped form."""
        value = value_of(node)
        if not isinstance(value, torch.Tensor):
            return ()
        shape = self._shape(value, 0)
        if shape.count("rows") != 1 or any(size != 1 for size in shape[: shape.index("rows")]):
            raise LeftAlone("a value of the body does not have its rows in the first dimension", node)
        return shape[shape.index("rows") + 1 :]

    def _rows_first(self, node: fx.Node) -> bool:
        """Is the grouped form, ``[rows, *tail]``, laid out as the node is?"""
        return all(
            expression(tensor.shape[0]) == self.counts[0] for tensor in tensors_in(value_of(node)) if tensor.dim()
        )

    # -- steps that the grouped form writes in another way

    def _leaf(self, nodes: Nodes) -> Step | None:
        """A step that takes the rows of all experts from where the body takes those of one."""
        return self._piece(nodes) if self.pieces else self._gather(nodes)

    def _piece(self, nodes: Nodes) -> Step | None:
        if nodes[0] not in self.pieces:
            return None
        pieces = [self.pieces.get(node) for node in nodes]
        source = self._shared([piece.rows if piece is not None else None for piece in pieces])
        if source is None:
            raise LeftAlone("the experts take their rows from different tensors", nodes[0])
        return AllRows(nodes[0], self._tail(nodes[0]), source)

    def _gather(self, nodes: Nodes) -> Step | None:
        first = nodes[0]
        pairs = zip(nodes, self.rows, strict=True)
        each = [found for node, rows in pairs if (found := gathered(node, rows, self.sets, self._rows_alone))]
        if len(each) < len(nodes):
            return None
        described = {(one.dims, one.new_dims, one.is_leading) for one in each}
        source = self._gathered_from(nodes, each) if len(described) == 1 else None
        if source is None and len({self.operators.storage(one.source) for one in each} - {None}) == 1:
            raise LeftAlone("what the body gathers from is written while the loop runs", first)
        if source is None:
            raise LeftAlone("the experts index different tensors, or in different ways", first)
        value, dims = value_of(source), each[0].dims
        tokens, top_k = self._routed_shape()
        if not as_many_rows(value.shape[0], tokens):
            raise LeftAlone("the body gathers from a tensor with another number of rows than there are tokens", first)
        if not value.is_floating_point():
            raise LeftAlone("the body gathers from a tensor that is not floating point", first)
        by_token = dims == (TOKEN, KEPT) and isinstance(value.shape[1], int)
        if by_token and (each[0].is_leading or not each[0].new_dims):
            return Gather(first, self._tail(first), source)
        if dims == (TOKEN,):
            return SlotWeight(first, self._tail(first), source, by_expert=False)
        if dims == (TOKEN, SLOT) and is_known(value.shape[1], top_k):
            return SlotWeight(first, self._tail(first), source, by_expert=False)
        has_column = dims == (TOKEN, EXPERT_COLUMN) and isinstance(value.shape[1], int)
        if has_column and value.shape[1] > self.rows[-1].expert:
            return SlotWeight(first, self._tail(first), source, by_expert=True)
        raise LeftAlone("the body indexes a tensor in a way that is neither by token nor by token and slot", first)

    def _gathered_from(self, nodes: Nodes, each: list[Gathered]) -> fx.Node | None:
        """The one tensor that all experts gather from."""
        shared = self._shared([one.source for one in each])
        if shared is not None:
            return shared
        behind = [weights_behind_sum(one.source, rows, self.sets) for one, rows in zip(each, self.rows, strict=True)]
        if None in behind or each[0].dims != (TOKEN,):
            return None
        source = self._shared([found[0] for found in behind if found])
        if source is not None:
            # Looked through, so what they read must not be written before the grouped form reads it.
            for found in behind:
                self.peeled.update(found[1] if found else ())
        return source

    def _routed_shape(self) -> tuple[Any, Any]:
        """(tokens, slots of each)."""
        rows: Any = self.rows[0]
        shape = value_of(self._node(rows.mask.selected)).shape
        return shape[0], shape[1] if len(shape) == 2 else 1

    def _reshape(self, nodes: Nodes) -> Step | None:
        """Also ``[1, rows, H]`` to ``[rows, H]``: the sizes are read from the result, not from the arguments."""
        first = nodes[0]
        call = self.operators.only_call(first)
        if call is None:
            return None
        changes_leading = call.overload in (aten.squeeze.dim, aten.unsqueeze.default) and call.arguments["dim"] == 0
        if call.overload is not aten.view.default and not changes_leading:
            return None
        sources = self._row_operands(nodes, "self")
        if sources is None:
            return None
        tail = self._tail(first)
        if not all(isinstance(size, int) for size in (*tail, *self._tail(sources[0]))):
            raise LeftAlone("the body changes the shape of its rows to one that is not known in numbers", first)
        return Reshape(first, tail, self._row(sources))

    def _operands_of(self, nodes: Nodes, name: str) -> list[Any]:
        calls = [self.operators.only_call(node) for node in nodes]
        return [call.arguments.get(name) if call is not None else None for call in calls]

    def _row_operands(self, nodes: Nodes, name: str) -> Nodes | None:
        """The nodes of an operand of all experts' calls, if it is made of their rows."""
        values = self._operands_of(nodes, name)
        if any(isinstance(value, Value) and value.step == UNTRACKED for value in values):
            raise LeftAlone("an operand of the loop is written while the loop runs", nodes[0])
        found = [self.operators.node_of(value) for value in values]
        sources = tuple(node for node in found if node is not None and node in self.dependent)
        return sources if len(sources) == len(nodes) else None

    def _product(self, nodes: Nodes) -> Step | None:
        first = nodes[0]
        match self.operators.only_call(first):
            case Call(aten.linear):
                names = ("input", "weight", "bias")
            case Call(aten.matmul):
                names = ("self", "other", "")
            case _:
                return None
        weights, biases = (self._operands_of(nodes, name) for name in names[1:])
        if not all(isinstance(weight, Value) and weight.node not in self.dependent for weight in weights):
            raise LeftAlone("the body multiplies rows by a matrix that is made of rows", first)
        has_bias = biases[0] is not None
        if any((bias is not None) != has_bias for bias in biases):
            raise LeftAlone("some experts have a bias and some have none", first)
        shared_bias = self._shared(biases) if has_bias else None
        if self._shared(weights) is not None and (not has_bias or shared_bias is not None):
            return None  # the same matrix for all experts: an ordinary call
        rows = self._row_operands(nodes, names[0])
        if rows is None:
            raise LeftAlone("the body multiplies an expert's matrix by something else than rows", first)
        if value_of(rows[0]).dim() != 2 or not self._rows_first(rows[0]) or self.operators.rank(weights[0]) != 2:
            raise LeftAlone("a product of the body is not one of a [rows, K] by a matrix", first)
        self._check_same_weights(weights, first)
        weight, flipped = self._per_expert(weights, matrix=True)
        bias = None
        if has_bias:
            self._check_same_weights(biases, first)
            bias, _ = self._per_expert(biases, matrix=False)
        transposed = names[0] == "self"
        return Product(first, self._tail(first), self._row(rows), weight, transposed != flipped, bias)

    def _check_same_weights(self, values: Sequence[Value], user: fx.Node) -> None:
        metas = [self.operators.meta(value) for value in values]
        first = metas[0]
        if any((meta.dtype, meta.device, meta.shape) != (first.dtype, first.device, first.shape) for meta in metas):
            raise LeftAlone("the experts' weights differ in shape, dtype or device", user)
        if not first.dtype.is_floating_point or not all(isinstance(size, int) for size in first.shape):
            raise LeftAlone("the experts' weights are not floating-point tensors of known sizes", user)

    # -- steps that stay as they are

    def _row_wise(self, nodes: Nodes) -> Step:
        first = nodes[0]
        op: str = first.op
        target: Any = first.target
        written: list[Any] = [(node.args, node.kwargs) for node in nodes]
        if self.effects[first].writes:
            forms = [out_of_place(self.operators, node) for node in nodes]
            op, target = "call_function", forms[0][0] if forms[0] is not None else None
            written = [form[1:] for form in forms if form is not None]
        elif self.effects[first].kind is not Kind.PURE:
            what = "draws random numbers" if self.effects[first].random else "does more than compute its result"
            raise LeftAlone(f"'{_call(first)}' {what}", first)
        vectors: set[fx.Node] = set()
        args, kwargs = self._arguments(written, nodes, vectors)
        if not self._rows_first(first):
            raise LeftAlone("a value of the body does not have its rows in the first dimension", first)

        def kind(operand: fx.Node) -> Rows | None:
            return Rows.ROWS if operand in self.dependent else Rows.VECTOR if operand in vectors else None

        problem = mixes_rows(self.operators, self.gm, first, kind, self.counts[0])
        if problem:
            raise LeftAlone(f"'{_call(first)}' is not row by row: {problem}", first)
        return RowWise(first, self._tail(first), op, target, args, kwargs)

    def _arguments(self, written: Sequence[Any], users: Nodes, vectors: set[fx.Node]) -> Any:
        """All experts' arguments → the grouped call's, with Row and Vector in place of nodes."""
        constants: set[str] = set()
        operands: list[list[fx.Node]] = []
        for arguments in written:
            operands.append([])
            fx.map_arg(arguments, operands[-1].append)
            constants.add(repr(fx.map_arg(arguments, lambda node: "fx.Node")))
        if len(constants) > 1:
            raise LeftAlone(f"the experts call '{_call(users[0])}' with different constants", users[0])
        found = iter([self._operand(each, users, vectors) for each in zip(*operands, strict=True)])
        return fx.map_arg(written[0], lambda node: next(found))

    def _operand(self, nodes: Nodes, users: Nodes, vectors: set[fx.Node]) -> Any:
        user = users[0]
        inside = [node in self.dependent for node in nodes]
        if all(inside):
            if any(self.sets.index(self.operators.value(node)) for node in nodes):
                raise LeftAlone("the body computes with the indices of its rows", user)
            row = self._row(nodes)
            if not self._rows_first(nodes[0]):
                raise LeftAlone("a value of the body does not have its rows in the first dimension", user)
            return row
        if any(inside):
            raise LeftAlone("the experts' bodies differ", user)
        found = [self.operators.read(node, at) for node, at in zip(nodes, users, strict=True)]
        shared = self._shared(found)
        if shared is not None:
            return shared
        vectors.add(nodes[0])
        return self._vector(found, user)

    def _vector(self, values: Sequence[Value], user: fx.Node) -> Vector:
        if not all(self.operators.is_tensor(value) for value in values):
            raise LeftAlone("the experts compute with different numbers", user)
        self._check_same_weights(values, user)
        shape = self.operators.shape(values[0])
        rank = value_of(user).dim() if makes_tensor(user) else -1
        fits = (rank == 2 and (len(shape) < 2 or (len(shape) == 2 and shape[0] == 1))) or (rank == 1 and shape == ())
        if not fits:
            raise LeftAlone("a per-expert operand is neither a matrix of a product nor a vector", user)
        per_expert, _ = self._per_expert(values, matrix=False)
        return Vector(per_expert, shape, (*shape[-1:],) if shape else (1,) * (rank - 1))

    # -- operands that depend on no row

    def _shared(self, values: Sequence[Any]) -> fx.Node | None:
        """A node of the one value that all are, or None."""
        number = self.operators.number(values[0]) if isinstance(values[0], Value) else None
        if any(not isinstance(value, Value) or self.operators.number(value) != number for value in values):
            return None
        return self._node(values[0])

    def _node(self, value: Value) -> fx.Node:
        """Where the grouped form finds ``value``."""
        found = self.operators.operand(value, self.last)
        if found is None:
            raise LeftAlone("an operand of the loop is written while the loop runs, or no node holds it", value.node)
        return found

    def _per_expert(self, values: Sequence[Value], matrix: bool) -> tuple[PerExpert, bool]:
        """The stacked tensor behind ``W[e]``, or the nodes; and whether a transposition was looked through."""
        peeled = list(values)
        flipped = False
        while matrix and all(self._untransposed(value) is not None for value in peeled):
            self.peeled.update(value.node for value in peeled)
            peeled, flipped = [self._untransposed(value) for value in peeled], not flipped  # type: ignore[misc]
        bases = [self._subscripted(value, rows.expert) for value, rows in zip(peeled, self.rows, strict=True)]
        if all(base is not None for base in bases):
            base = self._shared(bases)
            if base is not None:
                self.peeled.update(value.node for value in peeled)
                return Stacked(base), flipped
        return Separate(tuple(self._node(value) for value in peeled)), flipped

    def _untransposed(self, value: Value) -> Value | None:
        """``w`` for ``w.t()``, ``w.T``, ``w.mT`` and ``w.transpose(0, 1)`` of a matrix."""
        match self.operators.does(value):
            case Call(aten.permute, {"self": source, "dims": (0 | 1 | -1 | -2 as first, second)}) if (
                first % 2 > second % 2
            ):
                return source
        return None

    def _subscripted(self, value: Value, expert: int) -> Value | None:
        """``base`` if the value is ``base[expert]``, or that item of ``base.unbind()``."""
        match self.operators.does(value):
            case Call(aten.select, {"self": base, "dim": int() as dim, "index": int() as index}):
                shape = self.operators.shape(base)
                is_of_expert = isinstance(shape[0], int) and not dim % len(shape) and index % shape[0] == expert
                return base if is_of_expert else None
        return None


def _dependents(rows: Sequence[ExpertRows], ends: Collection[fx.Node]) -> dict[fx.Node, set[fx.Node]]:
    """Node → the roots of the rows that it is computed from; what one of ``ends`` holds is no longer followed."""
    found: dict[fx.Node, set[fx.Node]] = {}
    for each in rows:
        for node in reachable(each.entries, lambda node: () if node in ends else node.users):
            found.setdefault(node, set()).add(each.root)
    return found


def _call(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
