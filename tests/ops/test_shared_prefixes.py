"""Tokens that an earlier row of a batch has too, and rows that are spread to all that share them."""

import pytest
import torch

import glue_compiler.ops  # noqa: F401  registers torch.ops.glue
from glue_compiler.ops import shared_prefixes

glue = torch.ops.glue


def shared_one_by_one(seen, same, alone):
    """By the definition, in Python."""
    rows, length = seen.shape
    of = torch.arange(rows * length).view(rows, length)
    for row in range(rows):
        for earlier in range(row):
            for token in range(length):
                hidden = ~seen[row, token] & ~seen[earlier, token]
                agrees = all(torch.equal(each[row, token], each[earlier, token]) for each in same)
                if seen[row, token] != seen[earlier, token] or not (hidden or agrees):
                    break
                if of[row, token] == row * length + token and not any(
                    each[row, token] or each[earlier, token] for each in alone
                ):
                    of[row, token] = of[earlier, token]
    return seen & (of == torch.arange(rows * length).view(rows, length)), of.flatten()


@pytest.mark.parametrize("most", [1, 100, 2**24])
@pytest.mark.parametrize("seed", range(6))
def test_tokens_are_those_of_the_definition(seed, most, monkeypatch):
    monkeypatch.setattr(shared_prefixes, "MOST_COMPARED", most)
    generator = torch.Generator().manual_seed(seed)
    rows, length = 5, 7
    ids = torch.randint(2, (rows, length), generator=generator)
    ids[:, : seed % 4] = 1
    seen = torch.rand(rows, length, generator=generator) > 0.1 * seed
    positions = torch.arange(length).expand(rows, length) + (torch.arange(rows) > 3)[:, None]
    vectors = torch.stack([positions, positions * 2], 2).double()
    alone = torch.rand(rows, length, generator=generator) > 0.7
    same, apart = [ids, vectors][: 1 + seed % 2], [alone][: seed % 3]
    for got, wanted in zip(glue.shared_tokens(seen, same, apart), shared_one_by_one(seen, same, apart), strict=True):
        assert torch.equal(got, wanted)


def test_each_token_stands_for_itself_where_nothing_is_shared():
    ids = torch.arange(6).view(3, 2)
    first, of = glue.shared_tokens(torch.ones(3, 2, dtype=torch.bool), [ids], [])
    assert first.all()
    assert of.tolist() == list(range(6))


@pytest.mark.parametrize("shape", [(1, 4), (0, 4), (3, 0), (1, 1)])
def test_sizes_of_one_and_none(shape):
    seen = torch.ones(shape, dtype=torch.bool)
    first, of = glue.shared_tokens(seen, [torch.zeros(shape, dtype=torch.int64)], [])
    assert first.sum() == (shape[1] if shape[0] else 0)
    assert of.shape == (shape[0] * shape[1],)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
def test_floating_numbers_are_compared_by_their_bits(dtype):
    values = torch.tensor([0.0, -0.0, 0.0, float("nan"), float("nan")], dtype=dtype)[:, None].expand(5, 3)
    first, _ = glue.shared_tokens(torch.ones(5, 3, dtype=torch.bool), [values], [])
    assert first.all(1).tolist() == [True, True, False, True, False]


def test_spread_rows_add_up_their_gradients():
    rows = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([2, 0, 2, 2])
    assert torch.equal(glue.spread_rows(rows, index), rows[index])
    assert torch.autograd.gradcheck(lambda x: glue.spread_rows(x, index), rows)
    assert torch.autograd.gradgradcheck(lambda x: glue.spread_rows(x, index) ** 2, rows)


def test_gradients_of_low_precision_are_added_in_fp32():
    rows = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    glue.spread_rows(rows, torch.zeros(600, dtype=torch.int64)).sum().backward()
    assert rows.grad.item() == 600  # one by one in bf16 they stop at 256
    assert rows.grad.dtype == torch.bfloat16
