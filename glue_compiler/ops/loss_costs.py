"""Whether a loss in chunks of rows pays: what its logits hold, against the products and launches that it adds."""

from __future__ import annotations

LEAST_BYTES = 64 * 2**20
"""Of logits on a GPU: an estimate, not measured. A CPU always gets the loss in chunks."""


def pays(device: str, logits: int | None) -> bool:
    """``logits``: their bytes; None: not known when the graph is compiled, and taken as many."""
    return device == "cpu" or logits is None or logits >= LEAST_BYTES
