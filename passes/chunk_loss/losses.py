"""The operators in which logits end: they give one number, or one for each row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import fx

from glue_compiler.fx.operators import Call, Operators, Value
from glue_compiler.passes.chunk_loss.row_steps import NotALoss
from glue_compiler.passes.chunk_loss.wide_values import OF_ENTROPY, Wide, is_over_classes

aten = torch.ops.aten

Kind = Literal["cross_entropy", "gather", "logsumexp", "sum", "mean", "argmax"]
_REDUCTIONS = ("none", "mean", "sum")


@dataclass(frozen=True)
class CrossEntropy:
    """How the losses of rows become one: ``class_weight`` is ``[V]`` or None."""

    reduction: str
    ignore_index: int
    label_smoothing: float
    class_weight: Value | None


@dataclass(frozen=True)
class Site:
    """One operator that takes wide values, and gives numbers of rows.

    Attributes:
        value: what it gives.
        wide: what it takes; of ``"cross_entropy"`` logits or their log-probabilities, which means the same.
        target: of ``"cross_entropy"`` and ``"gather"`` the classes, in the shape that the operator takes.
        keepdim: does the result keep a size of one for the classes?
        is_detached: no gradients pass through it.
    """

    kind: Kind
    value: Value
    wide: Wide
    target: Value | None = None
    keepdim: bool = False
    loss: CrossEntropy | None = None
    is_detached: bool = False

    @property
    def node(self) -> fx.Node:
        return self.value.node

    def detached(self) -> Site:
        return replace(self, is_detached=True)


def site_of(call: Call, node: fx.Node, step: int, wide: Mapping[Value, Wide], operators: Operators) -> Site | None:
    """The site that ``call``, step ``step`` of ``node``, is; None if it is none.

    Raises:
        NotALoss: it is one, in a form that is not served.
    """
    source = call.arguments.get("self")
    others = [value for name, value in call.arguments.items() if name != "self" and isinstance(value, Value)]
    taken = wide.get(source) if isinstance(source, Value) else None
    if taken is None:
        return None
    assert isinstance(source, Value)
    rank = operators.rank(source)
    value = Value(node, step)
    given = call.arguments
    site: Site | None = None
    match call.operator:
        case aten.cross_entropy_loss | aten.nll_loss_nd | aten.nll_loss | aten.nll_loss2d:
            site = _cross_entropy(call, value, taken, rank, operators)
        case aten.gather:  # not take_along_dim, to which -1 is the last class
            index = given["index"]
            if isinstance(given["dim"], int) and is_over_classes(given["dim"], taken, rank):
                _require_one_class(index, source, taken, operators)
                site = Site("gather", value, taken, index, True)
        case aten.logsumexp if taken.form == "logits":
            if is_over_classes(given["dim"], taken, rank):
                site = Site("logsumexp", value, taken, None, given["keepdim"])
        case aten.sum | aten.mean if given.get("dim") is not None and is_over_classes(given["dim"], taken, rank):
            kind: Kind = "sum" if call.operator is aten.sum else "mean"
            if taken.form == "probabilities":
                raise NotALoss("probabilities are added up")
            site = Site(kind, value, taken, None, given["keepdim"])
        case aten.argmax if given["dim"] is not None and is_over_classes(given["dim"], taken, rank):
            site = Site("argmax", value, taken, None, given["keepdim"])
        case aten.max if "dim" in given and is_over_classes(given["dim"], taken, rank):
            if any(operators.value(user) == value and user.users for user in node.users):
                raise NotALoss("the largest is taken, and not only its place")
            site = Site("argmax", Value(node, step, 1), taken, None, given["keepdim"])
        case _:
            return None
    if site is None:
        return None
    if any(other in wide for other in others):
        raise NotALoss("it takes them twice")
    if site.kind == "argmax" and (taken.form in OF_ENTROPY or taken.factor <= 0):
        raise NotALoss("the largest of other numbers than logits")
    if taken.form in OF_ENTROPY and site.kind not in ("sum", "mean"):
        raise NotALoss("probabilities times logarithms that are not added up")
    return site


def _cross_entropy(call: Call, value: Value, taken: Wide, rank: int, operators: Operators) -> Site:
    given = call.arguments
    expected: tuple[str, ...] = ("log_probabilities",)
    if call.operator is aten.cross_entropy_loss:
        expected = ("log_probabilities", "logits")  # log-probabilities are logits of themselves
    target, class_weight = given["target"], given["weight"]
    if taken.form not in expected or taken.factor != 1.0:
        raise NotALoss(f"it is given {taken.form.replace('_', ' ')} of them")
    if taken.classes != (0 if rank == 1 else 1):
        raise NotALoss("it takes another dimension for the classes")
    if not operators.is_tensor(target):
        raise NotALoss("the targets are no plain tensor")
    meta = operators.meta(target)
    if meta.dtype != torch.int64:
        raise NotALoss(f"the targets are of {meta.dtype}: probabilities, or classes in another form than int64")
    if class_weight is not None and not operators.is_tensor(class_weight):
        raise NotALoss("the weights of classes are no plain tensor")
    reduction, ignored = _REDUCTIONS[given["reduction"]], given["ignore_index"]
    smoothing = float(given.get("label_smoothing", 0.0))
    if not isinstance(ignored, int) or not 0 <= smoothing <= 1:
        raise NotALoss("the index that it ignores is no constant")
    if reduction == "none" and class_weight is not None and smoothing:
        raise NotALoss("the smoothed losses of single rows, with weights of classes")
    return Site("cross_entropy", value, taken, target, False, CrossEntropy(reduction, ignored, smoothing, class_weight))


def _require_one_class(index: Any, source: Value, taken: Wide, operators: Operators) -> None:
    if not operators.is_tensor(index) or operators.dtype(index) != torch.int64:
        raise NotALoss("the index is no plain tensor of int64")
    shape = operators.shape(source)
    if operators.shape(index) != (*shape[: taken.classes], 1, *shape[taken.classes + 1 :]):
        raise NotALoss("it takes another number of classes than one of each row")
