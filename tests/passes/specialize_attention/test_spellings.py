"""One attention and one mask in all their spellings: each is specialised, or left alone with a reason."""

import pytest
import torch
import torch.nn.functional as F

from tests.passes.specialize_attention.attention import assert_as_eager, inputs
from tests.slow import one_in
from tools.fuzz.forms import attention, masks

CHANGED = "changed in another way than by a scale"
OTHERS = "not of query, key and value"
EXPONENTIALS = "written as exponentials and their sum"
LEFT = {
    "scores by the key is turned first": CHANGED,
    "scores by divided by a tensor": CHANGED,
    "scores by elements are multiplied": CHANGED,
    "masked by set by an index": CHANGED,
    "masked by masked_scatter": CHANGED,
    "masked by minimum": CHANGED,
    "weights by softmin": CHANGED,
    "weights by log_softmax": EXPONENTIALS,
    "weights by exp over sum": EXPONENTIALS,
    "weights by exp over sum, less the maximum": EXPONENTIALS,
    "weights by exp less logsumexp": EXPONENTIALS,
    "weights by another dimension": OTHERS,
    "result by einsum that transposes": OTHERS,
    "result by turned": OTHERS,
    "result by elements are multiplied": OTHERS,
}
FORMS = {
    "scores by a scale that is a tensor": "listed",
    "weights by a column left out": "packed",
    "weights by concatenate": "packed",
    "weights by concat with a named axis": "packed",
}
READ = {
    *("the sign of a difference", "a clamped difference", "a maximum", "gt or eq", "logical_or", "repeat_interleave"),
    *("meshgrid", "broadcast_tensors", "outer", "counted", "int32 and float", "from the end"),
    *("tril_indices", "eye, counted", "stacked rows", "vmap", "added: log of the mask"),
    "added: written by an index",
}
"""Masks that are not known to be causal: kernels read them where some can."""
MASKS = {**masks.CAUSAL, **{f"added: {name}": text for name, text in masks.ADDED.items()}}


def test_the_tables_are_long_and_exceptions_name_their_rows():
    assert min(map(len, (attention.ATTENTION, MASKS))) >= 25
    assert {*LEFT, *FORMS} <= attention.ATTENTION.keys()
    assert MASKS.keys() >= READ


@pytest.mark.parametrize("name", one_in(6, attention.ATTENTION))
def test_attention(name):
    expected = LEFT.get(name) or {FORMS.get(name, "causal"): 1}
    assert_as_eager(attention.program(attention.ATTENTION[name]), expected)


@pytest.mark.parametrize("name", one_in(8, MASKS))
def test_causal_masks(name):
    make_mask = masks.program(MASKS[name])

    def fn(query, key, value):
        mask = make_mask(query.shape[2], query.dtype)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    expected = "no block lists are made of it" if name in READ else {"causal": 1}
    assert_as_eager(fn, expected, compiler="inductor")


@pytest.mark.parametrize("name", attention.ATTENTION)
def test_all_spellings_mean_the_same(name):
    tensors = inputs()
    expected = attention.program(attention.OPERATORS["sdpa"])(*tensors)
    torch.testing.assert_close(attention.program(attention.ATTENTION[name])(*tensors), expected)


@pytest.mark.parametrize("name", MASKS)
def test_all_masks_mean_the_same(name):
    found = masks.program(MASKS[name])(5, torch.float64)
    visible = torch.ones(5, 5, dtype=torch.bool).tril()
    assert torch.equal(found if found.dtype == torch.bool else found == 0, visible.expand_as(found))
    assert found.dtype == torch.bool or found[~visible].max() < -1e29
