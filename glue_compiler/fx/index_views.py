"""Views and copies of tensors as maps of indices: which element of the source an element of the result is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from glue_compiler.fx.values import Symbolic, expression, value_of

Index = tuple[sympy.Expr, ...]
"""One expression for each dimension of a tensor, counted from 0."""


class NotAView(Exception):
    """The operator, or this form of it, is not a map of indices."""


@dataclass(frozen=True)
class Element:
    """Element ``index`` of what ``node`` evaluates to."""

    node: fx.Node
    index: Index


def operator_name(node: fx.Node) -> str:
    """``"add"`` for ``operator.add``, ``torch.add``, ``Tensor.add`` and ``aten.add.Tensor``.

    Names decide between torch's own operators only: ask :class:`~glue_compiler.fx.effects.EffectAnalysis` first whether
    the node is one.
    """
    if node.op == "call_method":
        return str(node.target).strip("_") if str(node.target).startswith("__") else str(node.target)
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target.overloadpacket.__name__
    # operator.and_ and the like end in an underscore, which in-place methods do too; those are never pure.
    return getattr(node.target, "__name__", "").rstrip("_")


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def shape_of(node: fx.Node) -> tuple[Any, ...]:
    """Sizes as ints and sympy expressions."""
    value = value_of(node)
    if not isinstance(value, torch.Tensor):
        raise NotAView(f"'{node.name}' is not a tensor")
    return tuple(expression(size) for size in value.shape)


def number_of(value: Any) -> Any:
    """An int, float, bool or symbolic argument as a number of sympy's."""
    if isinstance(value, fx.Node):
        value = value_of(value)
    if isinstance(value, Symbolic):
        value = expression(value)
    if isinstance(value, bool):
        return sympy.true if value else sympy.false
    if isinstance(value, float):
        if math.isinf(value):
            return sympy.oo if value > 0 else -sympy.oo
        return sympy.Integer(int(value)) if value.is_integer() else sympy.Float(value)
    if isinstance(value, int | sympy.Basic):
        return sympy.sympify(value)
    raise NotAView(f"{value!r} is not a number")


def broadcast_index(index: Index, shape: Sequence[Any]) -> Index:
    """The index into an operand of ``shape`` for element ``index`` of a result that it is broadcast to."""
    last = index[len(index) - len(shape) :]
    return tuple(sympy.Integer(0) if size == 1 else i for i, size in zip(last, shape, strict=True))


def source_of(node: fx.Node, index: Index) -> Element:
    """The element of the node's first operand that element ``index`` of the node is.

    Raises:
        NotAView: when the node computes something, or its arguments are not understood.
    """
    name = operator_name(node)
    if name not in _VIEWS or not node.args or not isinstance(node.args[0], fx.Node):
        raise NotAView(f"'{node.name}' is not a view")
    source = node.args[0]
    return Element(source, broadcast_index(_VIEWS[name](node, shape_of(source), index), shape_of(source)))


def _sizes(node: fx.Node, first: int, name: str) -> list[Any]:
    """Numbers given one by one, or as one list."""
    given = argument(node, first, name)
    return list(given) if isinstance(given, tuple | list) else list(node.args[first:])


def _dimension(value: Any, rank: int) -> int:
    if not isinstance(value, int) or not -rank <= value < rank:
        raise NotAView(f"dimension {value!r}")
    return value % rank


def _same(node: fx.Node, shape: tuple[Any, ...], index: Index) -> Index:
    return index


def _expand(node: fx.Node, shape: tuple[Any, ...], index: Index) -> Index:
    return index[len(index) - len(shape) :]


def _repeat(node: fx.Node, shape: tuple[Any, ...], index: Index) -> Index:
    last = index[len(index) - len(shape) :]
    times = _sizes(node, 1, "repeats")[-len(shape) :] if shape else []
    return tuple(i if n == 1 else sympy.Mod(i, size) for i, size, n in zip(last, shape, times, strict=True))


def _repeat_interleave(node: fx.Node, shape: tuple[Any, ...], index: Index) -> Index:
    times, dim = argument(node, 1, "repeats"), argument(node, 2, "dim")
    if not isinstance(times, int) or dim is None:
        raise NotAView("repeat_interleave by a tensor")
    dim = _dimension(dim, len(shape))
    return (*index[:dim], sympy.floor(index[dim] / times), *index[dim + 1 :])


def _unsqueeze(node: fx.Node, shape: tuple[Any, ...], index: Index) -> Index:
    dim = _dimension(argument(node, 1, "dim"), len(index))
    return index[:dim] + index[dim + 1 :]


def _squeeze(node: fx.Node, shape: tuple[Any, ...], index: Index) -> Index:
    dim = argument(node, 1, "dim")
    dims = range(len(shape)) if dim is None else [_dimension(d, len(shape)) for d in _sizes(node, 1, "dim")]
    dropped = {d for d in dims if shape[d] == 1}
    if len(shape) - len(dropped) != len(index):
        raise NotAView("squeeze of an unknown size")
    left = iter(index)
    return tuple(sympy.Integer(0) if d in dropped else next(left) for d in range(len(shape)))


def _transpose(node: fx.Node, shape: tuple[Any, ...], index: Index) -> Index:
    first, second = (_dimension(argument(node, i, f"dim{i - 1}"), len(shape)) for i in (1, 2))
    swapped = list(index)
    swapped[first], swapped[second] = swapped[second], swapped[first]
    return tuple(swapped)


def _reverse(node: fx.Node, shape: tuple[Any, ...], index: Index) -> Index:
    if len(shape) > 2:
        raise NotAView("transpose of more than two dimensions")
    return index[::-1]


def _permute(node: fx.Node, shape: tuple[Any, ...], index: Index) -> Index:
    order = [_dimension(d, len(shape)) for d in _sizes(node, 1, "dims")]
    return tuple(index[order.index(d)] for d in range(len(shape)))


def _reshape(node: fx.Node, shape: tuple[Any, ...], index: Index) -> Index:
    if node.target == "view" and argument(node, 1, "dtype") in _DTYPES:
        raise NotAView("a view of other bits")
    found: list[sympy.Expr] = []
    for old, new in _groups(list(shape), list(shape_of(node))):
        linear: Any = sympy.Integer(0)
        for position, size in new:
            linear = linear * size + index[position]
        steps = [sympy.Integer(1)]
        for _, size in reversed(old[1:]):
            steps.insert(0, steps[0] * size)
        for (_, size), step, is_first in zip(old, steps, [True] + [False] * len(old), strict=False):
            # The first size of a group bounds the quotient anyway.
            found.append(sympy.floor(linear / step) if is_first else sympy.Mod(sympy.floor(linear / step), size))
    return tuple(found)


_DTYPES = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def _groups(old: list[Any], new: list[Any]) -> list[tuple[list[tuple[int, Any]], list[tuple[int, Any]]]]:
    """Consecutive dimensions of both shapes with equal products, in the smallest groups; (position, size) each."""
    groups = []
    i = j = 0
    while i < len(old) or j < len(new):
        first: list[tuple[int, Any]] = []
        second: list[tuple[int, Any]] = []
        while not first or not second or math.prod(s for _, s in first) != math.prod(s for _, s in second):
            ours, theirs = math.prod(s for _, s in first), math.prod(s for _, s in second)
            take_old = i < len(old) and (not first or not isinstance(ours, int) or ours < _as_int(theirs))
            if take_old:
                first.append((i, old[i]))
                i += 1
            elif j < len(new):
                second.append((j, new[j]))
                j += 1
            elif i < len(old):
                first.append((i, old[i]))
                i += 1
            elif (first and all(size == 1 for _, size in first)) or (second and all(size == 1 for _, size in second)):
                break
            else:
                raise NotAView("a reshape of unknown sizes")
        groups.append((first, second))
    return groups


def _as_int(size: Any) -> Any:
    return size if isinstance(size, int) else math.inf


def _getitem(node: fx.Node, shape: tuple[Any, ...], index: Index) -> Index:
    given = argument(node, 1, "idx")
    items = list(given) if isinstance(given, tuple) else [given]
    if any(isinstance(item, fx.Node) and isinstance(value_of(item), torch.Tensor) for item in items):
        raise NotAView("an index tensor")
    taken = sum(item is not None and item is not Ellipsis for item in items)
    if Ellipsis not in items:
        items.append(Ellipsis)
    where = items.index(Ellipsis)
    items[where : where + 1] = [slice(None)] * (len(shape) - taken)
    found: list[sympy.Expr] = []
    left = iter(index)
    sizes = iter(shape)
    for item in items:
        if item is None:
            next(left)
        elif isinstance(item, slice):
            found.append(_sliced(item, next(sizes), next(left)))
        elif isinstance(item, int) and not isinstance(item, bool):
            size = next(sizes)
            found.append(sympy.sympify(item if item >= 0 else item + size))
        else:
            raise NotAView(f"index {item!r}")
    return tuple(found)


def _sliced(item: slice, size: Any, index: sympy.Expr) -> sympy.Expr:
    step = 1 if item.step is None else item.step
    start = 0 if item.start is None else item.start
    if not isinstance(step, int) or not isinstance(start, int) or step < 1:
        raise NotAView(f"slice {item!r}")
    if start < 0:
        # Python clamps a start before the first element.
        if not isinstance(size, int):
            raise NotAView(f"slice {item!r} of an unknown size")
        start = max(start + size, 0)
    return index * step + start


_View = Callable[[fx.Node, tuple[Any, ...], Index], Index]
_VIEWS: dict[str, _View] = {
    "getitem": _getitem,
    "expand": _expand,
    "expand_as": _expand,
    "broadcast_to": _expand,
    "repeat": _repeat,
    "repeat_interleave": _repeat_interleave,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "transpose": _transpose,
    "swapaxes": _transpose,
    "t": _reverse,
    "permute": _permute,
    "reshape": _reshape,
    "view": _reshape,
    "contiguous": _same,
    "clone": _same,
    "detach": _same,
    "alias": _same,
}
