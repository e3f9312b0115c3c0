"""docs/cards.md says what is so."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="the page is of kernels that Triton compiles")

from tools.cards.page import KERNELS, PATH, page


def test_the_page_is_as_the_choosers_are():
    """But for what kernels take, which a compiler says: ``python -m tools.cards``."""
    text = PATH.read_text(encoding="utf-8")
    before, heading, kernels = text.partition(KERNELS)
    assert heading
    assert text == page(KERNELS + kernels), "python -m tools.cards writes it"
    assert before.count("### sm_") == 9
