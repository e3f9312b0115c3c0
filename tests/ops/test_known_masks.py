"""What is known of a mask goes with the tensor, and ends with what it was."""

from __future__ import annotations

import copy
import gc

import pytest
import torch

from glue_compiler.ops import known_masks
from glue_compiler.ops.known_masks import (
    MaskKind,
    kind_of,
    mask_documents,
    mask_of,
    may_be_mask,
    remember,
    remember_tokens,
    seen_of,
)

KIND = MaskKind(True, True, -1)


def causal(length=6):
    return torch.ones(1, 1, length, length, dtype=torch.bool).tril()


def known(mask=None):
    mask = causal() if mask is None else mask
    remember(mask, KIND)
    return mask


def test_it_is_known_of_the_tensor():
    mask = known()
    assert kind_of(mask) == KIND
    mask.sum()
    assert kind_of(mask) == KIND


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda mask: mask.clone(), id="a copy"),
        pytest.param(copy.deepcopy, id="a deep copy"),
        pytest.param(lambda mask: mask[:, :, :4, :4], id="a view"),
        pytest.param(lambda mask: mask.view_as(mask), id="a view of all"),
        pytest.param(lambda mask: mask.expand(2, -1, -1, -1), id="an expansion"),
        pytest.param(lambda mask: mask.detach(), id="detached"),
        pytest.param(lambda mask: None, id="no tensor"),
    ],
)
def test_nothing_is_known_of_others(other):
    mask = known()
    assert kind_of(other(mask)) is None
    assert kind_of(mask) == KIND


def to_other_memory(mask):
    mask.data = torch.ones_like(mask)


def through_set(mask):
    mask.set_(torch.ones_like(mask).untyped_storage(), 0, mask.shape, mask.stride())


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(lambda mask: mask.fill_(True), id="in place"),
        pytest.param(lambda mask: mask[0, 0, 3].fill_(True), id="through a view"),
        pytest.param(lambda mask: mask.detach().zero_(), id="through a detached alias"),
        pytest.param(lambda mask: torch.logical_not(mask, out=mask), id="out="),
        pytest.param(to_other_memory, id="data"),
        pytest.param(through_set, id="set_"),
        pytest.param(lambda mask: mask.resize_(1, 1, 8, 8), id="resize_"),
        pytest.param(lambda mask: mask.transpose_(2, 3), id="transpose_"),
    ],
)
def test_a_write_ends_it(write):
    mask = known()
    with torch.no_grad():
        write(mask)
    assert kind_of(mask) is None


PADDED = MaskKind(False, True, -1, has_padding=True)


def tokens_of(mask):
    tokens = torch.zeros(1, 6, 4)
    remember_tokens(tokens, mask)
    return tokens


def test_tokens_know_their_mask_until_one_of_both_is_written():
    mask = causal()
    mask[..., 4:] = False
    remember(mask, PADDED)
    first = tokens_of(mask)
    second = tokens_of(first)
    assert mask_of(first) is mask_of(second) is mask
    assert seen_of(first).tolist() == [[True] * 4 + [False] * 2]
    assert seen_of(first) is seen_of(second) is seen_of(mask)
    assert mask_of(first.clone()) is None
    first.add_(1)
    assert mask_of(first) is None
    assert mask_of(second) is mask
    mask[..., 3] = False
    assert mask_of(second) is None


@pytest.mark.parametrize("of", [lambda tokens, mask: mask_of(tokens), lambda tokens, mask: kind_of(mask)])
def test_nothing_is_known_of_memory_that_is_gone(monkeypatch, of):
    """As that of an earlier replay of a CUDA graph, whose place cannot be asked."""
    mask = causal()
    remember(mask, PADDED)
    tokens = tokens_of(mask)
    assert of(tokens, mask) is not None

    def gone(_):
        raise RuntimeError("accessing a tensor output of CUDAGraphs that has been overwritten")

    monkeypatch.setattr(known_masks, "_state_of", gone)
    assert of(tokens, mask) is None


def test_what_is_remembered_again_holds_again():
    mask = known()
    mask.fill_(True)
    remember(mask, MaskKind(False, False, -1))
    assert kind_of(mask) == MaskKind(False, False, -1)


@pytest.mark.slow
def test_it_is_gone_with_the_tensor():
    gc.collect()
    before = len(known_masks._known)
    mask = known()
    assert len(known_masks._known) == before + 1
    del mask
    gc.collect()
    assert len(known_masks._known) == before


def test_it_lives_as_long_as_autograd_keeps_the_tensor():
    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, mask):
            ctx.save_for_backward(mask)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            found.append(kind_of(ctx.saved_tensors[0]))
            return grad, None

    found = []
    x = torch.ones(2, requires_grad=True)
    out = Keeps.apply(x, known())
    gc.collect()
    out.sum().backward()
    assert found == [KIND]


def test_nothing_is_kept_of_what_has_no_version_counter():
    with torch.inference_mode():
        mask = causal()
    assert kind_of(known(mask)) is None


def test_nothing_is_kept_of_subclasses_and_inside_of_transforms():
    class Own(torch.Tensor):
        pass

    assert kind_of(known(causal().as_subclass(Own))) is None
    found = []

    def look(mask):
        found.append(kind_of(known(mask)))
        return mask

    torch.vmap(look)(causal().expand(3, -1, -1, -1))
    assert found == [None]


def test_modes_of_the_caller_do_not_see_the_question():
    class Refuses(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            raise AssertionError(func)

    mask = known()
    with Refuses():
        assert kind_of(mask) == KIND


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (causal(), True),
        (causal()[0, 0], True),
        (causal().float(), True),
        (causal().float()[0, 0], False),
        (causal().float().expand(-1, 2, -1, -1), False),
        (causal().float().requires_grad_(), False),
        (causal().long(), False),
        (causal()[:, :, :4], False),
        (causal(1), False),
        (causal()[None], False),
        (3, False),
    ],
)
def test_what_may_be_a_mask(tensor, expected):
    assert may_be_mask(tensor) is expected


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("window", [-1, 2])
@pytest.mark.parametrize("rank", [2, 3, 4])
def test_documents_are_those_of_the_mask(is_causal, window, rank):
    ids = torch.tensor([[0, 0, 1, 2, 2, 2, 2], [0, 1, 1, 1, 1, 1, 2]])
    token = torch.arange(ids.shape[1])
    distance = token[:, None] - token
    mask = ids[:, :, None] == ids[:, None]
    if is_causal:
        mask = mask & (distance >= 0)
    if window > 0:
        mask = mask & (distance.abs() < window)
    mask = mask[:, None].expand(-1, 3, -1, -1)
    for _ in range(4 - rank):
        mask, ids = mask[0], ids[0] if ids.dim() > 1 else ids
    found = mask_documents(mask)
    assert torch.equal(found, ids)
    torch.library.opcheck(mask_documents, (mask.contiguous(),))
