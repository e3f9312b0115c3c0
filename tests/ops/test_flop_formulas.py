"""Operations of glue's own operators, beside those of the same computation in torch's."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import glue_compiler.ops  # noqa: F401  registers operators and formulas
from glue_compiler.ops.flop_formulas import DOCUMENT


def counted(run):
    with FlopCounterMode(display=False) as mode:
        run()
    return mode.get_total_flops()


def heads(tokens, count, size=8):
    return torch.randn(tokens, count, size, requires_grad=True)


def offsets(*ends):
    return torch.tensor([0, *ends], dtype=torch.int32)


def attention(query, cu_seqlens, is_causal=False, window=-1, longest=64):
    key, value = heads(query.shape[0], 2), heads(query.shape[0], 2)
    return torch.ops.glue.varlen_attention(query, key, value, cu_seqlens, longest, is_causal, window, 1.0)[0]


def test_attention_counts_the_products_of_each_document():
    """Backward has the scores, which eager keeps, once more."""
    query, key = heads(64, 4), heads(64, 4)

    def by_documents(backward):
        for q, k in zip(query.transpose(0, 1).split(16, 1), key.transpose(0, 1).split(16, 1), strict=True):
            found = (q @ k.transpose(1, 2)).softmax(-1) @ k
            if backward:
                found.sum().backward()

    forward, step = counted(lambda: by_documents(False)), counted(lambda: by_documents(True))
    of_ends = offsets(16, 32, 48, 64)
    assert counted(lambda: attention(query, of_ends)) == forward > 0
    assert counted(lambda: attention(query, of_ends).sum().backward()) == step + forward // 2
    assert counted(lambda: attention(query, of_ends, is_causal=True)) == forward // 2


@pytest.mark.parametrize(
    ("is_causal", "window", "seen"), [(False, 4, 8), (True, 4, 4), (True, 400, 32), (False, 400, 64)]
)
def test_a_window_hides(is_causal, window, seen):
    query = heads(64, 4)
    assert counted(lambda: attention(query, offsets(64), is_causal, window)) == 2 * 2 * 64 * 4 * 8 * seen


@pytest.mark.parametrize("documents", [None, (1,)])
@pytest.mark.parametrize(("longest", "length"), [(1 << 20, DOCUMENT), (512, 512)])
def test_documents_of_unknown_number_have_a_usual_length(documents, longest, length):
    """As plans ask, which know no number of documents, or the least."""
    formula = flop_registry[torch.ops.glue.varlen_attention]
    shape = (1 << 20, 4, 8)
    assert formula(shape, shape, shape, documents, longest, False, -1, 1.0) == 2 * 2 * (1 << 20) * 4 * 8 * length


def loss_settings(trains, dtype=torch.float32):
    """All that a loss over 50 classes is given beside rows and weights."""
    return None, torch.randint(50, (32,)), None, "mean", -100, 0.0, 1.0, 0.0, dtype, [*trains, False], False


@pytest.mark.parametrize("trains", [(True, True), (True, False), (False, True)])
def test_a_loss_counts_logits_and_the_gradients_that_are_needed(trains):
    x, weight = (torch.randn(n, 8, requires_grad=trained) for n, trained in zip((32, 50), trains, strict=True))
    settings = loss_settings(trains)
    target = settings[1]
    ours = counted(lambda: torch.ops.glue.linear_cross_entropy([x], [weight], *settings)[0].backward())
    assert ours == counted(lambda: F.cross_entropy(F.linear(x, weight), target).backward()) > 0
    with torch.no_grad():
        again = counted(
            lambda: torch.ops.glue.linear_cross_entropy_gradients(torch.ones(()), [x], [weight], *settings[:-1])
        )
    assert again == ours


def test_a_loss_of_float16_makes_its_gradients_in_backward_alone():
    x, weight = (torch.randn(n, 8, dtype=torch.float16, requires_grad=True) for n in (32, 50))
    settings = loss_settings((True, True), torch.float16)
    logits = 2 * 32 * 8 * 50
    assert counted(lambda: torch.ops.glue.linear_cross_entropy([x], [weight], *settings)) == logits
    step = counted(lambda: torch.ops.glue.linear_cross_entropy([x], [weight], *settings)[0].backward())
    assert step == logits + 3 * logits
