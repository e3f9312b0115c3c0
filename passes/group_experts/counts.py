"""Row counts: sums of them that the host reads, and how many rows a vector of them counts. Changes nothing."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import sympy
import torch
from sympy.core.function import AppliedUndef
from torch import fx

from glue_compiler.fx.effects import Effects, Kind
from glue_compiler.fx.index_expressions import IndexReader, Unreadable
from glue_compiler.fx.index_numbers import as_number
from glue_compiler.fx.index_operators import INDEX_DTYPES, READERS, Reading
from glue_compiler.fx.index_views import Index, NotAView
from glue_compiler.fx.operators import Call, Operators, Value
from glue_compiler.fx.reachable import reachable
from glue_compiler.fx.values import Symbolic, expression, is_call, makes_tensor, value_in, value_of
from glue_compiler.passes.group_experts.copies import Fill, copied_from, fill_of
from glue_compiler.passes.group_experts.row_sets import EXPERT, ONE, Mask, RowSets, are_distinct

aten = torch.ops.aten
COUNT_DTYPES = (torch.int32, torch.int64, torch.float32, torch.float64)
"""They hold every number of rows that a batch can have."""


def _running_sum(made: Reading) -> Any:
    if len(made.index) != 1 or not made.index[0].is_Integer:
        raise NotAView("a sum along an unknown place")
    places = range(made.index[0])
    before = [made.reader.read(made.value, (sympy.Integer(at),)) for at in places]  # each from the one before
    last = as_number(made.operand("self"))
    return made.in_dtype(last + before[-1] if before else last)


def _joined(made: Reading) -> Any:
    at = made.index[0]
    for part in made["tensors"] if len(made.index) == 1 and at.is_Integer else ():
        size = made.reader.shape(part)[0]
        if not isinstance(size, int):
            break
        if at < size:
            return made.reader.read(part, (at,))
        at -= size
    raise NotAView("an item at an unknown place")


def _padded(made: Reading) -> Any:
    if made["pad"] != (1, 0) or made["value"] != 0 or len(made.index) != 1 or not made.index[0].is_Integer:
        raise NotAView("another form of pad")
    (at,) = made.index
    return made.reader.read(made["self"], (at - 1,)) if at else at


class _Reader(IndexReader):
    """Reads items of vectors at places that are numbers; what is found in written memory is a vector of its own."""

    in_body = True
    rules: ClassVar[Any] = {
        **READERS,
        aten.cumsum: _running_sum,
        aten.cat: _joined,
        aten.constant_pad_nd: _padded,
    }

    def require_known(self, value: Value) -> None:
        if not self.operators.is_tensor(value):
            raise Unreadable(f"'{value.node.name}' is no plain tensor")


class CountSums:
    """Reads numbers of a graph as sympy expressions of items of vectors, ``value7(2)``; equal vectors are one."""

    def __init__(self, operators: Operators, nodes: Iterable[fx.Node]) -> None:
        self._operators = operators
        self._reader = _Reader(operators)
        self._read_in: dict[Any, fx.Node] = {}
        """Symbol → the node that reads it from a tensor."""
        self._items: dict[Value, list[Any] | None] = {}
        for node in nodes:
            symbol = expression(value_of(node)) if isinstance(value_of(node), torch.SymInt) else None
            if isinstance(symbol, sympy.Symbol) and is_call(node) and node in operators.numbering.numbers:
                self._read_in.setdefault(symbol, node)

    def of(self, value: Any) -> Any:
        """Of an int, a sympy expression, a number's node, or a tensor of one integer; None if others are in it."""
        if isinstance(value, fx.Node):
            number = value_of(value)
            is_read = not isinstance(number, Symbolic) and is_call(value)
            value = self._operators.value(value) if is_read else expression(number)
        if isinstance(value, Value):
            return self._item(value, ())
        if type(value) is not int and not isinstance(value, sympy.Expr):
            return None
        number = sympy.sympify(value)
        known = {symbol: self._of_symbol(symbol) for symbol in number.free_symbols}
        return sympy.expand(number.xreplace(known)) if None not in known.values() else None

    def _of_symbol(self, symbol: Any) -> Any:
        symbol = self._operators.numbering.equal_symbols.get(symbol, symbol)
        node = self._read_in.get(symbol)
        value = self._operators.value(node) if node is not None else None
        call = self._operators.does(value, aten.item, aten._local_scalar_dense)
        return self.of(call.arguments["self"]) if call is not None else None

    def _item(self, value: Value, index: Index) -> Any:
        is_tensor = self._operators.is_tensor(value) and self._operators.rank(value) == len(index)
        if not is_tensor or self._operators.dtype(value) not in INDEX_DTYPES:
            return None
        try:
            found = as_number(self._reader.read(value, index))
        except (Unreadable, NotAView):
            return None
        of_vectors = all(len(leaf.args) == 1 and leaf.args[0].is_Integer for leaf in found.atoms(AppliedUndef))
        return found if of_vectors and not found.free_symbols else None

    # -- vectors

    def items(self, vector: Any) -> list[Any] | None:
        """All items of an integer vector of known length, or of a node that is one."""
        if isinstance(vector, fx.Node):
            is_tensor = makes_tensor(vector) and vector.op != "output"
            vector = self._operators.value(vector) if is_tensor else None
        shape = self._operators.shape(vector) if self._operators.is_tensor(vector) else ()
        if len(shape) != 1 or not isinstance(shape[0], int):
            return None
        if vector not in self._items:
            self._items[vector] = [self._item(vector, (sympy.Integer(at),)) for at in range(shape[0])]
        items = self._items[vector]
        return items if items is not None and None not in items else None

    def vector(self, item: Any) -> tuple[Value, int] | None:
        """The vector, and the place, of what is one of its items."""
        if not isinstance(item, AppliedUndef):
            return None
        return self._reader.leaves[item.func.__name__], int(item.args[0])

    def holds_its_own(self, vector: fx.Node) -> bool:
        """Is a vector of integers made of no other's items?"""
        found = self.vector((self.items(vector) or [None])[0])
        number = self._operators.number
        return found is not None and found[1] == 0 and number(found[0]) == number(self._operators.value(vector))


@dataclass(frozen=True)
class Total:
    """The counts are not negative, and their sum is ``rows``, or at most that if not ``exact``."""

    rows: Any
    """A sympy expression."""
    exact: bool


def total_of(vector: Value, sets: RowSets) -> Total | None:
    """What the counts in ``vector`` sum to; None if nothing is known."""
    value: Value | None = vector
    # A cast to a narrower dtype on the way would round or wrap.
    while value is not None and sets.operators.dtype(value) in COUNT_DTYPES:
        found = _total(value, sets)
        if found is not None:
            return found
        value = copied_from(sets.operators, value)
    return None


def _total(value: Value, sets: RowSets) -> Total | None:
    operators = sets.operators
    match operators.does(value):
        case Call(aten.sum):
            mask = counts_by_expert(value, sets)
            if mask is None:
                return None
            # one_hot refuses ids that have no class, so each slot is counted once, unless slots were merged before.
            distinct = not mask.any_slot or are_distinct(operators, mask.selected)
            return Total(math.prod(operators.shape(mask.selected)), distinct and mask.classes is not None)
        case Call(aten.histc, {"self": ids, "bins": int()}):
            # Whatever the bins are, each number is in one of them or in none.
            return Total(math.prod(operators.shape(ids)), exact=False)
        case Call(
            aten.scatter_add, {"self": base, "dim": 0 | -1, "index": Value() as ids, "src": Value() as ones}
        ) | Call(
            aten.index_add,
            {"self": base, "dim": 0 | -1, "index": Value() as ids, "source": Value() as ones, "alpha": 1},
        ):
            # A one is added to zeros for each id.
            shape = operators.shape(ids)
            is_count = (fill_of(operators, base), fill_of(operators, ones)) == (Fill.ZEROS, Fill.ONES)
            is_count = is_count and len(shape) == 1 and shape == operators.shape(ones)
            return Total(shape[0], exact=True) if is_count else None
    return None


def counts_by_expert(total: Any, sets: RowSets) -> Mask | None:
    """The mask, if ``total`` is its sum over all but the experts: the number of rows of each expert.

    In a dtype that holds such a number: bf16 rounds from 257 rows on.
    """
    call = sets.operators.does(total)
    if call is None or call.overload is not aten.sum.dim_IntList or call.arguments["keepdim"]:
        return None
    mask = sets.mask(call.arguments["self"])
    if mask is None or not call.arguments["dim"] or sets.operators.dtype(total) not in COUNT_DTYPES:
        return None
    summed = {dim % len(mask.axes) for dim in call.arguments["dim"]}
    kept = [axis for i, axis in enumerate(mask.axes) if i not in summed]
    # The only class of one_hot has a dimension of size one.
    only = (mask.expert, mask.classes) == (0, 1) and kept == [ONE]
    return mask if only or (kept == [EXPERT] and mask.expert is None) else None


@dataclass
class HostNumbers:
    """The numbers that the host reads from row counts: what lies between, and which of them only a loop needs.

    Attributes:
        vector: of row counts.
        rows: a sympy expression, their sum, or its bound if not ``exact``.
    """

    sums: CountSums
    effects: dict[fx.Node, Effects]
    vector: fx.Node
    rows: Any
    exact: bool
    _meaning: dict[Any, Any] = field(default_factory=dict)
    _not_negative: set[Any] = field(default_factory=set)

    def trail(self, read: Iterable[fx.Node]) -> set[fx.Node]:
        """``read`` and all that lies between them and the counts, which are in it too."""

        def operands(node: fx.Node) -> list[fx.Node]:
            self._learn(node)
            return list(filter(self._is_a_sum, node.all_input_nodes)) if node is not self.vector else []

        return reachable([self.vector, *filter(self._is_a_sum, read)], operands)

    def _is_a_sum(self, node: fx.Node) -> bool:
        """Of items of the counts, or a vector of such sums."""
        items = self.sums.items(node)
        sums = items if items is not None else [self.sums.of(node)]
        # The counts themselves, under another name, are where the trail ends.
        if items is not None and node is not self.vector and self.sums.holds_its_own(node):
            return False
        return all(each is not None for each in sums)

    def dead_ends(self, starts: Collection[fx.Node], lengths: Mapping[fx.Node, Any]) -> set[fx.Node]:
        """What is computed from ``starts`` and has no effect: values without users, and checks that cannot fail.

        Args:
            lengths: tensor → the number of its rows.
        """
        for node in starts:
            self._learn(node)
        for tensor, length in lengths.items():
            size = expression(value_of(tensor).shape[0])
            if isinstance(size, sympy.Symbol):
                self._meaning[size] = length
        known: dict[fx.Node, bool] = {}
        users = {user for node in starts for user in node.users if user not in starts}
        found = [user for user in users if self._has_no_effect(user, known)]
        return reachable(found, lambda node: node.users)

    def _has_no_effect(self, node: fx.Node, known: dict[fx.Node, bool]) -> bool:
        if node not in known:
            effects = self.effects[node]
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
        elif (found := self.sums.of(node)) is not None:
            self._meaning[symbol] = found

    def _cannot_fail(self, check: Any) -> bool:
        """Is it a comparison that holds for any counts that are not negative and sum to the rows?"""
        holds = expression(value_in(check))
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
        counts = self.sums.items(self.vector) or []
        number = sympy.expand(sympy.sympify(number).xreplace(self._meaning))
        if self.exact and counts:
            *counts, last = counts
            number = sympy.expand(number.xreplace({last: self.rows - sum(counts)}))
        # What the counts leave of the rows is the last count, or not known, and in both cases not negative.
        slack = self.rows - sum(counts)
        symbols = (*counts, *self._not_negative)
        for times in (0, 1):
            left = sympy.expand(number - times * slack)
            rest = left.xreplace(dict.fromkeys(symbols, sympy.S.Zero))
            linear = sympy.expand(left - rest - sum(left.coeff(symbol) * symbol for symbol in symbols)) == 0
            factors = [left.coeff(symbol) for symbol in symbols]
            if linear and rest.is_number and rest >= 0 and all(each.is_number and each >= 0 for each in factors):
                return True
        return False
