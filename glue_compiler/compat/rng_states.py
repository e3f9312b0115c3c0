"""States of random number generators that recomputation starts from (the same in torch 2.11 to 2.15)."""

from __future__ import annotations

import operator

import torch
from torch import fx


def is_rng_state(node: fx.Node) -> bool:
    """Is this what AOTAutograd saves so that a random operator, such as flash attention, gives the same again?

    Backward takes it under a name of its own (``rng_state_output_0``), unlike all other saved values.
    """
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, fx.Node) and source.target is torch._prims.rng_prims.run_and_save_rng_state
