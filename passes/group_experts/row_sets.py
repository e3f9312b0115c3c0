"""Row sets: the (token, slot) pairs that a loop over experts selects for one expert.

Read from data flow alone, element by element (:mod:`glue_compiler.fx.index_expressions`): a mask is a comparison of the
selected experts with a number, or with the places along a dimension; a row set is ``nonzero`` of such a mask for one
expert.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from sympy.core.function import AppliedUndef
from torch import fx

from glue_compiler.compat import equal_sizes
from glue_compiler.fx.index_expressions import IndexReader, Unreadable
from glue_compiler.fx.index_numbers import as_boolean, is_selected_constant
from glue_compiler.fx.index_operators import CONVERSIONS
from glue_compiler.fx.index_views import Element, NotAView
from glue_compiler.fx.operators import UNTRACKED, Call, Operators, Value
from glue_compiler.fx.values import expression, is_call, leaves, value_of
from glue_compiler.passes.group_experts.copies import COPIES, Fill, copied_from, fill_of

aten = torch.ops.aten
TOKEN, SLOT, EXPERT, ONE = "token", "slot", "expert", "one"
IDS = (torch.int32, torch.int64)
"""Narrower ones overflow where experts are counted from another one than zero."""
_AXES = sympy.symbols("axis:5", integer=True, nonnegative=True)
_NONZERO = (aten.nonzero, aten.nonzero_numpy)
_OVER_SLOTS = (aten.any, aten.sum, aten.max, aten.amax)
"""Not zero at a token if the mask is true at one of its slots."""


@dataclass(frozen=True)
class Mask:
    """Nonzero at (token, slot) where ``selected == expert``; ``axes`` says what each dimension is.

    While ``EXPERT`` is among the axes, ``expert`` is None. ``classes``: ids are known to lie in ``[0, classes)``.
    """

    selected: Value
    axes: tuple[str, ...]
    expert: int | None = None
    classes: int | None = None
    any_slot: bool = False
    """True at a token if any of its slots selects the expert: the slots are no dimension any more."""
    nodes: tuple[fx.Node, ...] = ()
    """How the mask was made, first to last."""


@dataclass(frozen=True)
class RowSet:
    """The pairs of one expert. ``root`` makes index vectors of them (``nonzero``), or is a boolean index itself."""

    root: fx.Node
    mask: Mask
    count: Any
    """Sympy expression of the number of pairs."""

    @property
    def expert(self) -> int:
        assert self.mask.expert is not None
        return self.mask.expert

    @property
    def entries(self) -> tuple[fx.Node, ...]:
        """Where the rows come into the expert's body."""
        return (self.root,)


@dataclass(frozen=True)
class Index:
    """What indexes with a row set: the axes (token or slot) that it indexes, of each of its rows."""

    rows: RowSet
    axes: tuple[str, ...]
    is_boolean: bool = False


class _Reader(IndexReader):
    """Reads comparisons of ids; what is no id and a number, or mixes tokens with slots, is a tensor of its own."""

    in_body = True

    def __init__(self, sets: RowSets) -> None:
        super().__init__(sets.operators)
        self.sets = sets

    def element(self, value: Value, index: Any) -> Any:
        found = super().element(value, index)
        if self.dtype(value) not in IDS or is_selected_constant(found) or not found.has(AppliedUndef):
            return found
        first, *others = found.atoms(AppliedUndef)
        if not others and not (found - first).has(AppliedUndef) and all(place.is_Symbol for place in first.args):
            return found
        best = element = Element(value, index)
        while (behind := self.behind(element)) is not None:
            element = behind
            best = element if all(place.is_Symbol for place in element.index) else best
        return self.leaf(best.value, best.index)

    def require_known(self, value: Value) -> None:
        if value.step == UNTRACKED and self.sets.mask(self.operators.value(value.node)) is not None:
            self.sets.written.add(value.node)
        elif value.step == UNTRACKED and self.operators.is_tensor(value) and self.dtype(value) in IDS:
            return  # ids, whoever wrote them: a tensor of its own
        super().require_known(value)


class RowSets:
    """Recognises masks, row sets and their index vectors; remembers what it has seen. Changes nothing.

    ``written``: nodes that were masks before something wrote them.
    """

    def __init__(self, operators: Operators) -> None:
        self.operators = operators
        self.written: set[fx.Node] = set()
        self._reader = _Reader(self)
        self._masks: dict[Value, Mask | None] = {}
        self._row_sets: dict[Value, RowSet | None] = {}

    def row_set(self, node: fx.Node) -> RowSet | None:
        """``nonzero`` of one expert's mask in any of its forms, or the mask itself where something indexes with it."""
        if not is_call(node):
            return None
        value = self.operators.value(node)
        return self._row_set(value) if value.node is node and value.leaf == 0 else None

    def is_unread(self, node: fx.Node) -> bool:
        """Does it find where something is true that is no mask of an expert?"""
        value = self.operators.value(node)
        finds = value.node is node and self.operators.does(value, *_NONZERO) is not None
        return finds and self._row_set(replace(value, leaf=0)) is None

    def _row_set(self, value: Value) -> RowSet | None:
        """Of the first result of a ``nonzero``, or a boolean mask."""
        if value not in self._row_sets:
            self._row_sets[value] = self._found(value)
        return self._row_sets[value]

    def _found(self, value: Value) -> RowSet | None:
        call = self.operators.does(value, *_NONZERO)
        if call is None:
            return self._boolean_index(value)
        mask = self.mask(call.arguments["self"])
        if mask is None or mask.expert is None:
            return None
        return RowSet(value.node, mask, self.operators.shape(value)[0])

    def _boolean_index(self, value: Value) -> RowSet | None:
        if not self.operators.is_tensor(value) or self.operators.dtype(value) is not torch.bool:
            return None
        for user in value.node.users:
            for step, call in enumerate(self.operators.calls(user) or ()):
                if call.operator is aten.index and value in call.arguments["indices"]:
                    # As many dimensions as stand before the mask stand before the rows.
                    before, mask = call.arguments["indices"].index(value), self.mask(value)
                    if mask is None or mask.expert is None or mask.axes not in ((TOKEN,), (TOKEN, SLOT)):
                        return None
                    if all(item is None for item in call.arguments["indices"][:before]):
                        return RowSet(value.node, mask, self.operators.shape(Value(user, step))[before])
        return None

    def index(self, value: Any, rank: int = 1) -> Index | None:
        """An index vector of a row set, repeated along other dimensions up to ``rank``; or a boolean index."""
        if not self.operators.is_tensor(value):
            return None
        boolean = self._row_set(value)
        if boolean is not None and boolean.root is value.node and self.operators.dtype(value) is torch.bool:
            return Index(boolean, boolean.mask.axes, is_boolean=True)
        if self.operators.rank(value) != rank or self.operators.dtype(value) is not torch.int64:
            return None
        try:
            found = self._reader.source(value, _AXES[:rank])
        except Unreadable:
            return None
        call = self.operators.does(found.value, *_NONZERO)
        if call is None or found.index[0] != _AXES[0]:
            return None
        rows = self._row_set(replace(found.value, leaf=0))
        column: Any = found.index[1] if call.operator is aten.nonzero else sympy.Integer(found.value.leaf)
        if rows is None or not column.is_Integer or rows.mask.axes[column] not in (TOKEN, SLOT):
            return None
        return Index(rows, (rows.mask.axes[column],))

    def mask(self, value: Any) -> Mask | None:
        if not self.operators.is_tensor(value):
            return None
        if value not in self._masks:
            self._masks[value] = None  # a cycle cannot be, and a failure is remembered
            with contextlib.suppress(Unreadable, NotAView):
                self._masks[value] = self._mask(value)
        return self._masks[value]

    def _mask(self, value: Value) -> Mask | None:
        operators, shape = self.operators, self.operators.shape(value)
        if not 0 < len(shape) <= len(_AXES):
            return None
        element = self._reader.source(value, _AXES[: len(shape)])
        if operators.dtype(value).is_floating_point:
            call = operators.does(element.value, *CONVERSIONS, aten.scatter)
            if call is None:
                return None
            element = element if call.operator is aten.scatter else Element(call.arguments["self"], element.index)
        seen = as_boolean(self._reader.read(element.value, element.index))
        leaf = next(iter(seen.atoms(AppliedUndef)), None)
        if leaf is None:
            return None
        source = self._reader.leaves[leaf.func.__name__]
        found = self._compared(seen, leaf, source) or self._reduced(seen, leaf, source)
        return self._placed(*found, source, value) if found is not None else None

    def _compared(self, seen: Any, leaf: Any, source: Value) -> tuple[Mask, tuple[Any, ...]] | None:
        """``ids == expert``: a number, or the place along a dimension. With the places of the mask's axes."""
        meta = self.operators.meta(source)
        if not isinstance(seen, sympy.Eq) or meta.dtype not in IDS or meta.rank not in (1, 2):
            return None
        for expert in (leaf - seen.lhs + seen.rhs, leaf + seen.lhs - seen.rhs):
            if expert.is_Integer:
                return Mask(source, (TOKEN, SLOT)[: meta.rank], int(expert)), leaf.args
            if expert in _AXES:
                return Mask(source, (*(TOKEN, SLOT)[: meta.rank], EXPERT)), (*leaf.args, expert)
        return None

    def _reduced(self, seen: Any, leaf: Any, value: Value) -> tuple[Mask, tuple[Any, ...]] | None:
        """Where the mask holds at some slot of a token."""
        if seen not in (sympy.Ne(leaf, 0), leaf > 0, leaf >= 1):
            return None
        while (source := copied_from(self.operators, value)) is not None:
            value = source
        match self.operators.does(value):
            case Call(aten.scatter, {"self": base, "dim": 1 | -1, "index": Value() as ids, "value": 1}):
                if self.operators.rank(ids) != 2 or fill_of(self.operators, base) is not Fill.ZEROS:
                    return None
                classes = self.operators.shape(value)[1]
                return Mask(ids, (TOKEN, EXPERT), classes=classes, any_slot=True), leaf.args
            case Call(operator, {"self": of, "dim": dim, "keepdim": keepdim}) if operator in _OVER_SLOTS:
                mask = self.mask(of) if not value.leaf else None
            case _:
                return None
        if mask is None:
            return None
        summed = {each % len(mask.axes) for each in leaves([dim])}
        if not {SLOT} <= {mask.axes[each] for each in summed} <= {SLOT, ONE}:
            return None
        kept = [ONE if each in summed else axis for each, axis in enumerate(mask.axes) if keepdim or each not in summed]
        return replace(mask, axes=tuple(kept), any_slot=True), leaf.args

    def _placed(self, mask: Mask, places: Sequence[Any], source: Value, value: Value) -> Mask | None:
        """``mask``, whose axes are those of ``source``, as it is in ``value``, which reads ``source`` at ``places``."""
        of_source, shape = self.operators.shape(source), self.operators.shape(value)
        axes, expert = [ONE] * len(shape), mask.expert
        alone = []
        for axis, place, size in itertools.zip_longest(mask.axes, places, of_source):
            if place in _AXES[: len(shape)]:
                at = _AXES.index(place)
                if axes[at] != ONE or (size is not None and shape[at] != size):
                    return None
                axes[at] = axis
            elif axis == EXPERT and place.is_Integer:
                expert = int(place)
            elif place == 0 and is_known(size, 1):
                alone.append(axis)
            else:
                return None
        for axis in alone:
            # Of dimensions of size one it does not matter which is which.
            at = next((at for at, size in enumerate(shape) if axes[at] == ONE and is_known(size, 1)), None)
            if at is not None:
                axes[at] = axis
            elif axis == TOKEN:
                return None
        if any(axis == ONE and not is_known(size, 1) for axis, size in zip(axes, shape, strict=True)):
            return None
        nodes = self._between(value.node, mask.selected)
        classes = mask.classes or self._classes(nodes, mask.selected)
        if EXPERT in axes and shape[axes.index(EXPERT)] != classes:
            classes = None
        return replace(mask, axes=tuple(axes), expert=expert, classes=classes, nodes=nodes)

    def _between(self, node: fx.Node, selected: Value) -> tuple[fx.Node, ...]:
        """The nodes by which ``node`` is made of ``selected``, and of numbers."""
        found: set[fx.Node] = set()
        waiting = [node]
        while waiting:
            node = waiting.pop()
            kind = value_of(node)
            is_passed = not found or (isinstance(kind, torch.Tensor) and not kind.is_floating_point())
            if not is_call(node) or node in found or not is_passed:
                continue
            # The other results of the same node, such as the values of ``topk``, may be written meanwhile.
            if node is not selected.node and self.operators.value(node) != selected:
                found.add(node)
                # Nor is it made of what its operand held before something wrote ``selected`` there.
                waiting += [arg for arg in node.all_input_nodes if self.operators.read(arg, node) != selected]
        return tuple(sorted(found))

    def _classes(self, nodes: Sequence[fx.Node], selected: Value) -> int | None:
        """The classes of a ``one_hot`` on the way, which refuses other ids."""
        for call in (call for node in nodes for call in self.operators.calls(node) or ()):
            match call:
                case Call(aten.one_hot, {"self": Value() as ids, "num_classes": int() as classes}) if classes > 0:
                    of = self._reader.read(ids, _AXES[: self.operators.rank(ids)])
                    if self._reader.leaves.get(getattr(of.func, "__name__", "")) == selected:
                        return classes
        return None


def names_a_token_once(rows: RowSet, operators: Operators) -> bool:
    """Is no token twice in the row set?"""
    return rows.mask.any_slot or are_distinct(operators, rows.mask.selected)


def are_distinct(operators: Operators, selected: Value) -> bool:
    """Does each row of ``selected``, ``[tokens, slots]`` or ``[tokens]``, name an expert at most once?

    It does if there is one slot, or if the rows are those of the indices of ``topk`` along its last dimension.
    """
    shape = operators.shape(selected)
    if len(shape) == 1 or is_known(shape[-1], 1):
        return True
    value: Any = selected
    while isinstance(value, Value) and _has_rows_of(operators, value, shape):
        call = operators.does(value)
        if call is None:
            return False
        if call.operator is torch.ops.aten.topk:
            rank = operators.rank(value)
            return value.leaf == 1 and call.arguments["dim"] in (-1, rank - 1)
        if call.operator not in COPIES and call.overload is not aten.view.default:
            return False
        value = call.arguments["self"]
    return False


def _has_rows_of(operators: Operators, value: Value, shape: tuple[Any, ...]) -> bool:
    """Rows of the same length, in a dtype that holds every index: then it has the same rows."""
    meta = operators.meta(value)
    if meta.dtype not in IDS or not meta.shape:
        return False
    return isinstance(shape[-1], int) and is_known(meta.shape[-1], shape[-1])


def is_known(size: Any, wanted: int) -> bool:
    """Is a size that number, for every batch?"""
    return type(size) is int and size == wanted


def same_size(first: Any, second: Any) -> bool:
    """Equal as written: asks no symbol for its value, so it adds no guard."""
    return bool(expression(first) == expression(second))


def as_many_rows(first: Any, second: Any) -> bool:
    """Equal as written, or equal sizes of two inputs: then the graph is compiled for equal ones only."""
    return same_size(first, second) or equal_sizes.equal_by_guard(first, second)
