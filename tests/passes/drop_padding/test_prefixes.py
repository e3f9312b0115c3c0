"""Beginnings that rows of a batch share are computed once, where no row can tell."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from glue_compiler.errors import GlueOptionError
from glue_compiler.options import parse_options
from glue_compiler.testing import assert_rewritten, assert_untouched, capture, run_pass
from tests.passes.drop_padding.padded_batches import WORDS, Layer, assert_same_step, compiled
from tests.passes.drop_padding.test_models import model_of, step_of
from tests.slow import one_in, slow_but
from tests.versions import MASKED_DOUBLE

SHARE = {"padding": "drop", "prefix": "share"}


def group(kind: str, rows: int = 6, prompt: int = 5, length: int = 10):
    """Two prompts, of three rows each; labels of prompts are ignored. ``kind``: how rows lie and are padded."""
    generator = torch.Generator().manual_seed(rows + prompt)
    ids = torch.randint(WORDS, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(rows):
        ids[row, :prompt] = ids[row % 2, :prompt]
        mask[row, length - row % 3 :] = 0
    if kind == "left":
        mask[::2, :2] = 0
    elif kind == "tree":  # two of a prompt's rows go on alike
        ids[2:4, prompt : prompt + 2] = ids[0, prompt : prompt + 2]
    elif kind == "equal":
        ids[:], mask[:] = ids[0], mask[0]
    elif kind == "other":
        ids[:, 0] = torch.arange(rows)
    elif kind == "holes":
        mask[:4, 2] = 0
    before = torch.cat([torch.ones_like(mask[:, :1]), mask[:, :-1]], 1)
    labels = ids.masked_fill((mask == 0) | (before == 0), -100)
    labels[:, : prompt if kind != "counted" else 0] = -100
    return ids, mask, labels


def reasons_of(model, *given):
    graph = capture(model, *given)[0]
    result = run_pass(graph, "drop_padding", **SHARE)
    assert_rewritten(result)
    assert result.report.counts.get("shared_prefixes", 0) == (not result.skip_reasons)
    return " ".join(result.skip_reasons)


KINDS = ["right", "left", "tree", "equal", "other", "holes", "counted"]


@pytest.mark.parametrize("kind", slow_but(("right", "tree", "counted"), KINDS))
def test_losses_logits_and_gradients_are_eagers(kind):
    model, given = Layer(), group(kind)
    assert not reasons_of(model, *given)
    assert_same_step(model, model, compiled(model, **SHARE), given)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_models(name):
    model = model_of(name)
    step = step_of(model)
    fast = compiled(step, **SHARE)
    assert not reasons_of(step, *group("right"))
    for kind in KINDS:
        assert_same_step(model, step, fast, group(kind))
    assert_same_step(model, step, fast, group("right", rows=4, prompt=6, length=13))


@pytest.mark.slow
@MASKED_DOUBLE.mark
def test_checkpointed_layers_and_inductor():
    model = model_of("qwen3")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    step = step_of(model)
    assert not reasons_of(step, *group("right"))
    assert_same_step(model, step, compiled(step, "inductor", **SHARE), group("tree"))


def rows_of_products(function, *given):
    function(*given)
    with torch.profiler.profile(record_shapes=True) as profile:
        function(*given)
    operands = [each.input_shapes for each in profile.events() if each.name in ("aten::mm", "aten::addmm")]
    return max(shape[0] for shapes in operands for shape in shapes if len(shape) == 2)


def test_a_token_is_computed_once_for_all_rows_that_begin_alike():
    model, (ids, mask, labels) = Layer(), group("right", rows=32, prompt=24, length=32)
    dropped = rows_of_products(compiled(model), ids, mask, labels)
    shared = rows_of_products(compiled(model, **SHARE), ids, mask, labels)
    assert dropped >= int(mask.sum())
    assert shared < dropped / 2


# -- what tokens are compared by


def test_other_positions_are_other_tokens():
    model = Layer()
    places = nn.Embedding(20, 16, dtype=torch.float64)

    class Placed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.places = model, places

        def forward(self, ids, mask, labels, positions):
            x = self.layer.attended(model.words(ids) + self.places(positions), mask)
            logits = model.head(x)
            return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits

    ids, mask, labels = group("equal")
    step = Placed()
    for positions in (torch.arange(10).expand(6, 10), torch.arange(10) + torch.tensor([0, 1, 0, 1, 2, 2])[:, None]):
        given = (ids, mask, labels, positions.contiguous())
        assert not reasons_of(step, *given)
        assert_same_step(step, step, compiled(step, **SHARE), given)


def test_numbers_of_the_rows_own_are_compared():
    given = group("equal")
    scale = torch.tensor([1.0, 1, 2, 2, 1, 3], dtype=torch.float64)[:, None, None]
    model = Layer(lambda model, x, mask: x * scale)
    assert_same_step(model, model, compiled(model, **SHARE), given)


def test_probabilities_of_own_tokens():
    """As GRPO reads them: each token's of the next one, which is another one at the prompt's end."""
    model, (ids, mask, labels) = Layer(), group("right")

    def read(ids, mask):
        logits = model.head(model(ids, mask))
        return logits.log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2), logits

    def step_of(read):
        def step(ids, mask, labels):
            found, logits = read(ids, mask)
            counts = (labels[:, 1:] != -100).to(found.dtype)
            return (found * counts).sum() / counts.sum(), logits

        return step

    assert not reasons_of(read, ids, mask)
    assert_same_step(model, step_of(read), step_of(compiled(read, **SHARE)), (ids, mask, labels))


@pytest.mark.parametrize("reduction", one_in(2, ["sum", "none"]))
def test_losses_of_each_token(reduction):
    model = Layer()

    def step(ids, mask, labels):
        logits = model.head(model(ids, mask))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)
        return loss.sum() / 7, logits

    for kind in ("right", "counted"):
        assert_same_step(model, step, compiled(step, **SHARE), group(kind))


# -- where each row's tokens are computed


def test_tokens_that_see_what_is_behind_them():
    model, given = Layer(is_causal=False), group("right")
    assert "an attention sees what is behind a token" in reasons_of(model, *given)
    assert_same_step(model, model, compiled(model, **SHARE), given)


def test_embeddings_that_have_gradients_of_their_own():
    model, (ids, mask, _) = Layer(), group("equal")
    embedded = model.words(ids).detach().requires_grad_()

    def step(x, mask):
        return model.attended(x, mask)

    assert "of which each row has gradients of its own" in reasons_of(step, embedded, mask)
    weights = torch.randn(6, 10, 16, dtype=torch.float64) * mask[..., None]
    (wanted,) = torch.autograd.grad((step(embedded, mask) * weights).sum(), embedded)
    (got,) = torch.autograd.grad((compiled(step, **SHARE)(embedded, mask) * weights).sum(), embedded)
    torch.testing.assert_close(got, wanted)


def test_numbers_of_the_rows_own_that_have_gradients():
    scale = torch.ones(6, 1, 1, dtype=torch.float64, requires_grad=True)
    model, given = Layer(lambda model, x, mask: x * scale), group("equal")
    assert "has gradients of its own in each row" in reasons_of(model, *given)
    assert_same_step(model, model, compiled(model, **SHARE), given)


def test_keys_that_are_hidden_in_one_row_alone():
    """From one of two attentions, so that it is not padding."""
    model, (ids, mask, labels) = Layer(), group("equal")
    shown = torch.ones_like(mask)
    shown[1, 2] = 0

    def step(ids, mask, labels, shown):
        rows, length = mask.shape
        split = model.projections(model.words(ids)).view(rows, length, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        places = torch.arange(length)
        seen = mask.bool()[:, None, None, :] & (places <= places[:, None])
        x = nn.functional.scaled_dot_product_attention(*split, attn_mask=seen & shown.bool()[:, None, None, :])
        y = nn.functional.scaled_dot_product_attention(*split, attn_mask=seen)
        logits = model.head((x + y).transpose(1, 2).reshape(rows, length, 16))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits

    given = (ids, mask, labels, shown)
    assert "an attention sees other tokens in each row" in reasons_of(step, *given)
    assert_same_step(model, step, compiled(step, **SHARE), given)


def test_scores_with_a_bias_of_each_row():
    model, (ids, mask, labels) = Layer(), group("equal")
    slopes = torch.tensor([1.0, 1, 2, 2, 1, 3], dtype=torch.float64)

    def step(ids, mask, labels, slopes):
        rows, length = mask.shape
        split = model.projections(model.words(ids)).view(rows, length, 3, 2, 8).permute(2, 0, 3, 1, 4)
        query, key, value = split.unbind(0)
        places = torch.arange(length)
        scores = query @ key.mT + slopes[:, None, None, None] * (places - places[:, None])
        seen = mask.bool()[:, None, None, :] & (places <= places[:, None])
        x = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ value
        logits = model.head(x.transpose(1, 2).reshape(rows, length, 16))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits

    given = (ids, mask, labels, slopes)
    assert "numbers that each row may have of its own" in reasons_of(step, *given)
    assert_same_step(model, step, compiled(step, **SHARE), given)


def labels_written(model, ids, x, labels):
    labels = labels.clone()
    labels[:, :6] = -100
    return x, labels


def labels_filled(model, ids, x, labels):
    return x, labels.clone().masked_fill_(ids == 3, -100)


def scale_that_is_written(model, ids, x, labels):
    scale = ids.clone()
    x = x.sin()
    scale.mul_(0)
    return x * (scale.double()[..., None] + 1), labels


def scale_in_another_mode(model, ids, x, labels):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scale = (ids[:, :1].float() @ torch.ones(1, 1)).double()
    return x * scale[:, :, None], labels


def scale_in_a_checkpoint(model, ids, x, labels):
    def body(x, ids):
        return x * ids.double().sin()[:, None, None]

    return checkpoint(body, x, ids[:, 0], use_reentrant=False), labels


@pytest.mark.parametrize(
    "change",
    [labels_written, labels_filled, scale_that_is_written, scale_in_another_mode, scale_in_a_checkpoint],
    ids=lambda change: change.__name__,
)
def test_what_is_not_known_in_front_of_the_layers(change):
    model, given = Layer(), group("right")

    def step(ids, mask, labels):
        x, labels = change(model, ids, model(ids, mask), labels)
        logits = model.head(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits

    reason = "computed in a body" if change is scale_in_a_checkpoint else "not there in front of the layers"
    assert reason in reasons_of(step, *given)
    assert_same_step(model, step, compiled(step, **SHARE), given)


def to_integers(gradient):
    return (gradient * 1000).long().to(gradient.dtype)


def squared(gradient):
    return gradient * gradient


def to_booleans(gradient):
    return gradient.bool().to(gradient.dtype)


@pytest.mark.parametrize("change", [to_integers, squared, to_booleans], ids=lambda change: change.__name__)
def test_backward_of_a_sum_that_is_no_sum(change):
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return change(gradient)

    (graph,) = capture(Layer(lambda model, x, mask: Own.apply(x)), *group("right"))
    assert_untouched(run_pass(graph, "drop_padding", **SHARE), "of a gradient is not linear")


def test_gradients_of_one_byte():
    model = Layer(lambda model, x, mask: x + x.to(torch.float8_e4m3fn).to(x.dtype))
    given = group("right")
    assert "rounded to one byte" in reasons_of(model, *given)
    assert_same_step(model, model, compiled(model, **SHARE), given)


def test_a_batch_of_one_row():
    model, given = Layer(), group("right", rows=1)
    assert "one row" in reasons_of(model, *given)
    assert_same_step(model, model, compiled(model, **SHARE), given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefix": "share"}, "padding='drop'"),
        ({**SHARE, "regions": "auto"}, "whole graphs"),
        ({**SHARE, "memory_budget": "auto"}, "whole graphs"),
        ({"padding": "drop", "prefix": "shared"}, "did you mean 'share'"),
    ],
)
def test_options_that_do_not_go_together(options, message):
    with pytest.raises(GlueOptionError, match=message):
        parse_options(options, None, [], {})


def test_it_is_not_done_unasked():
    model, given = Layer(), group("equal")
    (graph,) = capture(model, *given)
    result = run_pass(graph, "drop_padding", padding="drop")
    assert "shared_prefixes" not in result.report.counts
