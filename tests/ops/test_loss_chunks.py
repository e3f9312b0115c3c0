"""How rows of logits are cut into chunks."""

from __future__ import annotations

import pytest
import torch

from glue_compiler.ops import loss_chunks
from glue_compiler.ops.loss_chunks import LIMITS, row_chunks

MIB = 2**20
CUDA = torch.device("cuda")


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("rows", [0, 1, 15, 1000, 8192, 100_001])
@pytest.mark.parametrize("row_bytes", [2, 2 * 1003, 2 * 151_936, 4 * 262_144])
def test_chunks_cover_all_rows_once_and_stay_near_the_target(device, rows, row_bytes):
    chunks = row_chunks(rows, row_bytes, torch.device(device))
    covered = [row for chunk in chunks for row in range(chunk.start, chunk.stop)]
    assert covered == list(range(rows))
    limits = LIMITS[device]
    most = max(2 * limits.target_bytes, limits.multiple * row_bytes) + limits.multiple * row_bytes
    assert all((chunk.stop - chunk.start) * row_bytes <= most for chunk in chunks)


def test_rows_that_fit_are_one_chunk():
    assert row_chunks(1024, 2 * 128_256, CUDA) == [slice(0, 1024)]


def test_chunks_are_of_nearly_one_size():
    sizes = {chunk.stop - chunk.start for chunk in row_chunks(8192, 2 * 151_936, CUDA)}
    assert sizes == {2048}


def test_a_wide_row_still_gets_rows_enough_for_a_product():
    assert row_chunks(8192, 4 * 262_144, CUDA)[0] == slice(0, 1024)


def test_rows_are_one_chunk_where_several_would_need_more_for_their_sums():
    row_bytes = 2 * 201_088
    assert row_chunks(2048, row_bytes, CUDA, sums=2048 * row_bytes) == [slice(0, 2048)]
    assert len(row_chunks(2048, row_bytes, CUDA, sums=2048 * row_bytes - 1)) == 2


@pytest.mark.parametrize("gib", [6, 8, 16])
@pytest.mark.parametrize("row_bytes", [2 * 32_000, 2 * 262_144, 4 * 262_144, 4 * 1_000_003])
def test_no_chunk_is_much_larger_than_twice_a_small_cards_share(monkeypatch, gib, row_bytes):
    monkeypatch.setattr(loss_chunks, "size_of", lambda device: gib * 2**30)
    chunks = row_chunks(8192, row_bytes, CUDA)
    assert max(chunk.stop - chunk.start for chunk in chunks) * row_bytes <= 2.4 * gib * 2**30 / 40


@pytest.mark.parametrize(("gib", "least"), [(8, 8), (16, 6), (24, 4), (80, 4)])
def test_chunks_follow_the_memory_of_a_card(monkeypatch, gib, least):
    monkeypatch.setattr(loss_chunks, "size_of", lambda device: gib * 2**30)
    chunks = row_chunks(8192, 2 * 151_936, CUDA)
    assert len(chunks) == least
    assert max(chunk.stop - chunk.start for chunk in chunks) * 2 * 151_936 <= gib * 2**30 / 20
