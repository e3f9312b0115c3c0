"""What is known of cards, and how people name them."""

from __future__ import annotations

import pytest
import torch

from glue_compiler.errors import GlueOptionError
from glue_compiler.ops import cards, kernel_support
from glue_compiler.ops.attention_choice import prefers_cudnn

T4, A100, RTX_4090, H100, RTX_5090 = (cards.named(name) for name in ("sm_75", "sm_80", "sm_89", "sm_90", "sm_120"))


@pytest.mark.parametrize("name", ["sm_89", "SM89", "8.9", "89", "RTX 4090", "rtx 40", "L4"])
def test_a_card_has_many_names(name):
    assert cards.named(name).capability == (8, 9)


@pytest.mark.parametrize(("name", "nearest"), [("sm_88", "sm_8"), ("9.1", "sm_9"), ("sm_129", "sm_12")])
def test_an_unknown_card_names_the_nearest_and_all(name, nearest):
    with pytest.raises(GlueOptionError, match=f"did you mean '{nearest}.*Cards: .*sm_120"):
        cards.named(name)


def test_no_name_is_of_two_cards():
    for card in cards.CARDS:
        assert cards.named(card.name) is card
        for product in card.products.split(", "):
            assert cards.named(product) is card


def test_a_newer_card_has_the_least_that_is_known_and_an_older_one_no_products():
    newer, older = cards.of_capability((13, 0)), cards.of_capability((7, 0))
    assert newer.multiplies
    assert newer.shared == min(card.shared for card in cards.CARDS if card.multiplies)
    assert newer == cards.Card((13, 0), newer.products, newer.shared)
    assert not older.multiplies
    assert older.shared < T4.shared


class OnCard:
    """As much of a tensor as is asked: there is no such card here."""

    is_cuda, device = True, torch.device("cuda", 0)

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


@pytest.mark.parametrize(
    ("card", "dtype", "plain", "products"),
    [
        (T4, torch.float16, True, False),
        (T4, torch.int64, True, False),
        (T4, torch.bfloat16, False, False),
        (cards.of_capability((7, 0)), torch.float16, False, False),
        (RTX_4090, torch.bfloat16, True, True),
        (None, torch.bfloat16, True, True),
    ],
    ids=str,
)
def test_which_tensors_kernels_serve(monkeypatch, card, dtype, plain, products):
    monkeypatch.setattr(cards, "of_device", lambda device: card)
    monkeypatch.setattr(kernel_support, "_triton_is_installed", lambda: True)
    tensor = OnCard(dtype)
    assert kernel_support.runs_triton(tensor) == plain
    assert kernel_support.runs_triton(tensor, multiplies=True) == products


@pytest.mark.parametrize(("card", "first"), [(H100, True), (RTX_5090, False), (A100, False), (None, False)], ids=str)
def test_cudnn_is_asked_first_on_cards_of_data_centres(monkeypatch, card, first):
    monkeypatch.setattr(cards, "of_device", lambda device: card)
    assert prefers_cudnn(torch.device("cuda", 0), 4096) == first
    assert not prefers_cudnn(torch.device("cuda", 0), None)


def test_what_is_not_of_nvidia_is_no_card(monkeypatch):
    assert cards.of_device(torch.device("cpu")) is None
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert cards.of_device(torch.device("cuda", 7)) is None
