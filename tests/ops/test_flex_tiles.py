"""Blocks of flex_attention that fit a card."""

from __future__ import annotations

import itertools

import pytest
import torch

from glue_compiler.compat.attention import FlexBackward, FlexForward, FlexKernels
from glue_compiler.ops import cards
from glue_compiler.ops.flex_tiles import backward_bytes, forward_bytes, options

MULTIPLY = [card for card in cards.CARDS if card.multiplies]
SM_89, SM_90 = cards.named("sm_89"), cards.named("sm_90")
HALF, SINGLE = torch.bfloat16, torch.float32

# Bytes of shared memory that kernels took which Triton 3.7.1 made of Inductor's templates for sm_89 (torch 2.13).
COMPILED_FORWARD = [
    (FlexForward(128, 64, 3, 4), 64, 0, 49152),
    (FlexForward(128, 64, 3, 8), 128, 0, 98304),
    (FlexForward(128, 64, 2, 8), 128, 1, 73728),
    (FlexForward(64, 64, 2, 4), 128, 0, 57344),
    (FlexForward(64, 64, 2, 4), 128, 4, 73728),
    (FlexForward(64, 64, 3, 4), 128, 1, 98304),
    (FlexForward(64, 64, 3, 4), 128, 2, 106496),
    (FlexForward(64, 64, 3, 4), 128, 4, 122880),
    (FlexForward(64, 32, 2, 4), 256, 0, 69632),
    (FlexForward(32, 32, 3, 4), 256, 0, 83968),
    (FlexForward(32, 64, 2, 4), 256, 0, 86016),
]
COMPILED_BACKWARD = [
    (FlexBackward(64, 64, 64, 64, 2, 4), 64, 0, 35584),
    (FlexBackward(64, 64, 64, 64, 1, 4), 128, 0, 57344),
    (FlexBackward(64, 64, 64, 64, 2, 4), 128, 0, 68352),
    (FlexBackward(64, 64, 64, 64, 2, 4), 128, 1, 73728),
    (FlexBackward(64, 64, 64, 64, 2, 4), 128, 4, 84736),
    (FlexBackward(64, 64, 64, 64, 3, 4), 128, 0, 85504),
    (FlexBackward(64, 64, 64, 64, 3, 4), 128, 1, 94208),
    (FlexBackward(64, 64, 64, 64, 3, 4), 128, 2, 100352),
    (FlexBackward(32, 32, 32, 32, 2, 4), 256, 0, 70016),
    (FlexBackward(32, 64, 64, 32, 1, 4), 256, 0, 98304),
]


def test_the_estimate_covers_float32():
    assert backward_bytes(FlexBackward(32, 32, 32, 32, 2, 4), 128, SINGLE, 4) >= 77824
    assert forward_bytes(FlexForward(64, 32, 2, 4), 128, SINGLE, 4) >= 82944
    assert forward_bytes(FlexForward(64, 16, 2, 4), 256, SINGLE, 4) >= 106752


@pytest.mark.parametrize(("tiles", "head", "score", "compiled"), COMPILED_FORWARD + COMPILED_BACKWARD, ids=str)
def test_the_estimate_is_at_least_what_was_compiled_and_little_more(tiles, head, score, compiled):
    estimate = forward_bytes if isinstance(tiles, FlexForward) else backward_bytes
    most = 1.03 if isinstance(tiles, FlexForward) else 1.4
    assert compiled <= estimate(tiles, head, HALF, score) <= compiled * most


def chosen(forward: FlexForward, backward: FlexBackward) -> FlexKernels:
    return FlexKernels([forward], [backward])


FITS = chosen(FlexForward(128, 64, 3, 8), FlexBackward(64, 64, 64, 64, 2, 4))


def test_what_fits_stays_as_inductor_has_it():
    assert options(SM_89, 128, HALF, 0, FITS) == {}
    assert options(None, 256, SINGLE, 4, FITS) == {}


def test_what_does_not_fit_gets_fewer_stages_and_then_smaller_blocks():
    assert options(SM_89, 128, HALF, 1, FITS) == FlexForward(128, 64, 2, 8).options()
    of_256 = chosen(FlexForward(32, 64, 3, 4), FlexBackward(64, 64, 64, 64, 2, 4))
    assert options(SM_89, 256, HALF, 0, of_256) == {
        **FlexForward(32, 64, 2, 4).options(),
        **FlexBackward(32, 32, 32, 32, 2, 4).options(),
    }
    assert options(cards.named("sm_80"), 256, HALF, 0, of_256) == {}


def test_numbers_of_four_bytes_take_fewer_stages_on_hopper():
    of_64 = chosen(FlexForward(128, 128, 3, 4), FlexBackward(64, 128, 128, 64, 3, 8))
    assert options(SM_90, 64, HALF, 0, of_64) == {}
    assert options(SM_90, 64, HALF, 4, of_64) == FlexForward(128, 128, 2, 4).options()


def test_tuning_goes_on_where_one_of_its_kernels_fits():
    tuned = FlexKernels([FlexForward(128, 128, 3, 4), *FITS.forward], FITS.backward)
    assert options(SM_89, 128, HALF, 0, tuned) == {}


def test_on_hopper_all_stages_are_in_shared_memory():
    """As compiled for sm_90; the first is more than an H100 has, and what Inductor chooses there."""
    of_192, of_64 = (192, HALF, 4, True), (64, HALF, 4, True)
    too_many = FlexForward(64, 64, 3, 4)
    assert SM_90.shared < 262144 <= forward_bytes(too_many, *of_192)
    assert forward_bytes(FlexForward(128, 128, 2, 4), *of_64) >= 147456
    assert backward_bytes(FlexBackward(64, 64, 64, 64, 2, 4), *of_192) >= 230400
    assert backward_bytes(FlexBackward(64, 128, 128, 64, 3, 8), *of_64) >= 149504
    found = options(SM_90, *of_192[:3], chosen(too_many, FlexBackward(64, 64, 64, 64, 2, 4)))
    assert found["fwd_num_stages"] == 2
    # What Inductor tuned for an H100 without a mask stays.
    for head, forward, backward in (
        (64, FlexForward(128, 128, 3, 4), FlexBackward(64, 128, 128, 64, 3, 8)),
        (128, FlexForward(128, 64, 3, 8), FlexBackward(64, 128, 128, 64, 3, 8)),
        (256, FlexForward(64, 32, 3, 4), FlexBackward(64, 64, 64, 64, 2, 4)),
    ):
        assert options(SM_90, head, HALF, 0, chosen(forward, backward)) == {}


def test_one_stage_loads_no_scores_ahead():
    tiles = FlexForward(128, 128, 1, 8)
    assert forward_bytes(tiles, 192, HALF, 4) == forward_bytes(tiles, 192, HALF, 0) <= SM_90.shared
    assert forward_bytes(FlexForward(128, 32, 1, 4), 128, HALF, 0) >= 40960


@pytest.mark.parametrize("card", MULTIPLY, ids=lambda card: card.name)
def test_something_fits_whatever_inductor_chooses(card):
    for head, dtype, score in itertools.product((16, 64, 80, 128, 192, 256), (HALF, SINGLE), (0, 1, 2, 4)):
        found = options(card, head, dtype, score, None)
        forward = FlexForward(*(found[name] for name in FlexForward(0, 0, 0, 0).options()))
        backward = FlexBackward(*(found[name] for name in FlexBackward(0, 0, 0, 0, 0, 0).options()))
        assert forward_bytes(forward, head, dtype, score) <= card.shared
        assert backward_bytes(backward, head, dtype, score) <= card.shared
        # Inductor refuses blocks that do not divide those of the lists.
        assert all(128 % size == 0 for name, size in found.items() if "BLOCK" in name)
