"""Does the steps of a region one tile of rows after the other."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

import glue_compiler.ops.turns  # noqa: F401  defines the operator
from glue_compiler import compat
from glue_compiler.fx.values import expression, value_of
from glue_compiler.passes.tile_rows.regions import Region
from glue_compiler.passes.tile_rows.rows import SIZED, Rows, leading_dims

aten = torch.ops.aten


def tile(graph: fx.Graph, region: Region, tiles: int, grain: int) -> None:
    """Rewrite ``graph`` in place. All tiles but the last are of one size, a multiple of ``grain`` rows, or empty."""
    _Writer(graph, region, tiles, grain).write()


@dataclass
class _Writer:
    graph: fx.Graph
    region: Region
    tiles: int
    grain: int

    def write(self) -> None:
        region, graph = self.region, self.graph
        with graph.inserting_before(region.before):
            sizes = self._sizes()
            pieces = {operand: self._split(operand, sizes) for operand in region.sliced}
            made: dict[fx.Node, list[fx.Node]] = {node: [] for node in region.results}
            before: list[fx.Node] = []
            first: dict[fx.Node, fx.Node] = {}
            for number, size in enumerate(sizes):
                copies = {operand: self._in_turn(operand, each[number], before) for operand, each in pieces.items()}
                for node in region.nodes:
                    copies[node] = self._copy(node, copies, size, first.get(node) if size == sizes[0] else None)
                first = first or copies
                for node in region.results:
                    made[node].append(copies[node])
                    self._add_up(node, made[node])
                before = [each[-1] for each in made.values()]
            joined = {node: self._joined(node, made[node]) for node in region.results}
        for node in region.delayed:
            region.before.prepend(node)
        inside = set(region.nodes)
        for node, whole in joined.items():
            node.replace_all_uses_with(whole, delete_user_cb=lambda user: user not in inside)
        names = {whole: node.name for node, whole in joined.items()}
        for node in reversed(region.nodes):
            graph.erase_node(node)
        for whole, name in names.items():
            compat.set_name(whole, name)  # a saved value has one name in both graphs

    def _call(self, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call with the marks of ``like``."""
        node = self._unknown(like, target, args, kwargs)
        args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
        mode = compat.fake_mode_of([value_of(like)])
        with compat.speculation(mode, getattr(mode, "shape_env", None)):
            node.meta["val"] = target(*args, **kwargs)
        return node

    def _unknown(self, like: fx.Node, target: Any, args: Any, kwargs: Any) -> fx.Node:
        """The same, without a value yet."""
        node = self.graph.call_function(target, args, kwargs)
        node.meta = {name: value for name, value in like.meta.items() if name not in ("eager_input_vals", "val")}
        return node

    def _sizes(self) -> list[Any]:
        """Of the tiles: numbers, or nodes where the number of rows is not known."""
        rows = self.region.rows
        if isinstance(rows, int):
            size = rows // self.tiles // self.grain * self.grain
            return [size] * (self.tiles - 1) + [rows - size * (self.tiles - 1)]
        total = self._total()
        grains = self._number(operator.floordiv, total, self.tiles * self.grain)
        each = self._number(operator.mul, grains, self.grain)
        rest = self._number(operator.sub, total, self._number(operator.mul, each, self.tiles - 1))
        return [each] * (self.tiles - 1) + [rest]

    def _total(self) -> Any:
        """The number of rows."""
        if isinstance(self.region.rows, int):
            return self.region.rows
        operand, where = next(iter(self.region.sliced.items()))
        dims = [1] if where is Rows.COLUMNS else range(leading_dims(operand, self.region.rows))
        sizes = [self._number(aten.sym_size.int, operand, dim) for dim in dims]
        return functools.reduce(lambda one, two: self._number(operator.mul, one, two), sizes)

    def _number(self, target: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta["val"] = target(*fx.map_arg(args, value_of))
        return node

    def _split(self, operand: fx.Node, sizes: list[Any]) -> list[fx.Node]:
        like = next(node for node in self.region.nodes if operand in self.region.steps[node].sliced)
        shape = value_of(operand).shape
        if self.region.sliced[operand] is Rows.COLUMNS:
            return self._pieces(like, operand, sizes, 1)
        leading = leading_dims(operand, self.region.rows)
        several = [dim for dim in range(leading) if expression(shape[dim]) != 1]
        if len(several) == 1:
            return self._pieces(like, operand, sizes, leading - 1)
        flat = self._call(like, aten.view.default, operand, [self._total(), *shape[leading:]])
        ones = [1] * (leading - 1)
        pieces = self._pieces(like, flat, sizes, 0)
        return [
            self._call(like, aten.view.default, piece, [*ones, size, *shape[leading:]])
            for piece, size in zip(pieces, sizes, strict=True)
        ]

    def _pieces(self, like: fx.Node, operand: fx.Node, sizes: list[Any], dim: int) -> list[fx.Node]:
        split = self._call(like, aten.split_with_sizes.default, operand, sizes, dim)
        return [self._call(like, operator.getitem, split, number) for number in range(len(sizes))]

    def _in_turn(self, operand: fx.Node, piece: fx.Node, before: list[fx.Node]) -> fx.Node:
        """A piece of an operand, for a tile that comes behind the one that made ``before``."""
        like = next(node for node in self.region.nodes if operand in self.region.steps[node].sliced)
        return self._call(like, torch.ops.glue.in_turn.default, piece, before) if before else piece

    def _copy(self, node: fx.Node, copies: dict[fx.Node, fx.Node], size: Any, same: fx.Node | None) -> fx.Node:
        """``same``: the copy for a tile of the same size. With sizes that vary, to work its value out takes long."""
        sliced = self.region.steps[node].sliced
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: copies[each] if each in sliced else each)
        if node.target in SIZED:
            leading = leading_dims(node, self.region.rows)
            args = (args[0], [*[1] * (leading - 1), size, *value_of(node).shape[leading:]], *args[2:])
        if same is None:
            return self._call(node, node.target, *args, **kwargs)
        copy = self._unknown(node, node.target, args, kwargs)
        copy.meta["val"] = value_of(same)
        return copy

    def _add_up(self, node: fx.Node, made: list[fx.Node]) -> None:
        if self.region.results[node] is Rows.SUMMED and len(made) == 2:
            made[:] = [self._call(node, aten.add.Tensor, *made)]

    def _joined(self, node: fx.Node, made: list[fx.Node]) -> fx.Node:
        if self.region.results[node] is Rows.SUMMED:
            return made[0]
        leading = leading_dims(node, self.region.rows)
        whole = self._call(node, aten.cat.default, made, leading - 1)
        several = [size for size in value_of(node).shape[:leading] if expression(size) != 1]
        if len(several) == 1:
            return whole
        return self._call(node, aten.view.default, whole, [self._size(size) for size in value_of(node).shape])

    def _size(self, size: Any) -> Any:
        """A size of a result: a number, or a node."""
        if isinstance(size, int):
            return size
        found = (
            (operand, dim)
            for operand in self.region.sliced
            for dim, other in enumerate(value_of(operand).shape)
            if expression(other) == expression(size)
        )
        return self._number(aten.sym_size.int, *next(found))
