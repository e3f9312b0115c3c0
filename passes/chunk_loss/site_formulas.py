"""Puts losses and other numbers of rows together from the statistics of their logits."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from glue_compiler.fx.values import expressions, storages_of, value_of, values_of
from glue_compiler.ops.linear_row_statistics import NAMES
from glue_compiler.ops.shared_classes import of_all_ranks
from glue_compiler.passes.chunk_loss.groups import Statistics
from glue_compiler.passes.chunk_loss.heads import Head
from glue_compiler.passes.chunk_loss.losses import Site
from glue_compiler.passes.chunk_loss.row_nodes import RowWriter

aten = torch.ops.aten


class SiteFormula:
    """Of the sites of one group. ``wants``: which statistics they need."""

    def __init__(self, group: Statistics, writer: RowWriter, head: Head) -> None:
        self.group = group
        self.writer = writer
        self.make = writer.make
        self.classes, self.shared = head.classes, head.shared
        needed = {name for site in group.sites for name in _needs(site)}
        self.wants = tuple(name in needed for name in NAMES)
        self._found: dict[str, fx.Node] = {}

    def flat_target(self) -> fx.Node | None:
        """The group's targets ``[N]``: below 0 what is ignored, and past the last class what names none.

        Where ranks share the classes, they are counted from this rank's first, and those of others are below 0.
        """
        site = self.group.target
        if site is None or site.target is None:
            return None
        target = self.make.proxy(self.writer.node(site.target))
        if site.loss is None:
            target = target.squeeze(site.wide.classes)
        target = target.reshape([-1])
        found: Any = torch.where(target < 0, self.classes, target)
        if self.shared is not None:
            last = self.shared.first + self.shared.classes
            is_elsewhere = (found < self.shared.first).logical_or((found >= last).logical_and(found < self.classes))
            found = torch.where(is_elsewhere, -1, found - self.shared.first)
        if site.loss is not None:
            found = torch.where(target == site.loss.ignore_index, -1, found)
        return found.node

    def take(self, statistics: fx.Node, rows: fx.Node, weight: fx.Node) -> None:
        """What the operator gave, and rows ``[*rows, K]`` in the shape of the group's; ``weight`` is the head's."""
        shape = expressions(value_of(rows).shape[:-1])
        names = [name for name, wanted in zip(NAMES, self.wants, strict=True) if wanted]
        found = {name: self.make.call(operator.getitem, statistics, NAMES.index(name)) for name in names}
        if self.shared is not None:
            found = self._of_all_ranks(found, weight)
        for name, node in found.items():
            self._found[name] = self.writer.reshaped(node, shape)

    def _of_all_ranks(self, own: dict[str, fx.Node], weight: fx.Node) -> dict[str, fx.Node]:
        """Statistics of all classes, from those of this rank's."""
        names, given = list(own), list(own.values())
        target = self.group.target.target if self.group.target is not None else None
        if target is not None:
            labels = self.make.proxy(self.writer.node(target)).reshape([-1])
            given.append(labels.to(value_of(given[0]).dtype).node)
        whole = self.make.proxy(self.make.call(of_all_ranks, given, weight))
        parts = {name: whole[:, place] for place, name in enumerate(names)}  # [ranks, N] each
        found = {name: x.logsumexp(0) if name == "logsumexp" else x.sum(0) for name, x in parts.items()}
        if target is not None:
            labels = whole[:, len(names)]
            differ = (labels != labels[:1]).any(0)  # ranks do not agree: no number would be right
            found = {name: torch.where(differ, math.nan, x) for name, x in found.items()}
        return {name: x.node for name, x in found.items()}

    def result(self, site: Site) -> fx.Node:
        """What ``site`` gives, as nodes of its own."""
        result = self._loss(site) if site.loss is not None else self._number(site)
        expected = value_of(site.node)
        expected = expected[site.value.leaf] if isinstance(expected, tuple | list) else expected
        if storages_of(value_of(result.node)) & storages_of(values_of(self._found.values())):
            result = result.clone()  # which others read too, and who gets it may write
        if site.keepdim:
            result = result.unsqueeze(site.wide.classes)
        if value_of(result.node).dtype != expected.dtype:
            result = result.to(expected.dtype)
        if site.is_detached and value_of(result.node).requires_grad:
            result = result.detach()
        return result.node

    def _of(self, name: str, site: Site) -> Any:
        """A statistic in the shape of the site's rows."""
        node = self._found[name]
        path = site.wide.path[len(self.group.path) :]
        return self.make.proxy(self.writer.along(node, path, value_of(node).dim()))

    def _number(self, site: Site) -> Any:
        form, factor = site.wide.form, site.wide.factor
        match site.kind:
            case "argmax" | "logsumexp":
                return self._of(site.kind, site)
            case "gather":
                result = self._of("target_logit", site)
                if form != "logits":
                    result = result - self._of("logsumexp", site)
                if form == "probabilities":
                    return result.exp()
            case _ if form == "entr":
                result = self._of("entropy", site)
            case _ if form == "p_log_p":
                result, factor = self._entropy_of_products(site), -factor
            case _ if form == "p_logits":
                result = self._of("logsumexp", site) - self._entropy_of_products(site)
            case _:
                result = self._of("sum", site)
                if form != "logits":
                    result = result - self._of("logsumexp", site) * float(self.classes)
        if site.kind == "mean":
            factor /= self.classes
        return result if factor == 1.0 else result * factor

    def _entropy_of_products(self, site: Site) -> Any:
        """The entropy, and NaN with a gradient of NaN where a score is minus infinity, which is multiplied by 0."""
        return self._of("entropy", site) * (self._of("sum", site).detach() * 0.0 + 1.0)

    def _loss(self, site: Site) -> Any:
        loss = site.loss
        assert loss is not None
        assert site.target is not None
        logsumexp = self._of("logsumexp", site)
        result = logsumexp - self._of("target_logit", site)
        rows = expressions(value_of(logsumexp.node).shape)
        target = self.make.proxy(self.writer.reshaped(self.writer.node(site.target), rows))
        ignored = target == loss.ignore_index
        weights = None
        if loss.class_weight is not None:
            weight = self.make.proxy(self.writer.node(loss.class_weight)).to(self.group.dtype)
            weights = torch.where(ignored, 0.0, weight[torch.where(ignored, 0, target)])
            result = result * weights
        if loss.label_smoothing:
            spread = logsumexp * float(self.classes) - self._of("sum", site)
            result = result * (1 - loss.label_smoothing) + spread * (loss.label_smoothing / self.classes)
        result = torch.where(ignored, 0.0, result)
        if loss.reduction == "none":
            return result
        if loss.reduction == "sum":
            return result.sum()
        return result.sum() / (weights.sum() if weights is not None else ignored.logical_not().sum())


def _needs(site: Site) -> tuple[str, ...]:
    if site.loss is not None:
        return ("logsumexp", "target_logit", *(("sum",) if site.loss.label_smoothing else ()))
    match site.kind:
        case "argmax" | "logsumexp":
            return (site.kind,)
        case "gather":
            return ("target_logit",) if site.wide.form == "logits" else ("target_logit", "logsumexp")
        case _ if site.wide.form == "entr":
            return ("entropy",)
        case _ if site.wide.form == "p_log_p":
            return ("entropy", "sum")
        case _ if site.wide.form == "p_logits":
            return ("entropy", "sum", "logsumexp")
        case _:
            return ("sum",) if site.wide.form == "logits" else ("sum", "logsumexp")
