"""Puts the copies of a schedule into the forward and the backward graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from glue_compiler.compat import symbols
from glue_compiler.fx.training_pair import TrainingPair
from glue_compiler.fx.values import value_in, value_of
from glue_compiler.passes.overlap_offload.schedule import Move, Schedule

_ops = torch.ops.glue


def apply_schedule(pair: TrainingPair, schedule: Schedule, pinned_limit: int | None, buffers: int) -> dict[str, int]:
    """Insert starts and waits; the saved values become host tensors in both graphs.

    Returns the number of the region of each host tensor, by its name in both graphs.
    """
    limit = -1 if pinned_limit is None else pinned_limit
    groups = schedule.moves
    hosts: list[list[fx.Node]] = []
    waits: list[list[fx.Node]] = []
    # In front of each start the wait that makes room for it: where both have one place, they keep this order.
    for number in range(len(groups) + buffers):
        if 0 <= number - buffers < len(groups):
            waits.append(_wait_offloads(pair.forward, groups[number - buffers], hosts[number - buffers]))
        if number < len(groups):
            # The copies that used this place must have been waited for: a data dependency, so no compiler undoes it.
            free = waits[-1][-1] if waits else None
            hosts.append([_start_offload(pair.forward, move, free, limit) for move in groups[number]])
    saved = {
        move.one.saved: done
        for group, ended in zip(groups, waits, strict=True)
        for move, done in zip(group, ended, strict=True)
    }
    _return_instead(pair, saved)
    for group in groups:
        for move in group:
            _reload(pair.backward, move, saved[move.one.saved])
    pair.forward.recompile()
    pair.backward.recompile()
    return {host.name: number for number, ended in enumerate(waits) for host in ended}


def _start_offload(gm: fx.GraphModule, move: Move, free: fx.Node | None, limit: int) -> fx.Node:
    with gm.graph.inserting_before(move.offload_start):
        return _call(gm, _ops.offload_start.default, move.one.saved, free, limit)


def _wait_offloads(gm: fx.GraphModule, group: Sequence[Move], hosts: Sequence[fx.Node]) -> list[fx.Node]:
    """Waits are chained: what depends on the last one depends on all."""
    waits: list[fx.Node] = []
    for move, host in zip(group, hosts, strict=True):
        with gm.graph.inserting_before(move.offload_wait):
            after = waits[-1] if waits else move.offload_after
            waits.append(_call(gm, _ops.offload_wait.default, host, move.one.saved, after))
    return waits


def _reload(gm: fx.GraphModule, move: Move, saved: fx.Node) -> None:
    taken = move.one.taken
    with gm.graph.inserting_before(taken):
        host = gm.graph.placeholder(saved.name)
    host.meta["val"] = value_of(saved)
    device = value_of(taken).device
    users = list(taken.users)
    with gm.graph.inserting_before(move.reload_start):
        start = _call(gm, _ops.reload_start.default, host, move.start_after, device)
    with gm.graph.inserting_before(move.reload_wait):
        wait = _call(gm, _ops.reload_wait.default, start, move.wait_after)
    for user in users:
        user.replace_input_with(taken, wait)
    gm.graph.erase_node(taken)
    assert host.name == saved.name, f"'{saved.name}' is a name of backward already"


def _return_instead(pair: TrainingPair, saved: dict[fx.Node, fx.Node]) -> None:
    output = pair.forward.graph.output_node()
    (values,) = output.args
    assert isinstance(values, tuple | list)
    changed = [
        saved.get(value, value) if place >= pair.num_outputs and isinstance(value, fx.Node) else value
        for place, value in enumerate(values)
    ]
    output.args = (type(values)(changed),)


def _call(gm: fx.GraphModule, target: Callable[..., Any], *args: Any) -> fx.Node:
    node = gm.graph.call_function(target, args)
    operands = list(map(value_in, args))
    mode = symbols.fake_mode_of(operands)
    assert mode is not None
    with mode:
        node.meta["val"] = target(*operands)
    return node
