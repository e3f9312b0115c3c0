"""Finds embeddings of large tables that are trained in 16 bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from glue_compiler.fx.effects import EffectAnalysis
from glue_compiler.fx.operators import given_as
from glue_compiler.fx.records import RecordedOperator
from glue_compiler.fx.values import is_plain, value_of
from glue_compiler.ops import embedding as embeddings
from glue_compiler.pipeline.results import Skip


@dataclass(frozen=True)
class Embedding:
    """What ``node`` is: rows of ``weight`` [V, D]; ``settings``: padding_idx, scale_grad_by_freq."""

    node: fx.Node
    weight: fx.Node
    indices: fx.Node
    settings: tuple[int, bool]


def find_embeddings(gm: fx.GraphModule, analysis: EffectAnalysis) -> tuple[list[Embedding], list[Skip]]:
    found, skips = [], []
    for node in gm.graph.nodes:
        # Cheaper to ask than what a call does, and few are left.
        if not any(_pays(each) for each in node.all_input_nodes) or not _is_trained(node):
            continue
        record = analysis.record_of(gm, node)
        if record is None or all(each.overload is not torch.ops.aten.embedding.default for each in record.operators):
            continue
        if len(record.operators) > 1:
            skips.append(Skip("the call also writes its table, as max_norm makes it", node.name))
        elif record.operators[0].arguments["sparse"]:
            skips.append(Skip("its gradient is sparse, and is no table", node.name))
        elif (embedding := _embedding(node, record.operators[0])) is not None:
            found.append(embedding)
    return found, skips


def _embedding(node: fx.Node, made: RecordedOperator) -> Embedding | None:
    weight, indices = (given_as(node, made, name) for name in ("weight", "indices"))
    padding_idx = made.arguments["padding_idx"]
    if weight is None or indices is None or not isinstance(padding_idx, int):
        return None
    if not _pays(weight) or not is_plain(value_of(indices)):
        return None
    return Embedding(node, weight, indices, (padding_idx, made.arguments["scale_grad_by_freq"]))


def _pays(node: fx.Node) -> bool:
    value = value_of(node)
    return isinstance(value, torch.Tensor) and is_plain(value) and value.dim() == 2 and embeddings.pays(value)


def _is_trained(node: fx.Node) -> bool:
    value = value_of(node)
    return isinstance(value, torch.Tensor) and value.requires_grad
