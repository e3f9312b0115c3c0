"""Row counts: sums of them that the host reads, and how many rows a vector of them counts. Changes nothing."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from glue_compiler.fx.effects import Effects, Kind
from glue_compiler.fx.operators import Call, Operators, Value
from glue_compiler.fx.values import Symbolic, expression, value_of
from glue_compiler.passes.group_experts.copies import Fill, copied_from, fill_of
from glue_compiler.passes.group_experts.row_sets import EXPERT, SLOT, TOKEN, Mask, RowSets, are_distinct

aten = torch.ops.aten
Item = tuple[Value, int]
"""``vector[index]``."""

_INTEGERS = (torch.int32, torch.int64)
_READS = (aten.item, aten._local_scalar_dense)
COUNT_DTYPES = (torch.int32, torch.int64, torch.float32, torch.float64)
"""They hold every number of rows that a batch can have."""


@dataclass(frozen=True)
class CountSum:
    """Where rows that are sorted begin or end: a constant plus items of vectors, each as often as it says beside it."""

    constant: int = 0
    items: frozenset[tuple[Item, int]] = frozenset()

    def __add__(self, other: CountSum) -> CountSum:
        total = dict(self.items)
        for item, times in other.items:
            total[item] = total.get(item, 0) + times
        left = frozenset((item, times) for item, times in total.items() if times)
        return CountSum(self.constant + other.constant, left)

    def __sub__(self, other: CountSum) -> CountSum:
        return self + other.times(-1)

    def times(self, factor: int) -> CountSum:
        items = frozenset((item, times * factor) for item, times in self.items if factor)
        return CountSum(self.constant * factor, items)

    @property
    def is_constant(self) -> bool:
        return not self.items


class CountSums:
    """Reads numbers of a graph as sums of counts; equal vectors are one vector."""

    def __init__(self, operators: Operators, nodes: Iterable[fx.Node]) -> None:
        self._operators = operators
        self._read_in: dict[Any, fx.Node] = {}
        """Symbol → the node that reads it from a tensor."""
        self._vectors: dict[Any, Value] = {}
        self._known: dict[Any, CountSum | None] = {}
        self._items: dict[Value, list[CountSum] | None] = {}
        for node in nodes:
            symbol = expression(value_of(node)) if isinstance(value_of(node), torch.SymInt) else None
            if isinstance(symbol, sympy.Symbol) and node.op.startswith("call_") and node in operators.numbering.numbers:
                self._read_in.setdefault(symbol, node)

    def of(self, value: Any) -> CountSum | None:
        """An int, a sympy expression, a number's node, or a tensor of one integer; None for what is no sum of items."""
        if type(value) is int or isinstance(value, sympy.Integer):
            return CountSum(int(value))
        if isinstance(value, fx.Node):
            return self._of_node(value)
        if not isinstance(value, Value | sympy.Basic):
            return None
        if value not in self._known:
            self._known[value] = None
            self._known[value] = self._of_tensor(value) if isinstance(value, Value) else self._of_expression(value)
        return self._known[value]

    def _of_node(self, node: fx.Node) -> CountSum | None:
        number = value_of(node)
        if isinstance(number, Symbolic):
            return self.of(expression(number))
        return self.of(self._operators.value(node)) if node.op.startswith("call_") else None

    def _of_expression(self, number: sympy.Basic) -> CountSum | None:
        """A sum of numbers that were read."""
        if isinstance(number, sympy.Symbol):
            return self._of_symbol(number)
        symbols = sorted(number.free_symbols, key=str)
        expanded = sympy.expand(number)
        factors = [expanded.coeff(symbol) for symbol in symbols]
        rest = sympy.expand(expanded - sum(f * s for f, s in zip(factors, symbols, strict=True)))
        total = self.of(rest) if rest.is_Integer else None
        for factor, symbol in zip(factors, symbols, strict=True):
            each = self.of(symbol) if factor.is_Integer else None
            total = total + each.times(int(factor)) if total is not None and each is not None else None
        return total

    def _of_symbol(self, symbol: Any) -> CountSum | None:
        symbol = self._operators.numbering.equal_symbols.get(symbol, symbol)
        node = self._read_in.get(symbol)
        call = self._operators.does(self._operators.value(node)) if node is not None else None
        read = call is not None and call.operator in _READS
        return self.of(call.arguments["self"]) if call is not None and read else None

    def _of_tensor(self, value: Value) -> CountSum | None:
        if not self._operators.is_tensor(value):
            return None
        meta = self._operators.meta(value)
        if meta.rank != 0 or meta.dtype not in _INTEGERS:
            return None
        match self._operators.does(value):
            case Call(aten.add, {"self": first, "other": second, "alpha": 1}):
                before, after = self.of(first), self.of(second)
                return before + after if before is not None and after is not None else None
            case Call(aten.sub, {"self": first, "other": second, "alpha": 1}):
                before, after = self.of(first), self.of(second)
                return before - after if before is not None and after is not None else None
            case Call(aten.select, {"self": vector, "dim": 0 | -1, "index": int(index)}):
                return self._item(vector, index)
            case Call(aten.unbind, {"self": vector, "dim": 0 | -1}):
                return self._item(vector, value.leaf)
        return self.of(copied_from(self._operators, value))

    # -- vectors

    def _item(self, vector: Any, index: int) -> CountSum | None:
        items = self.items(vector)
        return items[index] if items is not None and -len(items) <= index < len(items) else None

    def items(self, vector: Any) -> list[CountSum] | None:
        """All items of an integer vector of known length, or of a node that is one."""
        if isinstance(vector, fx.Node):
            is_tensor = isinstance(value_of(vector), torch.Tensor) and vector.op.startswith("call_")
            vector = self._operators.value(vector) if is_tensor else None
        if not self._is_vector(vector):
            return None
        if vector not in self._items:
            self._items[vector] = self._items_of(vector)
        return self._items[vector]

    def holds_its_own(self, vector: fx.Node) -> bool:
        """Is a vector of integers made of no other's items?"""
        items = self.items(vector)
        return items is not None and items[:1] == [CountSum(0, frozenset([((self._operators.value(vector), 0), 1)]))]

    def _is_vector(self, value: Any) -> bool:
        if not self._operators.is_tensor(value):
            return False
        meta = self._operators.meta(value)
        return meta.rank == 1 and meta.dtype in _INTEGERS and isinstance(meta.shape[0], int)

    def _items_of(self, vector: Value) -> list[CountSum] | None:
        length = self._operators.meta(vector).shape[0]
        if fill_of(self._operators, vector) is Fill.ZEROS:
            return [CountSum()] * length
        if self._is_vector(source := copied_from(self._operators, vector)):
            return self.items(source)
        match self._operators.does(vector):
            case Call(aten.cumsum, {"self": source, "dim": 0 | -1}) if self._is_vector(source):
                return self._running_sums(source)
            case Call(aten.cat | aten.concat | aten.concatenate, {"tensors": parts, "dim": 0 | -1}):
                return self._joined(parts)
            case Call(aten.pad | aten.constant_pad_nd, {"self": source, "pad": (1, 0)} as given) if (
                given.get("mode", "constant") == "constant" and not given["value"]
            ):
                rest = self.items(source)
                return None if rest is None else [CountSum(), *rest]
        owner = self._vectors.setdefault(self._operators.number(vector), vector)
        return [CountSum(0, frozenset([((owner, i), 1)])) for i in range(length)]

    def _running_sums(self, source: Value) -> list[CountSum] | None:
        items = self.items(source)
        if items is None:
            return None
        sums: list[CountSum] = []
        for item in items:
            sums.append(sums[-1] + item if sums else item)
        return sums

    def _joined(self, parts: Iterable[Any]) -> list[CountSum] | None:
        joined: list[CountSum] = []
        for part in parts:
            items = self.items(part)
            if items is None:
                return None
            joined += items
        return joined


@dataclass(frozen=True)
class Total:
    """The counts are not negative, and their sum is ``rows``, or at most that if not ``exact``."""

    rows: Any
    """A sympy expression."""
    exact: bool


class RowCounts:
    """Reads vectors of counts."""

    def __init__(self, sets: RowSets) -> None:
        self._sets = sets
        self._operators = sets.operators

    def total(self, vector: Value) -> Total | None:
        """None if nothing is known."""
        value: Value | None = vector
        # A cast to a narrower dtype on the way would round or wrap.
        while value is not None and self._operators.meta(value).dtype in COUNT_DTYPES:
            found = self._total(value)
            if found is not None:
                return found
            value = copied_from(self._operators, value)
        return None

    def _total(self, value: Value) -> Total | None:
        match self._operators.does(value):
            case Call(aten.sum):
                return self._total_of_sum(value)
            case Call(aten.histc, {"self": ids, "bins": int()}):
                # Whatever the bins are, each number is in one of them or in none.
                return Total(self._numel(ids), exact=False)
            case Call(aten.scatter_add | aten.scatter_add_, {"self": base, "dim": 0 | -1, "index": ids, "src": ones}):
                return self._total_of_ones(base, ids, ones)
            case Call(
                aten.index_add | aten.index_add_,
                {"self": base, "dim": 0 | -1, "index": ids, "source": ones, "alpha": 1},
            ):
                return self._total_of_ones(base, ids, ones)
        return None

    def _total_of_ones(self, base: Any, ids: Any, ones: Any) -> Total | None:
        """A one added to zeros for each id."""
        if self._fill(base) is not Fill.ZEROS or self._fill(ones) is not Fill.ONES or not isinstance(ids, Value):
            return None
        metas = [self._operators.meta(value) for value in (ids, ones)]
        same = metas[0].rank == 1 and metas[0].shape == metas[1].shape
        return Total(self._numel(ids), exact=True) if same else None

    def _total_of_sum(self, total: Value) -> Total | None:
        mask = counts_by_expert(total, self._sets)
        if mask is not None:
            # one_hot refuses ids that have no class, so each slot is counted once, unless slots were merged before.
            exact = sum(axis in (TOKEN, SLOT) for axis in mask.axes) == self._operators.meta(mask.selected).rank
            return Total(self._numel(mask.selected), exact) if mask.classes is not None else None
        match self._operators.does(total):
            case Call(aten.sum, {"self": Value() as counted, "dim": (0 | -2,), "keepdim": False}):
                pass
            case _:
                return None
        while (source := copied_from(self._operators, counted)) is not None:
            counted = source
        return self._total_of_scatter(counted) if self._operators.meta(counted).rank == 2 else None

    def _total_of_scatter(self, value: Value) -> Total | None:
        """``zeros([tokens, E]).scatter(1, ids, 1)``: a token counts once for each expert that its slots name."""
        call = self._operators.does(value)
        if call is None or call.overload not in (aten.scatter.value, aten.scatter_.value):
            return None
        base, ids, given = call.arguments["self"], call.arguments["index"], call.arguments
        if given["dim"] not in (1, -1) or given["value"] != 1 or not isinstance(ids, Value):
            return None
        if self._operators.meta(ids).rank != 2 or self._fill(base) is not Fill.ZEROS:
            return None
        return Total(self._numel(ids), exact=are_distinct(self._operators, ids))

    def _fill(self, value: Any) -> Fill | None:
        return fill_of(self._operators, value)

    def _numel(self, value: Value) -> Any:
        return math.prod(self._operators.meta(value).shape)


def counts_by_expert(total: Any, sets: RowSets) -> Mask | None:
    """The mask, if ``total`` is its sum over all but the experts: the number of rows of each expert.

    In a dtype that holds such a number: bf16 rounds from 257 rows on.
    """
    call = sets.operators.does(total) if isinstance(total, Value) else None
    if call is None or call.overload is not aten.sum.dim_IntList or call.arguments["keepdim"]:
        return None
    mask = sets.mask(call.arguments["self"])
    if mask is None or mask.expert is not None or not call.arguments["dim"]:
        return None
    summed = {dim % len(mask.axes) for dim in call.arguments["dim"]}
    kept = [axis for i, axis in enumerate(mask.axes) if i not in summed]
    return mask if kept == [EXPERT] and sets.operators.meta(total).dtype in COUNT_DTYPES else None


class HostNumbers:
    """The numbers that the host reads from row counts: what lies between, and which of them only a loop needs.

    Args:
        vector: of row counts.
        rows: a sympy expression, their sum, or its bound if not ``exact``.
    """

    def __init__(
        self,
        sums: CountSums,
        effects: dict[fx.Node, Effects],
        vector: fx.Node,
        rows: Any,
        exact: bool,
    ) -> None:
        self._sums = sums
        self._effects = effects
        self._vector = vector
        self._experts = value_of(vector).shape[0]
        self._rows = rows
        self._exact = exact
        self._count_symbols: dict[int, Any] = {}
        self._meaning: dict[Any, Any] = {}
        self._not_negative: set[Any] = set()

    def trail(self, read: Iterable[fx.Node]) -> set[fx.Node]:
        """``read`` and all that lies between them and the counts, which are in it too."""
        found = {self._vector}
        waiting = list(read)
        while waiting:
            node = waiting.pop()
            if node in found or not self._is_a_sum(node):
                continue
            found.add(node)
            self._learn(node)
            waiting += node.all_input_nodes
        return found

    def _is_a_sum(self, node: fx.Node) -> bool:
        """Of items of the counts, or a vector of such sums."""
        items = self._sums.items(node)
        sums = items if items is not None else [self._sums.of(node)]
        # The counts themselves, under another name, are where the trail ends.
        if items is not None and node is not self._vector and self._sums.holds_its_own(node):
            return False
        return all(each is not None for each in sums)

    def dead_ends(self, starts: Collection[fx.Node], lengths: Mapping[fx.Node, CountSum]) -> set[fx.Node]:
        """What is computed from ``starts`` and has no effect: values without users, and checks that cannot fail.

        Args:
            lengths: tensor → the number of its rows.
        """
        for node in starts:
            self._learn(node)
        for tensor, length in lengths.items():
            size = expression(value_of(tensor).shape[0])
            if isinstance(size, sympy.Symbol):
                self._meaning[size] = self._in_counts(length)
        known: dict[fx.Node, bool] = {}
        found: set[fx.Node] = set()
        for start_node in starts:
            for user in start_node.users:
                if user not in starts and self._has_no_effect(user, known):
                    found.add(user)
        waiting = list(found)
        while waiting:
            new = [user for user in waiting.pop().users if user not in found]
            found.update(new)
            waiting += new
        return found

    def _has_no_effect(self, node: fx.Node, known: dict[fx.Node, bool]) -> bool:
        if node not in known:
            effects = self._effects[node]
            self._learn(node)
            if effects.kind is Kind.ASSERT:
                known[node] = self._cannot_fail(node.args[0] if node.args else None)
            else:
                pure = effects.kind is Kind.PURE and not effects.writes
                known[node] = pure and all(self._has_no_effect(user, known) for user in node.users)
        return known[node]

    # -- checks

    def _learn(self, node: fx.Node) -> None:
        """What the symbol of a number stands for."""
        symbol = expression(value_of(node))
        if not isinstance(symbol, sympy.Symbol):
            return
        if node.target is torch.ops.aten.sym_storage_offset.default:
            self._not_negative.add(symbol)
        elif (found := self._sums.of(node)) is not None:
            self._meaning[symbol] = self._in_counts(found)

    def _in_counts(self, found: CountSum) -> Any:
        """A sympy expression in one symbol for each count."""
        return found.constant + sum(times * self._count(index) for (_, index), times in found.items)

    def _count(self, index: int) -> Any:
        return self._count_symbols.setdefault(index, sympy.Dummy(f"count_{index}", integer=True))

    def _cannot_fail(self, check: Any) -> bool:
        """Is it a comparison that holds for any counts that are not negative and sum to the rows?"""
        holds = expression(value_of(check)) if isinstance(check, fx.Node) else check
        if holds is True or holds is sympy.true:
            return True
        if isinstance(holds, sympy.Ge):
            return self._is_not_negative(holds.lhs - holds.rhs)
        if isinstance(holds, sympy.Le):
            return self._is_not_negative(holds.rhs - holds.lhs)
        if isinstance(holds, sympy.Eq):
            difference = holds.lhs - holds.rhs
            return self._is_not_negative(difference) and self._is_not_negative(-difference)
        return False

    def _is_not_negative(self, number: Any) -> bool:
        counts = [self._count(i) for i in range(self._experts)]
        number = sympy.expand(sympy.sympify(number).xreplace(self._meaning))
        if self._exact:
            *counts, last = counts
            number = sympy.expand(number.xreplace({last: self._rows - sum(counts)}))
        # What the counts leave of the rows is the last count, or not known, and in both cases not negative.
        slack = self._rows - sum(counts)
        symbols = (*counts, *self._not_negative)
        for times in (0, 1):
            left = sympy.expand(number - times * slack)
            rest = left.xreplace(dict.fromkeys(symbols, sympy.S.Zero))
            linear = sympy.expand(left - rest - sum(left.coeff(symbol) * symbol for symbol in symbols)) == 0
            factors = [left.coeff(symbol) for symbol in symbols]
            if linear and rest.is_number and rest >= 0 and all(each.is_number and each >= 0 for each in factors):
                return True
        return False
