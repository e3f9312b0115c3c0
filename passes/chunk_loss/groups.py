"""Which losses are computed together: one operator makes the chunks of logits once for all of its losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from glue_compiler.fx.operators import Operators, Value
from glue_compiler.passes.chunk_loss.losses import Site
from glue_compiler.passes.chunk_loss.row_steps import RowStep
from glue_compiler.passes.chunk_loss.wide_values import Scores, scores_of

_DIFFERENTIABLE = ("gather", "logsumexp", "sum", "mean")


@dataclass
class Fused:
    """``site``, a cross entropy, by ``linear_cross_entropy``, and ``predictions`` of the same rows."""

    site: Site
    scores: Scores
    predictions: list[Site] = field(default_factory=list)

    @property
    def sites(self) -> list[Site]:
        return [self.site, *self.predictions]


@dataclass
class Statistics:
    """``sites`` by ``linear_row_statistics`` of the rows at ``path``; those of a site are the same, or picked of them.

    Attributes:
        target: the site whose target it takes.
    """

    scores: Scores
    path: tuple[RowStep, ...]
    dtype: torch.dtype
    target: Site | None = None
    sites: list[Site] = field(default_factory=list)

    @property
    def is_detached(self) -> bool:
        return all(site.is_detached or site.kind == "argmax" for site in self.sites)


Group = Fused | Statistics


def groups_of(
    sites: Sequence[Site], operators: Operators, order: Mapping[fx.Node, int], is_shared: bool
) -> list[Group]:
    """The groups that compute ``sites``. ``order``: the places of nodes in the graph; an operator stands before the
    first of its sites, and must find its target there. ``is_shared``: ranks share the classes, so that the statistics
    of all are needed before a gradient is."""
    grouping = _Grouping(operators, order)
    for site in sites:
        is_fused = site.loss is not None and site.loss.reduction != "none" and not is_shared
        if is_fused and not grouping.is_mixed(site, sites):
            grouping.fused.append(Fused(site, scores_of(site.wide.steps)))
        elif site.target is not None:
            grouping.add(site)
    for site in sites:
        if site.target is None and not (site.kind == "argmax" and grouping.predict(site)):
            grouping.add(site)
    return [*grouping.fused, *grouping.statistics]


@dataclass
class _Grouping:
    operators: Operators
    order: Mapping[fx.Node, int]
    fused: list[Fused] = field(default_factory=list)
    statistics: list[Statistics] = field(default_factory=list)

    def is_mixed(self, loss: Site, sites: Sequence[Site]) -> bool:
        """Are other numbers of the same rows differentiated too? Backward then makes their logits again anyway."""
        assert loss.loss is not None
        if loss.loss.class_weight is not None and loss.loss.label_smoothing:
            return False
        return any(
            site.kind in _DIFFERENTIABLE and not site.is_detached and _rows(site) == _rows(loss) for site in sites
        )

    def predict(self, site: Site) -> bool:
        """Let a cross entropy of the same rows make the predictions."""
        for fused in self.fused:
            is_there = self._is_there(fused.site.target, site) and self._stand_together([*fused.sites, site])
            if _rows(fused.site) == _rows(site) and is_there:
                fused.predictions.append(site)
                return True
        return False

    def add(self, site: Site) -> None:
        scores, path = _rows(site)
        for group in self.statistics:
            is_of_them = path == group.path or (site.target is None and path[: len(group.path)] == group.path)
            is_served = self._share_target(group, site) and self._stand_together([*group.sites, site])
            if group.scores != scores or not is_of_them or not is_served:
                continue
            group.target = group.target or (site if site.target is not None else None)
            group.dtype = torch.promote_types(group.dtype, _work(site))
            group.sites.append(site)
            return
        target = site if site.target is not None else None
        self.statistics.append(Statistics(scores, path, _work(site), target, [site]))

    def _share_target(self, group: Statistics, site: Site) -> bool:
        if site.target is None or group.target is None:
            target = (group.target or site).target
            return target is None or all(self._is_there(target, each) for each in (*group.sites, site))
        first, second = group.target, site
        assert first.target is not None
        same = self.operators.number(first.target) == self.operators.number(site.target)
        return (
            same
            and first.kind == second.kind
            and first.wide.classes == second.wide.classes
            and _ignored(first) == _ignored(second)
        )

    def _stand_together(self, sites: Sequence[Site]) -> bool:
        """Does the first of them, where the operator is written, pass gradients on if any of them does?"""
        is_on = {site: self.operators.is_grad_on(site.node) for site in sites}
        return is_on[min(sites, key=lambda site: self.order[site.node])] or not any(is_on.values())

    def _is_there(self, target: Value | None, site: Site) -> bool:
        """Has ``target`` been made when ``site`` comes?"""
        assert target is not None
        return self.order[target.node] < self.order[site.node]


def _rows(site: Site) -> tuple[Scores, tuple[RowStep, ...]]:
    return scores_of(site.wide.steps), site.wide.path


def _work(site: Site) -> torch.dtype:
    return torch.promote_types(site.wide.dtype, torch.float32)


def _ignored(site: Site) -> int | None:
    return site.loss.ignore_index if site.loss is not None else None
