"""States of random number generators that recomputation starts from (the same in torch 2.11 to 2.15)."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

_SAVES = torch._prims.rng_prims.run_and_save_rng_state
_SETS = torch._prims.rng_prims.run_with_rng_state
_HAS_ITS_OWN = torch._prims.rng_prims.graphsafe_run_with_rng_state

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


def is_rng_state(node: fx.Node) -> bool:
    """Is this what AOTAutograd saves so that a random operator, such as flash attention, gives the same again?

    Backward takes it under a name of its own (``rng_state_output_0``), unlike all other saved values.
    """
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, fx.Node) and source.target is _SAVES


def run_with_a_state(node: fx.Node) -> Call | None:
    """The operator that ``node`` runs, saving, setting or bringing the state of a random generator, with arguments."""
    if node.target is _SAVES:
        return node.args[0], node.args[1:], dict(node.kwargs)
    if node.target is _SETS:
        return node.args[1], node.args[2:], dict(node.kwargs)
    if node.target is _HAS_ITS_OWN:
        return node.args[0], node.args[1:], {name: arg for name, arg in node.kwargs.items() if name != "rng_state"}
    return None


def generators(graph: fx.Graph) -> dict[str, fx.Node]:
    """Inputs that are generators, for random operators on GPUs, by what is the same in forward's and backward's names.

    AOTAutograd adds them to both graphs, counts forward's behind the partitioner, and gives backward as many.
    """
    inputs = graph.find_nodes(op="placeholder")
    return {n.name[len("fwd_") :]: n for n in inputs if n.name.startswith(("fwd_rng_state_", "bwd_rng_state_"))}


def results_of(node: fx.Node) -> list[fx.Node]:
    """The nodes that are the operator's own result: ``node``, or the items beside the state that it saves."""
    if node.target is not _SAVES:
        return [node]
    return [user for user in node.users if user.target is operator.getitem and user.args[1] == 1]
