"""grouped_repeat and grouped_sum: a vector for each row of its expert, and back."""

from __future__ import annotations

import pytest
import torch

from glue_compiler.ops import grouped_repeat, grouped_sum

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_repeat_is_the_vector_of_each_rows_expert(routing, dtype):
    offsets = routing.offsets()
    counts = torch.diff(offsets, prepend=offsets.new_zeros(1))
    values = torch.randn(routing.num_experts, 9, device=offsets.device).to(dtype)
    expected = torch.cat([values.repeat_interleave(counts, dim=0), values.new_zeros(2, 9)])
    assert torch.equal(grouped_repeat(values, offsets, expected.shape[0]), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_is_a_sum_per_expert(routing, dtype, close):
    offsets = routing.offsets()
    rows = torch.randn(int(offsets[-1]) + 2, 9, device=offsets.device).to(dtype)
    starts = [0, *offsets.tolist()[:-1]]
    expected = torch.stack([rows[a:b].double().sum(0) for a, b in zip(starts, offsets.tolist(), strict=True)])
    close(grouped_sum(rows, offsets), expected)


def test_sum_of_many_small_numbers_is_not_lost_to_rounding(device):
    rows = torch.full((4096, 3), 2**-8, dtype=torch.bfloat16, device=device)
    offsets = torch.tensor([4096], dtype=torch.int32, device=device)
    assert (grouped_sum(rows, offsets) == 16).all()


def test_gradients(ragged):
    offsets = ragged.offsets()
    values = torch.randn(5, 3, device=offsets.device, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: grouped_repeat(v, offsets, int(offsets[-1]) + 2), values)


def test_strides_do_not_matter(ragged, close):
    offsets = ragged.offsets()
    rows = torch.randn(6, int(offsets[-1]), device=offsets.device).t()
    close(grouped_sum(rows, offsets), grouped_sum(rows.double(), offsets))
    values = torch.randn(1, 6, device=offsets.device).expand(5, 6)
    assert torch.equal(grouped_repeat(values, offsets, 50), grouped_repeat(values.contiguous(), offsets, 50))


def test_wrong_arguments_are_value_errors(ragged):
    offsets = ragged.offsets()
    with pytest.raises(ValueError, match="5 offsets for 4 experts"):
        grouped_repeat(torch.randn(4, 2, device=offsets.device), offsets, 9)
    with pytest.raises(ValueError, match="int32 vector"):
        grouped_sum(torch.randn(4, 2, device=offsets.device), offsets.long())


def test_opcheck(ragged):
    offsets = ragged.offsets()
    values = torch.randn(5, 3, device=offsets.device, requires_grad=True)
    rows = torch.randn(int(offsets[-1]), 3, device=offsets.device)
    torch.library.opcheck(grouped_repeat, (values, offsets, rows.shape[0]))
    torch.library.opcheck(grouped_sum, (rows, offsets))
