"""Predicts the device memory of a training step from its two graphs. Changes nothing.

Counted is what the graphs can see: parameters and other inputs, which stay for the whole step; saved tensors from
where they are made to their last use in backward; gradients to the end of backward; and the intermediate values that
are alive at a time. Sizes are upper bounds where they are dynamic. Not counted: optimiser states, gradients from
earlier steps, other graphs, and what an operator takes for itself while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

import torch
from torch import fx

from glue_compiler.fx.device_bytes import bytes_counter
from glue_compiler.fx.fused_reads import FusedLives, fused_lives, is_pointwise
from glue_compiler.fx.storage_roots import storage_root
from glue_compiler.fx.training_pair import TrainingPair
from glue_compiler.fx.values import inputs_of
from glue_compiler.passes.overlap_offload.schedule import is_product, realised_values


def peak_of(
    pair: TrainingPair,
    shape_env: object,
    *,
    only_realised: bool,
    scratch: Callable[[fx.Node], int] = lambda node: 0,
) -> int:
    """The most bytes at a time of a pair as it is, with the copies that it has.

    A source counts until its copy is waited for, and what comes back from the start of that copy.

    Args:
        only_realised: a compiler fuses what lies between products and attention, as Inductor does: of intermediate
            values, those count that products or attention read or write, or that are needed on both sides of one.
        scratch: what an operator takes for itself while it runs.
    """
    inputs = inputs_of(pair.forward.graph)
    nbytes = bytes_counter(inputs, shape_env)
    on_the_host = {node.name for gm in (pair.forward, pair.backward) for node in gm.graph.nodes if _is_host(node)}
    excluded = on_the_host | {node.name for node in inputs}
    most = 0
    for gm in (pair.forward, pair.backward):
        alive = _live_bytes(gm, excluded, only_realised, nbytes)
        most = max(most, *(held + scratch(node) for held, node in zip(alive, gm.graph.nodes, strict=True)))
    return sum(map(nbytes, inputs)) + most


def kept_bytes(pair: TrainingPair, shape_env: object) -> int:
    """What a pair's forward leaves on the device for its backward, beside its inputs."""
    inputs = inputs_of(pair.forward.graph)
    nbytes = bytes_counter(inputs, shape_env)
    there = {storage_root(node) for node in inputs}
    return sum(nbytes(root) for root in {storage_root(node) for node in pair.saved if not _is_host(node)} - there)


def _is_host(node: fx.Node) -> bool:
    makes = node.target in (torch.ops.glue.offload_start.default, torch.ops.glue.offload_wait.default)
    return makes or any(user.target is torch.ops.glue.reload_start.default for user in node.users)


def _live_bytes(
    gm: fx.GraphModule, excluded: Iterable[str], only_realised: bool, nbytes: Callable[[fx.Node], int]
) -> list[int]:
    """For each place of a graph, the bytes alive there but for the memory of the ``excluded`` nodes."""
    nodes = list(gm.graph.nodes)
    realised = realised_values(gm)
    # How many products and attentions lie in front of each place.
    barriers = [0, *accumulate(map(is_product, nodes))]
    excluded = set(excluded)
    memories = _memories(nodes, realised if only_realised else None, nbytes)
    changes = [0] * (len(nodes) + 1)
    for place, node in enumerate(nodes):
        is_memory = storage_root(node) is node and node.name not in excluded and node not in memories.inlined
        end = memories.last.get(node, place)
        is_across = place + 1 < len(barriers) and barriers[end] > barriers[place + 1]
        if is_memory and (node.op == "placeholder" or node in realised or is_across or not only_realised):
            changes[memories.first.get(node, place)] += nbytes(node)
            changes[end + 1] -= nbytes(node)
    return list(accumulate(changes))[:-1]


def _memories(
    nodes: Sequence[fx.Node], realised: set[fx.Node] | None, nbytes: Callable[[fx.Node], int]
) -> FusedLives[fx.Node]:
    """When each memory is written and read, and the values that are in none. ``realised``: None, nothing fuses."""
    places = {node: place for place, node in enumerate(nodes) if storage_root(node) is node}

    def operands(node: fx.Node) -> set[fx.Node]:
        return set(map(storage_root, node.all_input_nodes))

    def may_inline(node: fx.Node) -> bool:
        return realised is not None and node not in realised and is_pointwise(node)

    def is_written(node: fx.Node) -> bool:
        return realised is not None and node in realised and is_pointwise(node)

    return fused_lives(places, operands, may_inline, is_written, nbytes)
