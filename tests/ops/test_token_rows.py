"""Rows of the tokens that count, and back."""

import pytest
import torch

import glue_compiler.ops  # noqa: F401  registers torch.ops.glue

glue = torch.ops.glue
SEEN = torch.tensor([[1, 1, 0], [0, 0, 0], [0, 1, 1]], dtype=torch.bool)


def test_where_tokens_lie():
    rows, numbers, starts = glue.token_rows(SEEN)
    assert rows.tolist() == [0, 1, 7, 8]
    assert starts.tolist() == [0, 2, 2, 4]
    assert numbers[rows].tolist() == [0, 1, 2, 3]
    assert numbers.min() == 0


def test_no_token_at_all_is_an_error():
    with pytest.raises(ValueError, match="hides all of its tokens"):
        glue.token_rows(torch.zeros_like(SEEN))


def test_there_and_back_with_gradients():
    known = (*glue.token_rows(SEEN)[:2], SEEN)
    tokens = torch.randn(9, 2, dtype=torch.float64, requires_grad=True)
    taken = glue.take_rows(tokens, *known)
    assert torch.equal(taken, tokens[SEEN.flatten()])
    back = glue.put_rows(taken, *known)
    assert torch.equal(back, torch.where(SEEN.flatten()[:, None], tokens, 0))
    assert torch.autograd.gradcheck(lambda x: glue.take_rows(x, *known), tokens)
    assert torch.autograd.gradcheck(lambda x: glue.put_rows(x, *known), taken.detach().requires_grad_())
    assert torch.autograd.gradgradcheck(lambda x: glue.put_rows(glue.take_rows(x, *known) ** 2, *known), tokens)


def test_numbers_that_are_not_finite_stay_where_they_are():
    known = (*glue.token_rows(SEEN)[:2], SEEN)
    taken = torch.full((4, 2), torch.nan)
    back = glue.put_rows(taken, *known)
    assert not back[~SEEN.flatten()].any()


def test_labels():
    rows = glue.token_rows(SEEN)[0]
    targets = torch.tensor([[1, 2, -100], [-100, -100, -100], [-100, -100, 3]])
    assert glue.target_rows(targets, rows, SEEN, -100).tolist() == [1, 2, -100, 3]
    targets[1, 2] = 4
    with pytest.raises(ValueError, match="row 1 of a batch has labels that count"):
        glue.target_rows(targets, rows, SEEN, -100)


def test_operators_agree_with_their_fakes():
    rows = glue.token_rows(SEEN)[0]
    torch.library.opcheck(glue.token_rows.default, (SEEN,))
    targets = torch.full((3, 3), -100)
    torch.library.opcheck(glue.target_rows.default, (targets, rows, SEEN, -100))
