"""The normal form of operators: what computes the same is one operator, with its operands in one order.

Other names for an operator (``multiply``, ``movedim``, ``narrow``, ``argsort``) are known by what they dispatch, when a
call is recorded (:mod:`glue_compiler.compat.operator_calls`); operators in place by their schemas. The rest is here.
A normal call stands for its result: what is written, and with which numbers it was called, stands in its record.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

aten = torch.ops.aten

Arguments = Mapping[str, Any]
Form = tuple[Any, Arguments]
"""An overload, and what it is called with."""


@functools.cache
def functional(overload: Any) -> Any | None:
    """``add.Tensor`` of ``add_.Tensor``: the operator of torch's out of place, if it takes the same arguments."""
    name = overload._schema.name.removeprefix("aten::")
    packet = getattr(aten, name[:-1], None) if overload.namespace == "aten" and name.endswith("_") else None
    found = getattr(packet, overload._overloadname, None)
    if found is None or found._schema.is_mutable:
        return None
    names = [[argument.name for argument in each._schema.arguments] for each in (overload, found)]
    return found if names[0] == names[1] else None


def normal(overload: Any, arguments: Arguments, result: Any) -> Form:
    """A call in normal form. ``result``: the :class:`Meta` of its first result, if that is a tensor."""
    found = functional(overload) or overload
    rule = _RULES.get(found.overloadpacket)
    changed = rule(found, arguments, result) if rule is not None else None
    return changed if changed is not None else (found, arguments)


LISTS = (aten.unbind, aten.split, aten.split_with_sizes)


def taken(packet: Any, given: Arguments, item: int, result: Any) -> Form:
    """The call that makes one item of what one of ``LISTS`` gives: ``unbind`` selects, ``split`` slices."""
    if packet is aten.unbind:
        return aten.select.int, {**given, "index": item}
    sizes = given.get("split_sizes") or [given["split_size"]] * item
    start = sum(sizes[:item])
    place = {"dim": given["dim"], "start": start, "end": start + result.shape[given["dim"]], "step": 1}
    return aten.slice.Tensor, {"self": given["self"], **place}


_Rule = Callable[[Any, Arguments, Any], Form | None]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _tensor_first(mirrored: Any) -> _Rule:
    """``3 < x`` is ``x > 3``."""

    def rule(overload: Any, given: Arguments, result: Any) -> Form | None:
        if not _is_number(given.get("self")) or given.get("alpha", 1) != 1:
            return None
        return mirrored.Tensor, {**given, "self": given["other"], "other": given["self"]}

    return rule


def _difference(overload: Any, given: Arguments, result: Any) -> Form:
    """``x - y`` is ``x + (-1) * y``, and ``x - 1`` is ``x + (-1)``."""
    first, second, alpha = given["self"], given["other"], given["alpha"]
    if overload.overloadpacket is aten.rsub:
        first, second = second, first
    negated = {"other": -second, "alpha": alpha} if _is_number(second) else {"other": second, "alpha": -alpha}
    return aten.add.Tensor, {"self": first, **negated}


def _quotient(overload: Any, given: Arguments, result: Any) -> Form | None:
    """By a number, and not rounded: the product with its inverse."""
    divisor = given["other"]
    if not _is_number(divisor) or not divisor or not math.isfinite(divisor) or given.get("rounding_mode") is not None:
        return None
    return aten.mul.Tensor, {"self": given["self"], "other": 1 / divisor}


def _filled(overload: Any, given: Arguments, result: Any) -> Form:
    return aten.where.self, {"condition": given["mask"], "self": given["value"], "other": given["self"]}


def _permuted(overload: Any, given: Arguments, result: Any) -> Form:
    dims = list(range(result.rank))
    if dims[1:]:
        one, other = given.get("dim0", 0), given.get("dim1", 1)
        dims[one], dims[other] = dims[other], dims[one]
    return aten.permute.default, {"self": given["self"], "dims": tuple(dims)}


def _reshaped(overload: Any, given: Arguments, result: Any) -> Form | None:
    if overload is aten.view.dtype:
        return None
    return aten.view.default, {"self": given["self"], "size": result.shape}


def _product(overload: Any, given: Arguments, result: Any) -> Form | None:
    return (aten.matmul.default, {"self": given["self"], "other": given["mat2"]}) if "out_dtype" not in given else None


def _softmax(to: Any) -> _Rule:
    def rule(overload: Any, given: Arguments, result: Any) -> Form:
        return to, {
            "self": given["self"],
            "dim": given["dim"],
            "dtype": result.dtype if given["half_to_float"] else None,
        }

    return rule


# Of memory that is not contiguous, ``flatten`` and ``ravel`` are a copy and a view.
_RESHAPES = (aten.view, aten.reshape, aten._unsafe_view, aten._reshape_alias, aten.flatten, aten.ravel)

_RULES: dict[Any, _Rule] = {
    aten.sub: _difference,
    aten.rsub: _difference,
    aten.div: _quotient,
    aten.masked_fill: _filled,
    **{each: _tensor_first(each) for each in (aten.add, aten.mul, aten.eq, aten.ne)},
    aten.lt: _tensor_first(aten.gt),
    aten.gt: _tensor_first(aten.lt),
    aten.le: _tensor_first(aten.ge),
    aten.ge: _tensor_first(aten.le),
    **dict.fromkeys((aten.t, aten.transpose), _permuted),
    **dict.fromkeys(_RESHAPES, _reshaped),
    **dict.fromkeys((aten.mm, aten.bmm), _product),
    aten._softmax: _softmax(aten.softmax.int),
    aten._log_softmax: _softmax(aten.log_softmax.int),
}
