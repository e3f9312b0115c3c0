"""What reads padding is left alone, with a reason; and what only seems to is not."""

import pytest
import torch
from torch import nn

from glue_compiler.errors import GlueOptionError
from glue_compiler.options import parse_options
from glue_compiler.testing import assert_rewritten, assert_untouched, capture, run_pass
from tests.passes.drop_padding.padded_batches import Layer, assert_same_step, batch, compiled
from tests.slow import one_in


def run(model, *given, **options):
    (graph,) = capture(model, *given)
    return run_pass(graph, "drop_padding", **{"padding": "drop", **options})


def cumulated(model, x, mask):
    return x.cumsum(1)


def averaged(model, x, mask):
    return x - x.mean()


def averaged_over_tokens(model, x, mask):
    return x - x.mean(1, keepdim=True)


def largest(model, x, mask):
    return x + x.amax(dim=(0, 1))


def shifted(model, x, mask):
    return x + torch.cat([x[:, 1:], x[:, :1]], 1)


def mixed_rows(model, x, mask):
    return torch.einsum("btc,ts->bsc", x, torch.ones(x.shape[1], x.shape[1], dtype=x.dtype))


def flipped(model, x, mask):
    return x + x.flip(1)


def normalized(model, x, mask):
    return model.norm(x.transpose(1, 2)).transpose(1, 2)


def convolved(model, x, mask):
    return model.convolution(x.transpose(1, 2)).transpose(1, 2)


def written(model, x, mask):
    x[:, 0] = 0
    return x


@pytest.mark.parametrize(
    ("mix", "reason"),
    [
        (cumulated, "aten.cumsum"),
        (averaged, "aten.mean"),
        (averaged_over_tokens, "aten.mean"),
        (largest, "aten.amax"),
        (shifted, "aten.cat"),
        (mixed_rows, "aten.einsum"),
        (flipped, "aten.flip"),
        (normalized, "batch_norm"),
        (convolved, "aten.conv1d"),
        (written, ""),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_what_mixes_tokens_is_left_alone(mix, reason):
    result = run(Layer(mix), *batch("right"))
    assert_untouched(result)
    assert reason in result.skip_reasons[0]


def test_row_wise_parts_are_not_left_alone():
    def mix(model, x, mask):
        first, second = x.chunk(2, -1)
        gate, _ = torch.stack([first, second], -1).sort(-1)
        return torch.cat([first * gate.amax(-1).softmax(-1), second.cumsum(-1)], -1)

    model = Layer(mix)
    assert_rewritten(run(model, *batch("right")))
    assert_same_step(model, model, compiled(model), batch("left"))


def test_dropout_that_draws_is_left_alone():
    model = Layer(dropout=0.5)
    result = run(model, *batch("right"))
    assert_untouched(result)
    assert "dropout would draw other random numbers" in result.skip_reasons[0]
    assert_rewritten(run(model.eval(), *batch("right")))


def test_an_attention_that_sees_padding_is_left_alone():
    class Two(Layer):
        def attention(self, ids, mask):
            return super().attention(ids, mask) + super().attention(ids, torch.ones_like(mask))

    def seen(model, x, mask):
        heads = x.unflatten(-1, (2, 8)).transpose(1, 2)
        found = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return found.transpose(1, 2).flatten(2)

    for model in (Two(), Layer(seen)):
        result = run(model, *batch("right"))
        assert_untouched(result)
        assert result.skip_reasons[0]


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_decoders_tokens_are_not_an_encoders(checkpoint):
    """As many queries as keys, under the keys' mask: which of the queries are padding it does not say."""

    class Cross(Layer):
        def attended(self, x, y, mask):
            rows, length = mask.shape
            key, value, query = self.parts(x, y)
            shown = mask.bool()[:, None, None, :].expand(rows, 1, length, length)
            found = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=shown)
            return x + found.transpose(1, 2).reshape(rows, length, 16)

        def parts(self, x, y):
            def heads(each):
                return each.view(*each.shape[:2], 2, 8).transpose(1, 2)

            _, key, value = self.projections(y).chunk(3, -1)
            return heads(key), heads(value), heads(self.projections(x).chunk(3, -1)[0])

        def forward(self, ids, mask, encoded):
            x, y = self.words(ids), self.words(encoded)
            if checkpoint:
                x = torch.utils.checkpoint.checkpoint(self.attended, x, y, mask, use_reentrant=False)
            else:
                x = self.attended(x, y, mask)
            return self.head(x)

    ids, mask, _ = batch("right")
    model = Cross()
    assert_untouched(run(model, ids, mask, ids.flip(1)))
    torch.testing.assert_close(compiled(model)(ids, mask, ids.flip(1)), model(ids, mask, ids.flip(1)))


def test_without_a_padding_mask_nothing_happens():
    ids, _, labels = batch("none")
    model = Layer()
    result = run(lambda ids, labels: model(ids, torch.ones_like(ids), labels), ids, labels)
    assert_untouched(result)
    assert result.skip_reasons == ["no attention attends under a padding mask"]


def test_the_option_is_checked():
    with pytest.raises(GlueOptionError, match="'drob'; did you mean 'drop'"):
        parse_options({"padding": "drob"}, None, (), environment={})
    assert parse_options({}, None, (), environment={}).padding == "keep"
    assert parse_options({}, None, (), environment={"GLUE_PADDING": "drop"}).padding == "drop"


def test_verification_compares_what_eager_computes_of_padding():
    assert_untouched(run(Layer(), *batch("right"), verify=True))


def test_it_is_asked_for():
    result = run(Layer(), *batch("right"), padding="keep")
    assert_untouched(result)
    assert not result.skip_reasons


def test_a_window_over_rows_with_holes_counts_hidden_tokens():
    class Window(Layer):
        def attention(self, ids, mask):
            places = torch.arange(ids.shape[1])
            near = (places[:, None] - places[None, :]) < 4
            rows, length = ids.shape
            x = self.words(ids)
            split = self.projections(x).view(rows, length, 3, 2, 8).permute(2, 0, 3, 1, 4)
            shown = mask.bool()[:, None, None, :] & near & (places[None, :] <= places[:, None])
            result = nn.functional.scaled_dot_product_attention(*split.unbind(0), attn_mask=shown)
            return x + result.transpose(1, 2).reshape(rows, length, 16)

    model = Window()
    result = run(model, *batch("holes"), compiler="aot_eager")
    assert result.counts["attentions"] == 1
    assert "packed" not in result.counts
    assert_same_step(model, model, compiled(model), batch("holes"))


def test_memory_that_tokens_alone_lie_in_may_be_written():
    def mix(model, x, mask):
        y = x * 2
        y += x
        y.mul_(3)
        return y

    model = Layer(mix)
    assert_rewritten(run(model, *batch("right")))
    assert_same_step(model, model, compiled(model), batch("left"))


@pytest.mark.parametrize("write", [lambda y: y[:, 0].mul_(2), lambda y: [y[:, 0], y.mul_(2)][0]])
def test_memory_of_tokens_that_a_view_shares_is_not_written(write):
    def mix(model, x, mask):
        y = x * 1
        first = write(y)
        return (y * mask[..., None]).sum(1) + first.sum()

    result = run(Layer(mix), *batch("right")[:2])
    assert_untouched(result)
    assert result.skip_reasons == ["memory is written that a view of what is put back shares"]


def test_memory_of_tokens_may_be_written_before_a_view_of_it():
    def mix(model, x, mask):
        y = x * 1
        y.mul_(2)
        return x + y[:, :1]

    model = Layer(mix)
    assert_rewritten(run(model, *batch("right")))
    assert_same_step(model, model, compiled(model), batch("right"))


def test_numbers_of_rows_and_of_tokens_enter():
    def mix(model, x, mask):
        rows, length, _ = x.shape
        scale = torch.linspace(1, 2, rows, dtype=x.dtype)
        places = torch.linspace(1, 2, length, dtype=x.dtype)
        return x * scale[:, None, None] + places[:, None] * torch.outer(scale, places)[..., None]

    model = Layer(mix)
    assert_rewritten(run(model, *batch("right")))
    assert_same_step(model, model, compiled(model), batch("holes"))


@pytest.mark.parametrize(
    "number",
    one_in(
        3,
        [
            lambda mask: mask.sum().item(),
            lambda mask: mask.nonzero().shape[0],
            lambda mask: mask.shape[1],
            lambda mask: mask.sum(),
        ],
    ),
)
def test_numbers_that_are_read_of_the_mask(number):
    model = Layer(lambda model, x, mask: x * number(mask))
    (graph,) = capture(model, *batch("right"))
    assert_rewritten(run_pass(graph, "drop_padding", padding="drop"))
    fast = compiled(model)
    for length in (10, 12):
        assert_same_step(model, model, fast, batch("left", length=length))


@pytest.mark.parametrize("settings", [{"scale_grad_by_freq": True}, {"max_norm": 1.0}])
def test_an_embedding_that_counts_or_writes(settings):
    model = Layer()
    model.words = nn.Embedding(61, 16, dtype=torch.float64, **settings)
    assert_untouched(run(model, *batch("right")))


@pytest.mark.parametrize("regions", ["whole", "auto"])
def test_logits_that_are_written_without_gradients(regions):
    model, given = Layer(), batch("right")

    def step(ids, mask, labels):
        logits = model.head(model(ids, mask))
        with torch.no_grad():
            logits.masked_fill_(logits > 0.1, 0.05)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    found = [torch.autograd.grad(call(*given), model.words.weight) for call in (step, compiled(step, regions=regions))]
    torch.testing.assert_close(found[1], found[0])
