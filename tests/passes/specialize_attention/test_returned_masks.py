"""Masks that a graph returns: what is said of them to others, and why nothing is."""

from __future__ import annotations

import pytest
import torch

from glue_compiler.ops.known_masks import MaskKind, kind_of
from tests.handoff.two_graphs import (
    Between,
    attention,
    bidirectional_window,
    causal,
    distances,
    documents,
    operands,
    packed,
    packed_window,
    positions,
    same_document,
)

LEAST = torch.finfo(torch.float64).min


def added(make, number=LEAST):
    """The mask as numbers that are added to the scores, as models that write attention out have it."""

    def numbers(given):
        shown = make(given)
        return torch.where(shown, torch.zeros((), dtype=torch.float64), number)

    return numbers


@pytest.mark.parametrize(
    ("make", "form", "kind"),
    [
        (causal, "causal", MaskKind(False, True, -1)),
        (packed, "packed", MaskKind(True, True, -1)),
        (packed_window, "packed", MaskKind(True, True, 3)),
        (same_document, "packed", MaskKind(True, False, -1)),
        (bidirectional_window, "packed", MaskKind(True, False, 3)),
        (lambda p: causal(p) & (distances(p) < 4), "packed", MaskKind(False, True, 4)),
        (lambda p: torch.ones_like(causal(p)), "unmasked", MaskKind(False, False, -1)),
        (lambda p: packed(p)[0, 0], "packed", MaskKind(True, True, -1)),
        (lambda p: packed(p)[0].expand(2, -1, -1), "packed", MaskKind(True, True, -1)),
        (lambda p: packed(p).logical_not().logical_not().contiguous(), "packed", MaskKind(True, True, -1)),
        (lambda p: packed(p).float() > 0.5, "packed", MaskKind(True, True, -1)),
        (added(causal), "causal", MaskKind(False, True, -1, LEAST)),
        (added(packed), "packed", MaskKind(True, True, -1, LEAST)),
        (added(packed_window), "packed", MaskKind(True, True, 3, LEAST)),
        (added(packed, float("-inf")), "packed", MaskKind(True, True, -1, float("-inf"))),
    ],
)
def test_what_is_proved_of_a_mask_is_known_where_it_is_used(make, form, kind):
    between = Between(make)
    assert between.run() == [form]
    assert list(between.reports()[0].returned_masks.values()) == [(kind, 0)]
    assert between.run(positions((2, 10))) == []


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda p: causal(p) & (p != 3)[:, None, None], MaskKind(False, True, -1, has_padding=True)),
        (lambda p: (p != 3)[:, None, None].expand(-1, 1, 12, -1), MaskKind(False, False, -1, has_padding=True)),
        (lambda p: causal(p) & (distances(p) < 4) & (p != 3)[:, None, None], MaskKind(False, True, 4, None, True)),
        (added(lambda p: causal(p) & (p != 3)[:, None, None]), MaskKind(False, True, -1, LEAST, True)),
    ],
)
def test_padding_is_known_where_the_mask_is_used(make, kind):
    """Whole graphs read it from what the mask is made of; here it stands in the mask."""
    between = Between(make)
    between.run()
    made, used = between.reports()
    assert list(made.returned_masks.values()) == [(kind, 0)]
    assert used.changed or "with padding" in used.skips[0].reason
    assert between.run(positions((2, 10))) == []


def test_a_mask_that_is_written_in_the_graph_that_returns_it():
    def make(given):
        mask = packed(given)
        mask[..., 0] = True
        return mask

    between = Between(make)
    assert between.run() == ["listed"]
    (skip,) = between.reports()[0].skips
    assert "returns this mask" in skip.reason
    assert not between.reports()[0].returned_masks


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda p: packed(p) & (p != 3)[:, None, None], "do not tell padding from"),
        (lambda p: causal(p)[0, 0] & (p[0] != 3)[None], "do not tell padding from"),
        (lambda p: (p[:, :, None] == p[:, None])[:, None], "not proved to be sorted"),
        (lambda p: packed(p) | (distances(p) == 4), "one of several conditions"),
        (lambda p: causal(p) & (distances(p) > 0), "does not see itself"),
        (lambda p: torch.rand(12, 12) < 2, "not known"),
        (added(packed, -3.0), "neither 0 nor below"),
        (lambda p: added(packed)(p) + distances(p), "more than 0 or minus infinity"),
        (lambda p: torch.where(causal(p), added(same_document)(p), -1e30), "more than one number"),
    ],
)
def test_masks_that_nothing_is_said_of_have_a_reason(make, reason):
    between = Between(make)
    torch.manual_seed(0)
    between.compiled[0](positions())
    (report,) = between.reports()
    assert not report.returned_masks
    (skip,) = report.skips
    assert reason in skip.reason
    assert skip.source


@pytest.mark.parametrize(
    "make",
    [
        lambda p: packed(p).int(),
        lambda p: packed(p)[..., :5],
        lambda p: p[:, :1] == p[:, :1].T,
        lambda p: packed(p)[None],
    ],
)
def test_what_is_no_mask_has_none(make):
    between = Between(make)
    between.compiled[0](positions())
    assert not any(report.skips or report.returned_masks for report in between.reports())


def test_labels_of_any_sizes_are_no_mask():
    """Rows and tokens have a symbol each then, which may stand for equal numbers."""
    between = Between(lambda labels: labels != 3)
    for sizes in ((2, 12), (3, 7), (5, 5)):
        between.compiled[0](torch.zeros(sizes, dtype=torch.int64))
    assert len(between.reports()) == 2
    assert not any(report.skips or report.returned_masks for report in between.reports())


def test_a_promise_counts():
    between = Between(lambda ids: (ids[:, :, None] == ids[:, None])[:, None], assume={"sorted_document_ids": True})
    assert between.run(documents(positions())) == ["packed"]


@pytest.mark.parametrize(
    "beside",
    [
        pytest.param(lambda mask, p: mask[:, :, 3], id="a row"),
        pytest.param(lambda mask, p: mask.view(12, 12), id="a view of all"),
        pytest.param(lambda mask, p: mask.detach(), id="detached"),
        pytest.param(lambda mask, p: [mask[0, 0, 0], p], id="in a list"),
    ],
)
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_nothing_is_said_of_a_mask_whose_memory_another_result_shares(beside, compiler):
    """Inductor gives the view a version counter of its own: a write to it would not be seen."""
    between = Between(lambda p: (lambda mask: (mask, beside(mask, p)))(packed(p)), compiler=compiler)
    mask, other = between.compiled[0](positions())
    assert kind_of(mask) is None
    (report,) = between.reports()
    assert "lies in its memory" in report.skips[0].reason
    row = other[0] if isinstance(other, list) else other
    row.fill_(True)
    tensors = operands()
    torch.testing.assert_close(between.compiled[1](*tensors, mask), attention(*tensors, mask))


def test_nothing_is_said_of_a_view_of_an_input():
    between = Between(lambda mask: mask[:, :, :6, :6])
    mask = Between().compiled[0](positions())
    assert kind_of(mask) == MaskKind(True, True, -1)
    assert kind_of(between.compiled[0](mask)) is None


def test_two_masks_and_one_twice():
    between = Between(lambda p: (lambda mask: {"all": mask, "near": packed_window(p), "again": mask})(packed(p)))
    found = between.compiled[0](positions())
    assert found["all"] is found["again"]
    assert [kind_of(mask) for mask in found.values()] == [MaskKind(True, True, window) for window in (-1, 3, -1)]
