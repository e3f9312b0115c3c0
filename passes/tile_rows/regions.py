"""Which steps of a graph are worth doing in tiles: those around values whose rows are wider than what goes in and out.

In a transformer that is an MLP: its operands and results have the width of the model, what is between them a multiple.
Changes nothing.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from glue_compiler import compat
from glue_compiler.fx.storage_roots import storage_root
from glue_compiler.fx.values import expression, is_in_order, value_of
from glue_compiler.passes.tile_rows.rows import Rows, RowStep, find_row_steps, leading_dims, operands_of, row_elements

aten = torch.ops.aten

_PRODUCTS = {aten.mm.default, aten.addmm.default}
_AS_WIDE = 0.75
"""The part of the widest rows from which on others are tiled with them: LoRA, gates and their gradients have that."""


@dataclass(frozen=True)
class Region:
    """Steps that run tile by tile, in the graph's order.

    Attributes:
        rows: how many, as an expression.
        sliced: operands of which each tile takes its rows, and where they have them.
        steps: of each node, what it takes the rows of; of others it takes all.
        results: what others read of the steps' results, and where those have the rows.
        before: in front of this node all operands exist, and no result is read but by ``delayed``.
        delayed: what goes behind the tiles, in order.
        inner_bytes: of each row, the most that is alive between operands and results at a time.
    """

    nodes: tuple[fx.Node, ...]
    rows: Any
    sliced: Mapping[fx.Node, Rows]
    steps: Mapping[fx.Node, RowStep]
    results: Mapping[fx.Node, Rows]
    before: fx.Node
    delayed: tuple[fx.Node, ...]
    inner_bytes: int


@dataclass(frozen=True)
class Regions:
    found: tuple[Region, ...]
    left: tuple[tuple[fx.Node, str], ...]
    """Wide values that stay whole, and why."""


def find_regions(graph: fx.Graph, all_rows: Mapping[Any, int], left_alone: Collection[fx.Node] = ()) -> Regions:
    """Regions that may be written together, the widest first, without the nodes of ``left_alone``.

    Others may be found when these are written.
    """
    place = {node: i for i, node in enumerate(graph.nodes)}
    found: list[Region] = []
    left: dict[fx.Node, str] = {}
    taken = set(left_alone)
    near: set[fx.Node] = set()
    for rows, count in all_rows.items():
        finder = _Finder(place, rows, count, find_row_steps(graph, rows))
        for region in finder.regions(taken, left if rows is next(iter(all_rows)) else {}):
            taken.update(region.nodes)
            if near.isdisjoint(touched := _touched(region)):
                near |= touched
                found.append(region)
    return Regions(tuple(found), tuple(left.items()))


def numbers_of_rows(graph: fx.Graph, least: int) -> dict[Any, int]:
    """How many rows products have that have ``least`` or more: as an expression, and what it was in the trace.

    The two most frequent numbers, for an encoder and a decoder.
    """
    found: dict[Any, list[int]] = {}
    for node in graph.nodes:
        if node.target in _PRODUCTS and isinstance(value_of(node), torch.Tensor):
            rows = value_of(node).shape[0]
            if (count := compat.size_when_traced(rows) or 0) >= least:
                found.setdefault(expression(rows), []).append(count)
    return {rows: found[rows][0] for rows in sorted(found, key=lambda rows: -len(found[rows]))[:2]}


def _touched(region: Region) -> set[fx.Node]:
    """What writing a region moves, replaces or relies on the place of."""
    readers = {user for node in region.results for user in node.users}
    operands = {operand for node in region.nodes for operand in node.all_input_nodes if operand.op == "call_function"}
    return {*region.nodes, *readers, *operands, region.before, *region.delayed}


class _Finder:
    def __init__(self, place: Mapping[fx.Node, int], rows: Any, count: int, steps: Mapping[fx.Node, RowStep]) -> None:
        self.place = place
        self.rows = rows
        self.count = count
        self.steps = steps
        self.width: dict[fx.Node, int] = {}
        """Elements of one row, of each value that is made of rows."""
        for node, step in steps.items():
            if step.result is Rows.LEADING:
                self.width[node] = row_elements(node, rows)
            elif step.result is Rows.COLUMNS:
                self.width[node] = value_of(node).shape[0]

    def regions(self, taken: set[fx.Node], left: dict[fx.Node, str]) -> Iterator[Region]:
        """Around the widest rows, then around others that are half as wide or more."""
        widths = {self.width[node] for node in self.width if node.target in _PRODUCTS}
        done: set[fx.Node] = set()
        for width in sorted((w for w in widths if 2 * w >= max(widths)), reverse=True):
            wide = {node for node in self.width if self.width[node] >= _AS_WIDE * width} - done
            done |= wide
            for cluster in self._clusters(wide - taken):
                region = self._region(cluster, taken)
                if isinstance(region, Region):
                    yield region
                elif region and width == max(widths):
                    first = min(cluster, key=self.place.__getitem__)
                    left.setdefault(first, f"{width} numbers a row stay whole: {region}")

    def _clusters(self, wide: set[fx.Node]) -> Iterator[set[fx.Node]]:
        """Wide values that are made of each other or read together."""
        waiting = set(wide)
        for first in self._in_order(wide):
            if first not in waiting:
                continue
            waiting.discard(first)
            cluster, stack = set(), [first]
            while stack:
                node = stack.pop()
                cluster.add(node)
                near = {*self._operands(node), *node.users, *(o for u in node.users for o in self._operands(u))}
                stack += near & waiting
                waiting -= near
            yield cluster

    def _operands(self, node: fx.Node) -> Iterable[fx.Node]:
        return self.steps[node].sliced if node in self.steps else ()

    def _region(self, cluster: set[fx.Node], taken: set[fx.Node]) -> Region | str:
        inside = cluster | {
            user
            for node in cluster
            for user in node.users
            if self._keeps_rows_apart(user, {node}) and user not in taken
        }
        if reason := self._close(inside, taken):
            return reason
        self._add_sums_of_results(inside, taken)
        self._add_what_makes_operands(inside, taken)
        if reason := self._leave_views_outside(inside):
            return reason
        nodes = self._in_order(inside)
        for node in nodes:
            if any(operand in inside for operand in set(operands_of(node)) - self.steps[node].sliced):
                return f"'{node.name}' needs all rows of a value that is made of rows"
        operands = {operand for node in nodes for operand in self.steps[node].sliced} - inside
        sliced = {operand: self._rows_of(operand) for operand in self._in_order(operands)}
        results = {node: self.steps[node].result for node in nodes if not inside.issuperset(node.users)}
        if not results:
            return ""
        inner, outer = self._inner_bytes(nodes, results), sum(self._row_bytes(node) for node in results)
        if inner <= 2 * outer:
            whole = [user for node in results if node in cluster for user in node.users if user not in inside]
            return f"'{whole[0].name}' ({whole[0].target}) reads all rows at once" if whole else ""
        if any(rows is Rows.LEADING and not is_in_order(value_of(node)) for node, rows in results.items()):
            return "a result does not lie in the order of its sizes"
        known = {expression(size) for operand in sliced for size in value_of(operand).shape}
        if not all(self._is_known_from(known, node) for node, where in results.items() if where is Rows.LEADING):
            return "a result has sizes that no operand has"
        if not all(self._is_sliceable(operand) for operand in sliced):
            return "rows of an operand do not follow each other in memory"
        before, delayed = self._place_of(nodes, inside, results)
        end = max(before, nodes[-1].next, key=self.place.__getitem__)
        if any(_writes(node) for node in self._from(nodes[0], end)):
            return "memory is written between its steps"
        if early := [node for node in delayed if not _may_wait(node)]:
            return f"'{early[0].name}' ({early[0].target}) reads a result before all operands are there"
        steps = {node: self.steps[node] for node in nodes}
        return Region(tuple(nodes), self.rows, sliced, steps, results, before, delayed, inner)

    def _place_of(
        self, nodes: list[fx.Node], inside: set[fx.Node], results: Iterable[fx.Node]
    ) -> tuple[fx.Node, tuple[fx.Node, ...]]:
        """Behind the last step, but in front of the first reader of a result; or behind the last operand, and readers
        before that have to wait."""
        last = max((o for node in nodes for o in operands_of(node) if o not in inside), key=self.place.__getitem__)
        readers = {user for node in results for user in node.users} - inside
        first = min(readers, key=self.place.__getitem__)
        if self.place[first] > self.place[last]:
            return min(first, nodes[-1].next, key=self.place.__getitem__), ()
        waiting: set[fx.Node] = set()
        for node in self._from(first, last):
            if node in readers or not waiting.isdisjoint(node.all_input_nodes):
                waiting.add(node)
        return last.next, tuple(node for node in self._from(first, last) if node in waiting)

    def _from(self, first: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
        node = first
        while node is not last:
            yield node
            node = node.next

    def _in_order(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        return sorted(nodes, key=self.place.__getitem__)

    def _rows_of(self, node: fx.Node) -> Rows:
        return self.steps[node].result if node in self.steps else Rows.LEADING

    def _keeps_rows_apart(self, node: fx.Node, inside: set[fx.Node]) -> bool:
        step = self.steps.get(node)
        return step is not None and all(o in step.sliced for o in operands_of(node) if o in inside)

    def _close(self, inside: set[fx.Node], taken: set[fx.Node]) -> str:
        """Add what is on a path from one step to another; why that cannot be, if it cannot."""
        first, last = (choose(map(self.place.__getitem__, inside)) for choose in (min, max))
        behind: set[fx.Node] = set()
        stack = [user for node in inside for user in node.users]
        while stack:
            node = stack.pop()
            if node not in behind and self.place[node] <= last:
                behind.add(node)
                stack += node.users
        between: set[fx.Node] = set()
        stack = [operand for node in inside for operand in operands_of(node)]
        while stack:
            node = stack.pop()
            if node not in between and node in behind and self.place[node] >= first:
                between.add(node)
                stack += operands_of(node)
        for node in self._in_order(between - inside):
            if node in taken or not self._keeps_rows_apart(node, inside | between):
                return f"'{node.name}' ({node.target}) stands between and does not keep rows apart"
        inside |= between
        return ""

    def _leave_views_outside(self, inside: set[fx.Node]) -> str:
        """What is read outside and is a view goes out as what it is a view of; why that cannot be, if it cannot."""
        for node in reversed(self._in_order(inside)):
            root = storage_root(node)
            if root is node or inside.issuperset(node.users):
                continue
            if root not in inside or inside.isdisjoint(node.users):
                inside.discard(node)
            elif self.steps[node].result is Rows.COLUMNS:
                return f"'{node.name}', a transposed view, is read both inside and outside"
        return ""

    def _add_sums_of_results(self, inside: set[fx.Node], taken: set[fx.Node]) -> None:
        """Of two results that are only added up, one goes out."""
        while True:
            ends = {chain[-1]: chain for node in inside if (chain := self._chain(node, inside))}
            sums = {
                user
                for end in ends
                for user in end.users
                if user not in taken and len(user.all_input_nodes) > 1 and ends.keys() >= set(user.all_input_nodes)
            }
            sums = {node for node in sums if self._keeps_rows_apart(node, set(ends))}
            if not sums:
                return
            chosen = min(sums, key=self.place.__getitem__)
            inside.add(chosen)
            for end in chosen.all_input_nodes:
                inside.update(ends[end])

    def _add_what_makes_operands(self, inside: set[fx.Node], taken: set[fx.Node]) -> None:
        """Steps that nobody else reads, where what they read takes no more room than what they make: casts, views."""
        waiting = self._in_order(inside)
        while waiting:
            for operand in self._in_order(self.steps[waiting.pop()].sliced - inside - taken):
                step = self.steps.get(operand)
                if step is None or operand.target in _PRODUCTS or not inside.issuperset(operand.users):
                    continue
                sliced = {each for node in inside for each in self.steps[node].sliced}
                if sum(map(self._row_bytes, step.sliced - sliced)) <= self._row_bytes(operand):
                    inside.add(operand)
                    waiting.append(operand)

    def _chain(self, node: fx.Node, inside: set[fx.Node]) -> list[fx.Node]:
        """A result that is read in one place, and the steps that do no more than change it one by one."""
        if self.steps[node].result is not Rows.LEADING or not inside.isdisjoint(node.users):
            return []
        chain = [node]
        while len(chain[-1].users) == 1:
            (user,) = chain[-1].users
            step = self.steps.get(user)
            if step is None or step.result is not Rows.LEADING or len(user.all_input_nodes) > 1:
                return chain
            chain.append(user)
        return []

    def _row_bytes(self, node: fx.Node) -> int:
        """Of one row; of a sum over all rows, its part."""
        if node in self.steps and self.steps[node].result is Rows.SUMMED:
            return value_of(node).nbytes // self.count
        width = self.width[node] if node in self.width else row_elements(node, self.rows)
        return width * value_of(node).element_size()

    def _inner_bytes(self, nodes: list[fx.Node], results: Mapping[fx.Node, Rows]) -> int:
        """The most that is alive of a row at a time, but for results: what products read and write, as a compiler that
        fuses keeps the rest in its kernels."""
        outer = {storage_root(node) for node in results}
        products = [node for node in nodes if node.target in _PRODUCTS]
        kept = {storage_root(o) for node in products for o in (node, *node.all_input_nodes)} & set(nodes)
        last = {storage_root(o): i for i, node in enumerate(nodes) for o in node.all_input_nodes}
        alive = most = 0
        ends: dict[int, int] = {}
        for i, node in enumerate(nodes):
            if node in kept - outer:
                alive += self._row_bytes(node)
                ends[last.get(node, i)] = ends.get(last.get(node, i), 0) + self._row_bytes(node)
            most = max(most, alive)
            alive -= ends.pop(i, 0)
        return most

    def _several(self, node: fx.Node) -> list[int]:
        """Of the dimensions that rows lie in, those that are not of size 1."""
        leading = leading_dims(node, self.rows)
        return [dim for dim, size in enumerate(value_of(node).shape[:leading]) if expression(size) != 1]

    def _is_known_from(self, known: Collection[Any], result: fx.Node) -> bool:
        several = [expression(value_of(result).shape[dim]) for dim in self._several(result)]
        return len(several) == 1 or all(isinstance(size, int) or size in known for size in several)

    def _is_sliceable(self, operand: fx.Node) -> bool:
        """Can rows be taken without a copy? Those in several dimensions must follow each other in memory."""
        sizes = list(map(expression, value_of(operand).shape))
        strides = list(map(expression, value_of(operand).stride()))
        return all(strides[one] == strides[two] * sizes[two] for one, two in itertools.pairwise(self._several(operand)))


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _may_wait(node: fx.Node) -> bool:
    """May others run in front of it? Random numbers are drawn in order."""
    if isinstance(node.target, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded not in node.target.tags
    return node.target is operator.getitem
