"""Puts losses and other numbers of rows together from the statistics of their logits."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from glue_compiler.fx.values import expression, storages_of, value_of
from glue_compiler.passes.chunk_loss.groups import Statistics
from glue_compiler.passes.chunk_loss.losses import Site
from glue_compiler.passes.chunk_loss.row_nodes import RowWriter

aten = torch.ops.aten

NAMES = ("logsumexp", "target_logit", "sum", "entropy", "argmax")


class SiteFormula:
    """Of the sites of one group. ``wants``: which statistics they need."""

    def __init__(self, group: Statistics, writer: RowWriter, classes: int) -> None:
        self.group = group
        self.writer = writer
        self.classes = classes
        needed = {name for site in group.sites for name in _needs(site)}
        self.wants = tuple(name in needed for name in NAMES)
        self._found: dict[str, fx.Node] = {}
        self._ignored: fx.Node | None = None

    def flat_target(self) -> fx.Node | None:
        """The group's targets ``[N]``: below 0 what is ignored, and past the last class what names none."""
        site = self.group.target
        if site is None or site.target is None:
            return None
        target = self.writer.node(site.target)
        if site.loss is None:
            target = self._call(aten.squeeze.dim, target, site.wide.classes)
        target = self._call(aten.reshape.default, target, [-1])
        found = self._call(aten.where.ScalarSelf, self._call(aten.lt.Scalar, target, 0), self.classes, target)
        if site.loss is not None:
            ignored = self._call(aten.eq.Scalar, target, site.loss.ignore_index)
            found = self._call(aten.where.ScalarSelf, ignored, -1, found)
        return found

    def take(self, statistics: fx.Node, rows: fx.Node) -> None:
        """What the operator gave, and rows ``[*rows, K]`` in the shape of the group's."""
        shape = tuple(map(expression, value_of(rows).shape[:-1]))
        for index, name in enumerate(NAMES):
            if self.wants[index]:
                found = self._call(operator.getitem, statistics, index)
                self._found[name] = self.writer.reshaped(found, shape)

    def result(self, site: Site) -> fx.Node:
        """What ``site`` gives, as nodes of its own."""
        result = self._loss(site) if site.loss is not None else self._number(site)
        expected = value_of(site.node)
        expected = expected[site.value.leaf] if isinstance(expected, tuple | list) else expected
        if storages_of(value_of(result)) & storages_of([value_of(node) for node in self._found.values()]):
            result = self._call(aten.clone.default, result)  # which others read too, and who gets it may write
        if site.keepdim:
            result = self._call(aten.unsqueeze.default, result, site.wide.classes)
        if value_of(result).dtype != expected.dtype:
            result = self._call(aten.to.dtype, result, expected.dtype)
        if site.is_detached and value_of(result).requires_grad:
            result = self._call(aten.detach.default, result)
        return result

    def _of(self, name: str, site: Site) -> fx.Node:
        """A statistic in the shape of the site's rows."""
        node = self._found[name]
        return self.writer.along(node, site.wide.path[len(self.group.path) :], value_of(node).dim())

    def _number(self, site: Site) -> fx.Node:
        form, factor = site.wide.form, site.wide.factor
        result: fx.Node
        match site.kind:
            case "argmax" | "logsumexp":
                return self._of(site.kind, site)
            case "gather":
                result = self._of("target_logit", site)
                if form != "logits":
                    result = self._call(aten.sub.Tensor, result, self._of("logsumexp", site))
                if form == "probabilities":
                    return self._call(aten.exp.default, result)
            case _ if form == "p_log_p":
                result, factor = self._of("entropy", site), -factor
            case _ if form == "p_logits":
                result = self._call(aten.sub.Tensor, self._of("logsumexp", site), self._of("entropy", site))
            case _:
                result = self._of("sum", site)
                if form != "logits":
                    total = self._call(aten.mul.Scalar, self._of("logsumexp", site), float(self.classes))
                    result = self._call(aten.sub.Tensor, result, total)
        if site.kind == "mean":
            factor /= self.classes
        return result if factor == 1.0 else self._call(aten.mul.Scalar, result, factor)

    def _loss(self, site: Site) -> fx.Node:
        loss = site.loss
        assert loss is not None
        assert site.target is not None
        logsumexp = self._of("logsumexp", site)
        result = self._call(aten.sub.Tensor, logsumexp, self._of("target_logit", site))
        target = self.writer.reshaped(self.writer.node(site.target), tuple(map(expression, value_of(logsumexp).shape)))
        ignored = self._call(aten.eq.Scalar, target, loss.ignore_index)
        weights = None
        if loss.class_weight is not None:
            place = self._call(aten.where.ScalarSelf, ignored, 0, target)
            weight = self._call(aten.to.dtype, self.writer.node(loss.class_weight), self.group.dtype)
            weights = self._call(aten.index.Tensor, weight, [place])
            result = self._call(aten.mul.Tensor, result, weights)
        if loss.label_smoothing:
            total = self._call(aten.mul.Scalar, logsumexp, float(self.classes))
            spread = self._call(aten.sub.Tensor, total, self._of("sum", site))
            result = self._call(
                aten.add.Tensor,
                self._call(aten.mul.Scalar, result, 1 - loss.label_smoothing),
                self._call(aten.mul.Scalar, spread, loss.label_smoothing / self.classes),
            )
        result = self._call(aten.where.ScalarSelf, ignored, 0.0, result)
        if loss.reduction == "none":
            return result
        result = self._call(aten.sum.default, result)
        if loss.reduction == "sum":
            return result
        if weights is None:
            count = self._call(aten.sum.default, self._call(aten.logical_not.default, ignored))
        else:
            count = self._call(aten.sum.default, self._call(aten.where.ScalarSelf, ignored, 0.0, weights))
        return self._call(aten.div.Tensor, result, count)

    def _call(self, target: Callable[..., Any], *args: Any) -> fx.Node:
        return self.writer.make.call(self.writer.graph, target, *args)


def _needs(site: Site) -> tuple[str, ...]:
    if site.loss is not None:
        return ("logsumexp", "target_logit", *(("sum",) if site.loss.label_smoothing else ()))
    match site.kind:
        case "argmax" | "logsumexp":
            return (site.kind,)
        case "gather":
            return ("target_logit",) if site.wide.form == "logits" else ("target_logit", "logsumexp")
        case _ if site.wide.form == "p_log_p":
            return ("entropy",)
        case _ if site.wide.form == "p_logits":
            return ("entropy", "logsumexp")
        case _:
            return ("sum",) if site.wide.form == "logits" else ("sum", "logsumexp")
