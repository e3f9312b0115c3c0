"""Tensors that a graph itself copies to the host in forward and back in backward, one after the other with compute."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from glue_compiler.compat import device_copies
from glue_compiler.fx import bodies
from glue_compiler.fx.training_pair import TrainingPair
from glue_compiler.fx.values import inputs_of, tensors_in, value_of
from glue_compiler.passes.overlap_offload.saved_tensors import kept_by_the_caller, memory_of, regions_started, why_not
from glue_compiler.pipeline.results import Skip


@dataclass(frozen=True)
class RoundTrip:
    """``source`` is copied to ``host``, which forward saves; backward takes it as ``taken`` and copies it ``back``."""

    source: fx.Node
    host: fx.Node
    taken: fx.Node
    back: tuple[fx.Node, ...]


def find_round_trips(pair: TrainingPair) -> tuple[list[RoundTrip], list[Skip]]:
    """The copies that are nothing but a way to keep ``source`` for backward, and why others are left alone.

    Nobody but backward reads the host tensor, and all that backward does with it is to copy it back to where it was,
    in the same dtype and layout: then backward could as well take ``source``.
    """
    kept = kept_by_the_caller(pair)
    placeholders = {node.name: node for node in inputs_of(pair.backward.graph)}
    output = pair.forward.graph.output_node()
    found: list[RoundTrip] = []
    found_memory: set[int] = set()
    skips = []
    for host in pair.saved:
        source = device_copies.copied_from(host)
        if source is None or source in pair.saved or host in pair.outputs or set(host.users) != {output}:
            continue
        taken = placeholders[host.name]
        back = tuple(_copies_of(taken))
        kinds = {(value_of(node).dtype, value_of(node).device) for node in (source, *back)}
        readers = [reader for node in back for reader in node.users]
        if not back or len(kinds) > 1 or value_of(host).dtype != value_of(source).dtype:
            continue
        reason = why_not(source, regions_started(source, readers), pair, kept, readers)
        if memory_of(source) & found_memory:
            reason = "another copy of the same memory moves already"
        if reason:
            skips.append(Skip.at(host, f"a copy to the host and back stays as it is: {reason}"))
        else:
            found.append(RoundTrip(source, host, taken, back))
            found_memory |= memory_of(source)
    return found, skips


def _copies_of(taken: fx.Node) -> list[fx.Node]:
    """All copies of a placeholder if nothing else reads it, else none."""
    copies = []
    for user in taken.users:
        # A copy in two parts: the second part may name the host tensor too, to keep it alive.
        ends = [end for end in user.users if device_copies.start_of(end) is user]
        if device_copies.copied_from(user) is taken:
            copies.append(user)
        elif not (ends and device_copies.copied_from(ends[0]) is taken):
            return []
    return copies or [end for user in taken.users for end in user.users if device_copies.copied_from(end) is taken]


def save_sources(pair: TrainingPair, round_trips: list[RoundTrip]) -> None:
    """Forward saves the sources, and backward takes them, instead of copies: to be scheduled like any saved tensor."""
    output = pair.forward.graph.output_node()
    for trip in round_trips:
        output.replace_input_with(trip.host, trip.source)
        _erase_copy(pair.forward.graph, trip.host)
        placeholder = _placeholder(pair.backward.graph, trip)
        for back in trip.back:
            back.replace_all_uses_with(placeholder)
            _erase_copy(pair.backward.graph, back)
        pair.backward.graph.erase_node(trip.taken)
    pair.forward.recompile()
    pair.backward.recompile()


def _placeholder(backward: fx.Graph, trip: RoundTrip) -> fx.Node:
    """Where ``trip.taken`` is, and of the source's name, by which the two graphs belong together."""
    name = trip.source.name
    for other in backward.nodes:
        if other.name == name:
            other._rename(f"{name}_of_backward")
    with backward.inserting_before(trip.taken):
        placeholder = backward.placeholder(name)
    placeholder.name = placeholder.target = name
    placeholder.meta["val"] = value_of(trip.source)
    return placeholder


def _erase_copy(graph: fx.Graph, copy: fx.Node) -> None:
    start = device_copies.start_of(copy)
    graph.erase_node(copy)
    if start is not None and not start.users:
        graph.erase_node(start)


def may_copy(captured: fx.GraphModule) -> bool:
    """Does a captured graph bring a tensor that is no mere number from another device to the host?"""
    nodes = (node for module in bodies.graph_modules(captured) for node in module.graph.nodes)
    return any(_is_on_host(value_of(node)) and any(map(_is_elsewhere, node.all_input_nodes)) for node in nodes)


def _is_on_host(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.dim() > 0


def _is_elsewhere(node: fx.Node) -> bool:
    return any(tensor.device.type != "cpu" for tensor in tensors_in(value_of(node)))
