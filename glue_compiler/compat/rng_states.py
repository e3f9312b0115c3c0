"""States of random number generators that recomputation starts from (the same in torch 2.11 to 2.15)."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx


def is_rng_state(node: fx.Node) -> bool:
    """Is this what AOTAutograd saves so that a random operator, such as flash attention, gives the same again?

    Backward takes it under a name of its own (``rng_state_output_0``), unlike all other saved values.
    """
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, fx.Node) and source.target is torch._prims.rng_prims.run_and_save_rng_state


def run_with_a_state(node: fx.Node) -> tuple[Any, tuple[Any, ...]] | None:
    """The operator that ``node`` runs, saving or setting the state of a random generator, and its arguments."""
    if node.target is torch._prims.rng_prims.run_and_save_rng_state:
        return node.args[0], node.args[1:]
    if node.target is torch._prims.rng_prims.run_with_rng_state:
        return node.args[1], node.args[2:]
    return None
