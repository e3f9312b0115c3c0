"""One loss in all its spellings: each is computed without its logits, or left alone with a reason."""

import pytest
import torch

from tests.passes.chunk_loss.runs import check_left_alone, check_rewritten, rows_and_head, small_chunks  # noqa: F401
from tests.slow import one_in
from tools.fuzz.forms import losses

NO_HEAD = "and not by a product of rows with a plain weight"
LEFT = {
    "logits by einsum with an ellipsis": NO_HEAD,
    "logits by inner": NO_HEAD,
    "logits by tensordot": NO_HEAD,
    "logits by bmm": NO_HEAD,
    "logits by the other way round": NO_HEAD,
    "logits by plus nothing": NO_HEAD,
    "the loss by take_along_dim": "used by take_along_dim",
    "the loss by an index": "some of its classes are taken by an index",
    "the loss by log of the softmax": "used by log",
    "the loss by one-hot targets": "used by mul",
    "the loss by probabilities as targets": "probabilities, or classes in another form",
    "the loss by exp, sum and log": "used by exp",
}


def hidden_weight_and_target():
    hidden, weight, target = rows_and_head()
    return hidden, weight, target.clamp(min=0)


def test_the_table_is_long_and_exceptions_name_its_rows():
    assert len(losses.LOSS) >= 25
    assert LEFT.keys() <= losses.LOSS.keys()


@pytest.mark.parametrize("name", one_in(6, losses.LOSS))
def test_losses(name):
    program, given = losses.program(losses.LOSS[name]), hidden_weight_and_target()
    if name in LEFT:
        check_left_alone(program, given, LEFT[name])
    else:
        check_rewritten(program, given)


@pytest.mark.parametrize("name", losses.LOSS)
def test_all_spellings_mean_the_same(name):
    given = hidden_weight_and_target()
    expected = losses.program(losses.LOSSES["cross_entropy"].format(rows=losses.ROWS, classes=losses.CLASSES))(*given)
    torch.testing.assert_close(losses.program(losses.LOSS[name])(*given), expected)
