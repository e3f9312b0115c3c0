"""What a graph makes of logits that is still as wide as they are: a number of each class in each row."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from glue_compiler.deferred.head import Elementwise
from glue_compiler.fx.index_operators import CONVERSIONS
from glue_compiler.fx.operators import Call, Operators, Value
from glue_compiler.passes.chunk_loss.heads import is_factor
from glue_compiler.passes.chunk_loss.row_steps import NotALoss, RowStep, row_step

aten = torch.ops.aten

Form = Literal["logits", "log_probabilities", "probabilities", "p_log_p", "p_logits", "entr"]
"""``p_log_p``: probabilities times their logarithms; ``p_logits``: times the logits; ``entr``: times minus their
logarithms, and 0 for none."""
OF_ENTROPY: tuple[Form, ...] = ("p_log_p", "p_logits", "entr")
_Linear: tuple[Form, ...] = ("log_probabilities", *OF_ENTROPY)
"""Forms that carry a factor."""


@dataclass(frozen=True)
class Wide:
    """Numbers of all classes in rows of a head's logits.

    Attributes:
        steps: from the head's sum to the logits that ``form`` is taken of, number by number.
        path: from the head's rows to these.
        classes: which dimension holds the classes.
        dtype: of the numbers.
        factor: what they are multiplied with.
        is_detached: they pass no gradients on.
    """

    form: Form
    steps: tuple[Elementwise, ...]
    path: tuple[RowStep, ...]
    classes: int
    dtype: torch.dtype
    factor: float = 1.0
    is_detached: bool = False

    def is_of(self, other: Wide) -> bool:
        """Are both of the same rows of the same logits, in the same layout?"""
        return all(getattr(self, name) == getattr(other, name) for name in ("steps", "path", "classes"))


@dataclass(frozen=True)
class Known:
    """What has been read of a graph.

    Attributes:
        wide: values as wide as the logits.
        totals: logsumexps over their classes: of what, whether they keep a size of one, and are detached.
    """

    operators: Operators
    wide: dict[Value, Wide]
    totals: dict[Value, tuple[Wide, bool, bool]]


def wide_result(call: Call, value: Value, known: Known) -> Wide | None:
    """``value``, which ``call`` makes of some that are ``known``, as one more; None if it is none.

    Raises:
        NotALoss: it might have been one, and why it is not.
    """
    operators, is_off = known.operators, not known.operators.passes_gradients(call.node)
    meta = operators.meta(value)
    source = call.arguments.get("self")
    found: Wide | None = None
    if isinstance(source, Value) and (wide := known.wide.get(source)) is not None:
        step = row_step(call, wide.classes, value, operators)
        if step is not None:
            path = wide.path if step[0] is None else (*wide.path, step[0])
            is_detached = wide.is_detached or call.operator is aten.detach
            return replace(wide, path=path, classes=step[1], is_detached=is_detached or is_off)
        if operators.meta(source).device != meta.device:
            raise NotALoss("they are copied to another device")
        found = _of_one(call, wide, operators.rank(source), value, operators)
    found = found or _of_two(call, known, is_off)
    if found is None or not meta.dtype.is_floating_point:
        return None
    return replace(found, dtype=meta.dtype, is_detached=found.is_detached or is_off)


def is_over_classes(dim: Any, wide: Wide, rank: int) -> bool:
    """Does the argument ``dim`` of an operator that reduces name the dimension of the classes alone?"""
    dims = dim if isinstance(dim, tuple) else (dim,)
    return len(dims) == 1 and isinstance(dims[0], int) and dims[0] % rank == wide.classes


def _of_one(call: Call, wide: Wide, rank: int, value: Value, operators: Operators) -> Wide | None:
    given = call.arguments
    match call.operator:
        case operator if operator in CONVERSIONS:
            dtype = operators.dtype(value)
            step = Elementwise("cast", dtype=dtype)
            return replace(wide, steps=(*wide.steps, step)) if wide.form == "logits" else wide
        case aten.tanh if wide.form == "logits":
            if any(step.kind == "tanh" for step in wide.steps):
                raise NotALoss("they are capped twice")
            return replace(wide, steps=(*wide.steps, Elementwise("tanh")))
        case aten.neg:
            return _scaled(wide, "multiply", -1.0)
        case aten.mul:
            if is_factor(given["other"]):
                # As the graph has it: a product with the inverse would round in another way.
                is_quotient = call.recorded.overload.overloadpacket is aten.div
                factor = call.recorded.arguments["other"] if is_quotient else given["other"]
                return _scaled(wide, "divide" if is_quotient else "multiply", float(factor))
        case aten.log_softmax if wide.form == "logits":
            if is_over_classes(given["dim"], wide, rank):
                return replace(wide, form="log_probabilities")
        case aten.softmax if wide.form == "logits":
            if is_over_classes(given["dim"], wide, rank):
                return replace(wide, form="probabilities")
        case aten.exp if wide.form == "log_probabilities" and wide.factor == 1.0:
            return replace(wide, form="probabilities")
        case aten.special_entr if wide.form == "probabilities":
            return replace(wide, form="entr")
    return None


def _scaled(wide: Wide, kind: Literal["multiply", "divide"], factor: float) -> Wide | None:
    if wide.form == "logits":
        return replace(wide, steps=(*wide.steps, Elementwise(kind, factor)))
    if wide.form in _Linear:
        return replace(wide, factor=wide.factor * factor if kind == "multiply" else wide.factor / factor)
    return None


def _of_two(call: Call, known: Known, is_off: bool) -> Wide | None:
    match call:
        case Call(aten.mul, {"self": Value() as first, "other": Value() as second}):
            left, right = known.wide.get(first), known.wide.get(second)
            for one, other in ((left, right), (right, left)):
                if one is None or other is None or one.form != "probabilities" or not one.is_of(other):
                    continue
                forms: dict[Form, Form] = {"log_probabilities": "p_log_p", "logits": "p_logits"}
                if other.form in forms and one.is_detached != other.is_detached and not is_off:
                    raise NotALoss("gradients pass through one factor alone")
                if other.form in forms:
                    return replace(other, form=forms[other.form])
        case Call(aten.add, {"self": Value() as scores, "other": Value() as total, "alpha": -1}):
            wide = known.wide.get(scores)
            if wide is not None and wide.form == "logits" and _is_total(total, wide, known, is_off):
                return replace(wide, form="log_probabilities")
    return None


def _is_total(value: Value, wide: Wide, known: Known, is_off: bool) -> bool:
    """Is ``value`` the logsumexp of the rows of ``wide``, for each class the same, and differentiated as they are?"""
    is_cut, keepdim = False, True
    match known.operators.does(value):
        case Call(aten.unsqueeze, {"self": Value() as total, "dim": dim}) as call:
            if dim % known.operators.rank(value) == wide.classes:
                is_cut, keepdim, value = not known.operators.passes_gradients(call.node), False, total
    if value not in known.totals:
        return False
    of, kept, is_detached = known.totals[value]
    is_cut = is_cut or is_detached
    return of.form == "logits" and of.is_of(wide) and kept is keepdim and (is_off or is_cut == wide.is_detached)


@dataclass(frozen=True)
class Scores:
    """``softcap * tanh(scale * x)``, or without a soft cap, 0, ``scale * x``, of a head's sum x."""

    scale: float
    softcap: float


def scores_of(steps: tuple[Elementwise, ...]) -> Scores:
    """What ``steps`` come to, casts aside."""
    scale = 1.0
    softcap: float | None = None
    for step in steps:
        if step.kind == "tanh":
            softcap = 1.0
        elif step.factor is not None:
            factor = step.factor if step.kind == "multiply" else 1 / step.factor
            scale, softcap = (scale * factor, None) if softcap is None else (scale, softcap * factor)
    if not math.isfinite(scale) or (softcap is not None and not is_factor(softcap)):
        raise NotALoss("they are multiplied with a number that is not finite, or by so little that they are zero")
    return Scores(scale, softcap or 0.0)
