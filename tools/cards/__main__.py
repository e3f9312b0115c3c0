"""Compile glue's kernels for some cards and write docs/cards.md: ``python -m tools.cards``, which takes minutes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton

from glue_compiler.ops import cards
from tools.cards.kernels import compiled_for, plain_launches, product_launches
from tools.cards.page import PATH, Taken, kernels_part, page

SHOWN = [cards.named(name) for name in ("sm_75", "sm_89", "sm_90", "sm_120")]
PRODUCTS = (
    *(f"product, {rows} rows x 4096" for rows in (8, 48, 512)),
    "product, listed weights",
    "gradient of weights, 4096 x 4096",
)


def taken() -> Iterator[Taken]:
    """In the order of the page."""
    plain, products = plain_launches(torch.float16), product_launches(torch.float16)
    wanted = {name: products[name] for name in PRODUCTS}
    for card in SHOWN:
        print(card.name, flush=True)
        for name, found in compiled_for(card, plain | wanted if card.multiplies else plain, assembles=False):
            yield Taken(name, card, max(each.shared for each in found))
        if not card.multiplies:
            yield from (Taken(name, card, None) for name in wanted)


if __name__ == "__main__":
    PATH.write_text(page(kernels_part(list(taken()), triton.__version__)), encoding="utf-8")
