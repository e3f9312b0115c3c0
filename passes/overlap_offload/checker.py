"""Proves of the final graphs that copies are paired, in bounds, and never read early. Runs in every compile.

It reads the graphs alone, not the schedule that they were made from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from glue_compiler.errors import GlueInvariantError
from glue_compiler.fx.storage_roots import storage_root
from glue_compiler.fx.training_pair import TrainingPair


@dataclass(frozen=True)
class Copy:
    """One copy of a final graph, by places of nodes: ``start``, ``wait``, and the ``end`` of what it holds alive.

    Forward: a copy to the host holds its source until the wait, so ``end == wait``. Backward: a reloaded buffer lives
    until its last use. ``group`` names tensors that move together and count as one.
    """

    name: str
    group: int
    start: int
    wait: int
    end: int


def check_copies(copies: Iterable[Copy], buffers: int) -> None:
    """At every place at most ``buffers`` groups are held, and every copy starts before it is waited for.

    Raises:
        GlueInvariantError: names the copies.
    """
    copies = list(copies)
    for copy in copies:
        if not copy.start < copy.wait <= copy.end:
            raise GlueInvariantError(
                f"'{copy.name}' starts at {copy.start}, is waited for at {copy.wait}: out of order"
            )
    for copy in copies:
        alive = {other.group: other.name for other in copies if other.start <= copy.start <= other.end}
        if len(alive) > buffers:
            raise GlueInvariantError(f"{', '.join(alive.values())} are alive at one time, and {buffers} are allowed")


def check_offload(pair: TrainingPair, groups: Mapping[str, int], buffers: int) -> None:
    """Check the copies of both graphs. ``groups``: the group of each saved host tensor, by its name.

    Raises:
        GlueInvariantError: a copy without its wait, a buffer read without one, a host tensor that never comes back,
            or more than ``buffers`` alive.
    """
    check_copies(_offloads(pair, groups), buffers)
    check_copies(_reloads(pair.backward, groups), buffers)


def _offloads(pair: TrainingPair, groups: Mapping[str, int]) -> list[Copy]:
    nodes = list(pair.forward.graph.nodes)
    places = {node: place for place, node in enumerate(nodes)}
    returned = set(pair.saved)
    copies = []
    for start in _calls(nodes, torch.ops.glue.offload_start.default):
        wait = _only_wait(start, torch.ops.glue.offload_wait.default)
        if storage_root(_operand(wait, 1)) is not storage_root(_operand(start, 0)):
            raise GlueInvariantError(f"'{wait.name}' does not hold the source of '{start.name}'")
        if wait not in returned:
            raise GlueInvariantError(f"'{wait.name}' is not saved for backward")
        copies.append(Copy(start.name, groups[wait.name], places[start], places[wait], places[wait]))
    waited = {_operand(wait, 0) for wait in _calls(nodes, torch.ops.glue.offload_wait.default)}
    if len(waited) != len(copies):
        raise GlueInvariantError("forward waits for a copy that it does not start")
    return copies


def _reloads(backward: fx.GraphModule, groups: Mapping[str, int]) -> list[Copy]:
    nodes = list(backward.graph.nodes)
    places = {node: place for place, node in enumerate(nodes)}
    last_use: dict[fx.Node, int] = {}
    for node in nodes:
        last_use.update(dict.fromkeys(map(storage_root, node.all_input_nodes), places[node]))
    hosts = {node.name: node for node in nodes if node.op == "placeholder" and node.name in groups}
    if missing := set(groups) - set(hosts):
        raise GlueInvariantError(f"backward does not take {', '.join(sorted(missing))}")
    copies = []
    for name, host in hosts.items():
        readers = list(host.users)
        if [reader.target for reader in readers] != [torch.ops.glue.reload_start.default]:
            raise GlueInvariantError(f"'{name}' is on the host and is read by {readers}, not by one reload")
        start = readers[0]
        wait = _only_wait(start, torch.ops.glue.reload_wait.default)
        if not wait.users:
            raise GlueInvariantError(f"'{wait.name}' is read by nobody")
        copies.append(Copy(start.name, groups[name], places[start], places[wait], last_use[storage_root(wait)]))
    return copies


def _only_wait(start: fx.Node, target: object) -> fx.Node:
    waits = [user for user in start.users if user.target is target and _operand(user, 0) is start]
    if len(waits) != 1 or set(start.users) != set(waits):
        raise GlueInvariantError(f"'{start.name}' is read by {list(start.users)}, and not by one wait alone")
    return waits[0]


def _operand(node: fx.Node, index: int) -> fx.Node:
    value = node.args[index]
    assert isinstance(value, fx.Node)
    return value


def _calls(nodes: Sequence[fx.Node], target: object) -> list[fx.Node]:
    return [node for node in nodes if node.op == "call_function" and node.target is target]
