"""Each kernel in each configuration that can be chosen for a card, compiled for it: does it fit?

Without a card: Triton's compiler and assembler run on a CPU. Where Triton is not installed, ``pip install triton``.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from glue_compiler.ops import cards, flex_tiles

pytest.importorskip("triton", reason="compiles kernels: needs Triton, which a torch for CPUs comes without")

from tools.cards.flex import ATTENTIONS, Attention, compiled_attention
from tools.cards.kernels import compiled_for, plain_launches, product_launches

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
LEAST_REGISTERS = 255
AMD_SHARED = 64 << 10
SPILLED = 256
"""Bytes that a thread may spill of 1,020 in registers: ``expert_sort`` compares 256 pairs a row, and products of 128 x
128 with turned weights keep 64 sums a thread."""

# Products have the same tiles on all cards without the tensor memory accelerator, of which sm_86 has the least memory.
SMALL = [cards.named(name) for name in ("sm_75", "sm_86", "sm_120")]
LARGE = [cards.named(name) for name in ("sm_90", "sm_100")]


def require_fit(card, name, found):
    assert found, name
    for each in found:
        assert each.shared <= (AMD_SHARED if card is None else card.shared), (name, each)
        assert each.registers <= LEAST_REGISTERS, (name, each)
        assert each.spills <= SPILLED, (name, each)


def only(launches, *names):
    return {name: launches[name] for name in names}


@pytest.mark.parametrize(
    ("card", "launches"),
    [
        ("sm_75", only(plain_launches(HALF), "cross entropy", "rows from experts")),
        ("sm_89", only(plain_launches(BRAIN), "statistics of logits", "blocks of a boolean mask")),
        ("sm_89", only(product_launches(BRAIN), "product, 48 rows x 4096")),
        (None, only(plain_launches(HALF), "their gradient")),
    ],
    ids=lambda given: ", ".join(given) if isinstance(given, dict) else given or "AMD",
)
def test_some_kernels_fit(card, launches):
    card = None if card is None else cards.named(card)
    for name, found in compiled_for(card, launches):
        require_fit(card, name, found)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
@pytest.mark.parametrize("card", [*SMALL, *LARGE, None], ids=lambda card: card.name if card else "AMD")
def test_every_plain_kernel_fits_every_card(card, dtype):
    for name, found in compiled_for(card, plain_launches(dtype), assembles=card is not None and card.name == "sm_86"):
        require_fit(card, name, found)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
@pytest.mark.parametrize("card", [*SMALL[1:], *LARGE, None], ids=lambda card: card.name if card else "AMD")
def test_every_product_fits_every_card_that_has_products(card, dtype):
    assembles = card is not None and card.name == "sm_86" and dtype == HALF
    for name, found in compiled_for(card, product_launches(dtype), assembles=assembles):
        require_fit(card, name, found)


FLEX = [cards.named(name) for name in ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")]


@pytest.mark.slow
@pytest.mark.parametrize("attention", ATTENTIONS, ids=str)
@pytest.mark.parametrize("card", FLEX, ids=lambda card: card.name)
def test_attention_fits_every_card(card, attention):
    found = compiled_attention(attention, card, assembles=False)
    assert len(found) == 2
    assert all(each.shared <= card.shared for each in found), found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sm_86", "sm_89"])
def test_inductor_alone_asks_for_more_than_there_is(name):
    """Or the estimate is needed no more."""
    card = cards.named(name)
    with mock.patch.object(flex_tiles, "options", return_value={}):
        found = compiled_attention(Attention(BRAIN, 256), card, assembles=False)
    assert all(each.shared > card.shared for each in found), found
