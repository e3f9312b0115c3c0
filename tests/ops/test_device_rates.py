"""What a call takes on a card: its time, and what it allocates."""

from __future__ import annotations

import pytest
import torch

from glue_compiler.ops import device_rates
from glue_compiler.ops.device_rates import Sized, measured_call
from glue_compiler.ops.measured_book import MeasuredBook

aten = torch.ops.aten

pytestmark = pytest.mark.gpu


@pytest.fixture
def book(tmp_path, monkeypatch):
    """An empty book, so that everything is measured here."""
    made = MeasuredBook(tmp_path / "rates.json")
    monkeypatch.setattr(device_rates, "_book_of", lambda device, version: made)
    return made


def matrix(*shape, dtype=torch.bfloat16):
    return Sized(shape, (shape[1], 1), dtype)


def test_a_product_allocates_its_result(book):
    device = torch.device("cuda", 0)
    args = (matrix(1024, 2048), matrix(2048, 512))
    found = measured_call(aten.mm.default, args, {}, device)
    assert found is not None
    assert found.seconds > 0
    assert 1024 * 512 * 2 <= found.allocated < 2 * 1024 * 512 * 2
    assert measured_call(aten.mm.default, args, {}, device) == found
    assert len(MeasuredBook(book.path)._read()) == 1  # another process finds it


def test_what_a_call_takes_for_itself_is_counted(book):
    # a sorted tensor's values, its indices, and what sorting needs beside them
    found = measured_call(aten.sort.default, (Sized((2**20,), (1,), torch.float32),), {}, torch.device("cuda", 0))
    assert found is not None
    assert found.allocated > 2**20 * (4 + 8)


@pytest.mark.parametrize(
    "other", [Sized((4, 4), (4, 1), torch.int64), Sized((0, 4), (4, 1), torch.bfloat16)], ids=["whole numbers", "empty"]
)
def test_what_random_numbers_do_not_stand_for_is_not_run(book, other):
    assert measured_call(aten.mm.default, (matrix(4, 4), other), {}, torch.device("cuda", 0)) is None
