"""Rows of the tokens that count, and back."""

import pytest
import torch

import glue_compiler.ops  # noqa: F401  registers torch.ops.glue

glue = torch.ops.glue
SEEN = torch.tensor([[1, 1, 0], [0, 0, 0], [0, 1, 1]], dtype=torch.bool)


def test_where_tokens_lie():
    rows, numbers, starts = glue.token_rows(SEEN)
    assert rows.tolist() == [0, 1, 7, 8]
    assert starts.tolist() == [0, 2, 2, 4, 4]
    assert numbers[rows].tolist() == [0, 1, 2, 3]
    assert numbers.min() == 0


def padded(*lengths, length=32):
    return torch.arange(length) < torch.tensor(lengths)[:, None]


def known_of(seen):
    rows, numbers, starts = glue.token_rows(seen)
    return rows, numbers, seen, starts


@pytest.mark.parametrize(
    ("seen", "number"),
    [
        (padded(5, 6, 32, 0), 48),  # 43: a multiple of 8
        (padded(5, 6, 32, 5), 48),
        (padded(32, 32, 32, 31), 128),
        (padded(32, 32, 32, 32), 128),
        (padded(1, 1, 2, 1), 8),
        (padded(*[1] * 15, length=2), 15),
        (padded(*[1] * 65, length=2), 66),  # no more spare rows than a document may have
        (padded(700, 900, length=1024), 1664),  # 1600: a multiple of 128
        (padded(*[700] * 5, length=4096), 3584),  # 3500: a multiple of 256, of however many tokens
    ],
)
def test_spare_rows_bring_their_number_to_a_multiple(seen, number):
    rows, numbers, starts = glue.token_rows(seen)
    count = int(seen.sum())
    assert len(rows) == number
    assert rows[:count].tolist() == seen.flatten().nonzero().flatten().tolist()
    assert set(rows[count:].tolist()) <= {int(rows[0])}
    assert starts[-2:].tolist() == [count, number]
    assert number - count < max(2, seen.shape[1])
    assert torch.equal(numbers[rows[:count]], torch.arange(count))


def test_no_token_at_all_is_an_error():
    with pytest.raises(ValueError, match="hides all of its tokens"):
        glue.token_rows(torch.zeros_like(SEEN))


def test_there_and_back_with_gradients():
    known = known_of(SEEN)
    tokens = torch.randn(9, 2, dtype=torch.float64, requires_grad=True)
    taken = glue.take_rows(tokens, *known)
    assert torch.equal(taken, tokens[SEEN.flatten()])
    back = glue.put_rows(taken, *known)
    assert torch.equal(back, torch.where(SEEN.flatten()[:, None], tokens, 0))
    assert torch.autograd.gradcheck(lambda x: glue.take_rows(x, *known), tokens)
    assert torch.autograd.gradcheck(lambda x: glue.put_rows(x, *known), taken.detach().requires_grad_())
    assert torch.autograd.gradgradcheck(lambda x: glue.put_rows(glue.take_rows(x, *known) ** 2, *known), tokens)


def test_spare_rows_give_and_get_no_gradient():
    seen = padded(5, 6, 32, 0)
    known = known_of(seen)
    tokens = torch.randn(128, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: glue.put_rows(glue.take_rows(x, *known).sin(), *known), tokens)
    taken = glue.take_rows(tokens, *known).detach().requires_grad_()
    assert torch.equal(taken[43:], tokens[:1].expand(5, 2))
    back = glue.put_rows(taken, *known)
    back.backward(torch.randn(128, 2, dtype=torch.float64))
    assert not taken.grad[43:].any()
    assert taken.grad[:43].all()


def test_numbers_that_are_not_finite_stay_where_they_are():
    known = known_of(SEEN)
    taken = torch.full((4, 2), torch.nan)
    back = glue.put_rows(taken, *known)
    assert not back[~SEEN.flatten()].any()


def test_labels_of_spare_rows_are_ignored():
    seen = padded(5, 6, 32, 0)
    rows, _, _, starts = known_of(seen)
    targets = torch.where(seen, 7, -100)
    assert glue.target_rows(targets, rows, seen, starts, -100).tolist() == [7] * 43 + [-100] * 5


def test_labels():
    rows, _, _, starts = known_of(SEEN)
    targets = torch.tensor([[1, 2, -100], [-100, -100, -100], [-100, -100, 3]])
    assert glue.target_rows(targets, rows, SEEN, starts, -100).tolist() == [1, 2, -100, 3]
    targets[1, 2] = 4
    with pytest.raises(ValueError, match="row 1 of a batch has labels that count"):
        glue.target_rows(targets, rows, SEEN, starts, -100)


def test_operators_agree_with_their_fakes():
    rows, _, _, starts = known_of(SEEN)
    torch.library.opcheck(glue.token_rows.default, (SEEN,))
    targets = torch.full((3, 3), -100)
    torch.library.opcheck(glue.target_rows.default, (targets, rows, SEEN, starts, -100))
