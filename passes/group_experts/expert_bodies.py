"""Matches the bodies of all experts against each other, and reads them as steps over all rows at once."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from glue_compiler.fx.effects import EffectAnalysis, Effects, Kind
from glue_compiler.fx.spellings import MULTIPLY, SUM, TRANSPOSE
from glue_compiler.fx.values import expression, tensors_in, value_of
from glue_compiler.passes.group_experts.expert_rows import ExpertRows, dependents
from glue_compiler.passes.group_experts.left_alone import LeftAlone
from glue_compiler.passes.group_experts.row_sets import SLOT, TOKEN, RowSet, RowSets, as_many_rows, names_a_token_once
from glue_compiler.passes.group_experts.row_wise import mixes_rows, out_of_place
from glue_compiler.passes.group_experts.steps import (
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

_LINEAR = {torch._C._nn.linear, torch.nn.functional.linear}
_MATMUL = {torch.matmul, operator.matmul, torch.mm, "matmul", "mm", "__matmul__"}
_RESHAPE = {torch.reshape, "reshape", "view", "flatten", torch.flatten}


class BodyMatcher:
    """Walks from the values that are added back to the experts' rows, in all experts at once.

    ``body`` are the nodes walked that depend on the rows; ``peeled`` those that the steps look through: ``W[e]``.
    """

    def __init__(
        self,
        row_sets: Sequence[ExpertRows],
        sets: RowSets,
        effects: dict[fx.Node, Effects],
        numbers: dict[fx.Node, int],
        analysis: EffectAnalysis,
        top_k: int,
    ) -> None:
        self.row_sets = row_sets
        self.sets = sets
        self.effects = effects
        self.numbers = numbers
        self.analysis = analysis
        self.top_k = top_k
        self.counts = [rows.count for rows in row_sets]
        self.dependent = self._dependents()
        self.body: set[fx.Node] = set()
        self.peeled: set[fx.Node] = set()
        self._steps: list[Step] = []
        self._seen: dict[Nodes, Row] = {}

    def match(self, added: Sequence[fx.Node]) -> tuple[Step, ...]:
        """The steps that compute the rows that all experts add. Raises LeftAlone."""
        if not all(node in self.dependent for node in added):
            raise LeftAlone("what the experts add does not depend on their rows")
        last = self._row(tuple(added))
        return fold_biases(self._steps[: last.step + 1])

    def _dependents(self) -> dict[fx.Node, set[fx.Node]]:
        """Node → the roots that it is computed from."""
        return dependents({rows.root: rows.root for rows in self.row_sets})

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
        for node, rows in zip(nodes, self.row_sets, strict=True):
            if self.dependent[node] != {rows.root}:
                raise LeftAlone("the experts depend on each other's rows", node)
            if (node.op, node.target) != (first.op, first.target):
                raise LeftAlone(
                    f"the experts' bodies differ: '{_call(first)}' in that of expert 0, '{_call(node)}' in that of "
                    f"expert {rows.expert}",
                    node,
                )
            if self.effects[node].writes and out_of_place(node, self.effects) is None:
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
        return self._gather(nodes)

    def _gather(self, nodes: Nodes) -> Step | None:
        first = nodes[0]
        selects = first.target in (torch.index_select, "index_select") and first.args[1] == 0 and not first.kwargs
        if first.target is not operator.getitem and not selects:
            return None
        source = first.args[0]
        if not isinstance(source, fx.Node) or source in self.dependent:
            return None
        sources = tuple(node.args[0] for node in nodes)
        shared = self._shared(sources)  # type: ignore[arg-type]
        per_expert = [self._index_items(node, rows) for node, rows in zip(nodes, self.row_sets, strict=True)]
        kinds = per_expert[0]
        summed = shared is None
        if summed:
            shared = self._weights_behind_sums(sources)  # type: ignore[arg-type]
        if shared is None or any(item != kinds for item in per_expert):
            raise LeftAlone("the experts index different tensors, or in different ways", first)
        value = value_of(sources[0] if summed else shared)  # type: ignore[arg-type]
        prefix = 0
        while kinds and kinds[0] is None:
            kinds, prefix = kinds[1:], prefix + 1
        if kinds and kinds[-1] is Ellipsis:
            kinds = kinds[:-1]
        added_dims = 0
        while len(kinds) > 1 and kinds[-1] is None:
            kinds, added_dims = kinds[:-1], added_dims + 1
        while len(kinds) > 1 and kinds[-1] == "all":
            kinds = kinds[:-1]
        if not isinstance(value, torch.Tensor) or not as_many_rows(value.shape[0], self._tokens()):
            raise LeftAlone("the body gathers from a tensor with another number of rows than there are tokens", first)
        if not value.is_floating_point():
            raise LeftAlone("the body gathers from a tensor that is not floating point", first)
        if kinds == [TOKEN] and value.dim() == 2 and not added_dims and isinstance(value.shape[1], int):
            return Gather(first, self._tail(first), shared)
        if kinds == [TOKEN] and value.dim() == 1:
            return SlotWeight(first, self._tail(first), shared, by_expert=False)
        if kinds in ([TOKEN, SLOT], [TOKEN, "expert"]) and value.dim() == 2:
            wanted = self.top_k if kinds[1] == SLOT else self.row_sets[-1].expert + 1
            fits = isinstance(value.shape[1], int) and (
                value.shape[1] == wanted or (kinds[1] != SLOT and value.shape[1] > wanted)
            )
            if fits:
                return SlotWeight(first, self._tail(first), shared, by_expert=kinds[1] != SLOT)
        raise LeftAlone("the body indexes a tensor in a way that is neither by token nor by token and slot", first)

    def _weights_behind_sums(self, nodes: Nodes) -> fx.Node | None:
        """``w``, if the nodes are ``(w * (selected == e)).sum(-1)``: at a row of e, the weight of its slot."""
        found: list[fx.Node] = []
        for node, rows in zip(nodes, self.row_sets, strict=True):
            dim = node.args[1] if len(node.args) == 2 else node.kwargs.get("dim")
            product = node.args[0] if node.args else None
            if (
                not isinstance(rows, RowSet)
                or node.target not in SUM
                or dim not in (1, -1, (1,), (-1,))
                or not isinstance(product, fx.Node)
            ):
                return None
            if product.target not in MULTIPLY or len(product.args) != 2 or not names_a_token_once(rows, self.effects):
                return None
            for weights, mask in (product.args, product.args[::-1]):
                read = self.sets.mask(mask)
                if read is not None and (read.axes, read.expert) == ((TOKEN, SLOT), rows.expert):
                    same = self._shared((read.selected, rows.mask.selected)) is not None
                    if same and isinstance(weights, fx.Node):
                        found.append(weights)
                        # Looked through, so what they read must not be written before the grouped form reads it.
                        self.peeled.update({node, product, *read.nodes})
        first = value_of(found[0]) if len(found) == len(nodes) else None
        if not isinstance(first, torch.Tensor) or first.dtype != value_of(nodes[0]).dtype:
            return None
        return self._shared(tuple(found))

    def _tokens(self) -> Any:
        rows: Any = self.row_sets[0]
        return value_of(rows.mask.selected).shape[0]

    def _index_items(self, node: fx.Node, rows: ExpertRows) -> list[Any]:
        """The parts of an index, as words: token, slot, expert, None, Ellipsis, all."""
        index = [node.args[2]] if node.target is not operator.getitem else node.args[1]
        described: list[Any] = []
        for item in index if isinstance(index, tuple | list) else [index]:
            found = self.sets.index(item)
            if found is not None and found.rows.root is rows.root:
                described.extend(found.axes)
            elif type(item) is int and item == rows.expert:
                described.append("expert")
            elif item is None or item is Ellipsis:
                described.append(item)
            elif item == slice(None):
                described.append("all")
            else:
                raise LeftAlone("the body indexes with something else than its rows", node)
        return described

    def _reshape(self, nodes: Nodes) -> Step | None:
        """Also ``[1, rows, H]`` to ``[rows, H]``: the sizes are read from the result, not from the arguments."""
        first = nodes[0]
        drops_leading = first.target in ("squeeze", torch.squeeze) and first.args[1:] == (0,)
        if first.target not in _RESHAPE and not drops_leading:
            return None
        sources: Nodes = tuple(node.args[0] for node in nodes)  # type: ignore[misc]
        if not all(isinstance(source, fx.Node) and source in self.dependent for source in sources):
            return None
        tail = self._tail(first)
        if not all(isinstance(size, int) for size in (*tail, *self._tail(sources[0]))):
            raise LeftAlone("the body changes the shape of its rows to one that is not known in numbers", first)
        return Reshape(first, tail, self._row(sources))

    def _product(self, nodes: Nodes) -> Step | None:
        first = nodes[0]
        if first.target not in _LINEAR | _MATMUL:
            return None
        operands = [_bound(node) for node in nodes]
        weights: Nodes = tuple(operand[1] for operand in operands)
        biases = [operand[2] if len(operand) > 2 else None for operand in operands]
        if not all(isinstance(weight, fx.Node) and weight not in self.dependent for weight in weights):
            raise LeftAlone("the body multiplies rows by a matrix that is made of rows", first)
        has_bias = biases[0] is not None
        if any((bias is not None) != has_bias for bias in biases):
            raise LeftAlone("some experts have a bias and some have none", first)
        shared_bias = self._shared(tuple(biases)) if has_bias else None  # type: ignore[arg-type]
        if self._shared(weights) is not None and (not has_bias or shared_bias is not None):
            return None  # the same matrix for all experts: an ordinary call
        xs: Nodes = tuple(operand[0] for operand in operands)
        if not all(isinstance(x, fx.Node) and x in self.dependent for x in xs):
            raise LeftAlone("the body multiplies an expert's matrix by something else than rows", first)
        if value_of(xs[0]).dim() != 2 or not self._rows_first(xs[0]) or value_of(weights[0]).dim() != 2:
            raise LeftAlone("a product of the body is not one of a [rows, K] by a matrix", first)
        self._check_same_weights(weights, first)
        transposed = first.target in _MATMUL
        weight, flipped = self._per_expert(weights, matrix=True)
        bias = None
        if has_bias:
            self._check_same_weights(tuple(biases), first)  # type: ignore[arg-type]
            bias, _ = self._per_expert(tuple(biases), matrix=False)  # type: ignore[arg-type]
        return Product(first, self._tail(first), self._row(xs), weight, transposed != flipped, bias)

    def _check_same_weights(self, nodes: Nodes, user: fx.Node) -> None:
        values = [value_of(node) for node in nodes]
        if any((v.dtype, v.device, v.shape) != (values[0].dtype, values[0].device, values[0].shape) for v in values):
            raise LeftAlone("the experts' weights differ in shape, dtype or device", user)
        if not values[0].is_floating_point() or not all(isinstance(size, int) for size in values[0].shape):
            raise LeftAlone("the experts' weights are not floating-point tensors of known sizes", user)

    # -- steps that stay as they are

    def _row_wise(self, nodes: Nodes) -> Step:
        first = nodes[0]
        # Operators in autocast regions cannot always be run without them; everything else is pure or refused.
        target = out_of_place(first, self.effects) if self.effects[first].writes else first.target
        if target is None or (self.effects[first].kind is not Kind.PURE and target is first.target):
            what = "draws random numbers" if self.effects[first].random else "does more than compute its result"
            raise LeftAlone(f"'{_call(first)}' {what}", first)
        args = self._argument([node.args for node in nodes], first)
        kwargs = self._argument([node.kwargs for node in nodes], first)
        if not self._rows_first(first):
            raise LeftAlone("a value of the body does not have its rows in the first dimension", first)
        problem = mixes_rows(first, target, lambda node: node in self.dependent, self.counts[0], self.analysis)
        if problem:
            raise LeftAlone(f"'{_call(first)}' is not row by row: {problem}", first)
        return RowWise(first, self._tail(first), target, args, kwargs)

    def _argument(self, values: list[Any], user: fx.Node) -> Any:
        """One argument of all experts' calls → the grouped call's, with Row and Vector in place of nodes."""
        first = values[0]
        if isinstance(first, fx.Node):
            return self._operand(values, user)
        if isinstance(first, tuple | list) and all(
            isinstance(value, tuple | list) and len(value) == len(first) for value in values
        ):
            # Not type(first)(...): fx keeps immutable lists.
            items = [self._argument([value[i] for value in values], user) for i in range(len(first))]
            return tuple(items) if isinstance(first, tuple) else items
        if isinstance(first, dict) and all(
            isinstance(value, dict) and value.keys() == first.keys() for value in values
        ):
            return {key: self._argument([value[key] for value in values], user) for key in first}
        if isinstance(first, slice) and all(isinstance(value, slice) for value in values):
            return slice(
                *(self._argument([getattr(v, part) for v in values], user) for part in ("start", "stop", "step"))
            )
        if any(type(value) is not type(first) or repr(value) != repr(first) for value in values):
            raise LeftAlone(f"the experts call '{_call(user)}' with different constants", user)
        return first

    def _operand(self, values: list[Any], user: fx.Node) -> Any:
        if not all(isinstance(value, fx.Node) for value in values):
            raise LeftAlone("the experts' bodies differ", user)
        nodes: Nodes = tuple(values)
        inside = [node in self.dependent for node in nodes]
        if all(inside):
            if any(self.sets.index(node) for node in nodes):
                raise LeftAlone("the body computes with the indices of its rows", user)
            row = self._row(nodes)
            if not self._rows_first(nodes[0]):
                raise LeftAlone("a value of the body does not have its rows in the first dimension", user)
            return row
        if any(inside):
            raise LeftAlone("the experts' bodies differ", user)
        shared = self._shared(nodes)
        if shared is not None:
            return shared
        return self._vector(nodes, user)

    def _vector(self, nodes: Nodes, user: fx.Node) -> Vector:
        if not all(isinstance(value_of(node), torch.Tensor) for node in nodes):
            raise LeftAlone("the experts compute with different numbers", user)
        self._check_same_weights(nodes, user)
        shape = tuple(value_of(nodes[0]).shape)
        rank = value_of(user).dim() if isinstance(value_of(user), torch.Tensor) else -1
        fits = (rank == 2 and (len(shape) < 2 or (len(shape) == 2 and shape[0] == 1))) or (rank == 1 and shape == ())
        if not fits:
            raise LeftAlone("a per-expert operand is neither a matrix of a product nor a vector", user)
        values, _ = self._per_expert(nodes, matrix=False)
        return Vector(values, shape)

    # -- operands that depend on no row

    def _shared(self, nodes: Nodes) -> fx.Node | None:
        """The one value that all nodes are, or None."""
        first = nodes[0]
        number = self.numbers.get(first)
        same = all(node is first or (number is not None and self.numbers.get(node) == number) for node in nodes)
        return first if same else None

    def _per_expert(self, nodes: Nodes, matrix: bool) -> tuple[PerExpert, bool]:
        """The stacked tensor behind ``W[e]``, or the nodes; and whether a transposition was looked through."""
        peeled: Nodes = nodes
        flipped = False
        while matrix and all(_untransposed(node) is not None for node in peeled):
            self.peeled.update(peeled)
            peeled, flipped = tuple(_untransposed(node) for node in peeled), not flipped  # type: ignore[misc]
        bases = [_subscripted(node, rows.expert) for node, rows in zip(peeled, self.row_sets, strict=True)]
        if all(base is not None for base in bases):
            base = self._shared(tuple(bases))  # type: ignore[arg-type]
            if base is not None:
                self.peeled.update(peeled)
                return Stacked(base), flipped
        return Separate(peeled), flipped


def _bound(node: fx.Node) -> list[Any]:
    """Positional operands of a product: x, weight, bias."""
    names = {"weight": 1, "mat2": 1, "other": 1, "tensor2": 1, "bias": 2}
    operands = list(node.args)
    for name, value in node.kwargs.items():
        if name not in names:
            raise LeftAlone(f"'{_call(node)}' is called with '{name}='", node)
        operands += [None] * (names[name] + 1 - len(operands))
        operands[names[name]] = value
    return operands


def _untransposed(node: fx.Node) -> fx.Node | None:
    """``w`` for ``w.t()``, ``w.T``, ``w.mT`` and ``w.transpose(0, 1)`` of a matrix."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or not isinstance(value_of(source), torch.Tensor) or value_of(source).dim() != 2:
        return None
    if node.target in ("t", torch.t) or (node.target is getattr and node.args[1] in ("T", "mT")):
        return source
    swaps = node.target in TRANSPOSE and {dim % 2 for dim in node.args[1:] if isinstance(dim, int)} == {0, 1}
    return source if swaps else None


def _subscripted(node: fx.Node, expert: int) -> fx.Node | None:
    """``base`` if the node is ``base[expert]``, or that item of ``base.unbind()``."""
    if node.target is not operator.getitem or not isinstance(node.args[0], fx.Node):
        return None
    source = node.args[0]
    index: Any = node.args[1]
    items = list(index) if isinstance(index, tuple | list) else [index]
    while len(items) > 1 and (items[-1] is Ellipsis or items[-1] == slice(None)):
        items.pop()
    if len(items) != 1 or type(items[0]) is not int or items[0] != expert:
        return None
    value = value_of(source)
    if isinstance(value, torch.Tensor):
        return source if isinstance(value.shape[0], int) else None
    if source.target in ("unbind", torch.unbind) and (source.args[1:] in ((), (0,))) and not source.kwargs:
        return source.args[0] if isinstance(source.args[0], fx.Node) else None
    return None


def _call(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
