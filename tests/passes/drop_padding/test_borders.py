"""Where tokens are put back: outputs, pooling, shifted losses, and labels that break the contract."""

import pytest
import torch
from torch import nn

from glue_compiler.testing import assert_rewritten, assert_untouched, capture, run_pass
from tests.passes.drop_padding.padded_batches import WORDS, Layer, assert_same_step, batch, compiled
from tests.slow import one_in


def both(model, *given):
    found = []
    for function in (model, compiled(model)):
        result = function(*given)
        gradients = torch.autograd.grad(result.square().sum(), model.words.weight)
        found.append((result, *gradients))
    return found


@pytest.mark.parametrize("kind", ["right", "left", "holes", "none"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_hidden_states_are_zeros_where_padding_was(kind, is_causal):
    ids, mask, labels = batch(kind)
    model = Layer(is_causal=is_causal)
    assert_same_step(model, model, compiled(model), (ids, mask, labels))
    hidden = compiled(model)(ids, mask)
    assert not hidden[mask == 0].any()
    torch.testing.assert_close(hidden[mask == 1], model(ids, mask)[mask == 1])


def test_a_batch_of_one():
    model = Layer()
    for kind in ("none", "right"):
        assert_same_step(model, model, compiled(model), batch(kind, rows=1))
    ids, mask, labels = batch("none", rows=1)
    mask[:, -3:] = 0
    labels[:, -3:] = -100
    assert_same_step(model, model, compiled(model), (ids, mask, labels))


def test_tokens_of_their_own_that_no_mask_hides_are_all_computed():
    """Of the same sizes as those that are padded."""
    model = Layer()

    def step(ids, mask, others):
        return model(ids, mask), model.head(model.words(others)).tanh()

    ids, mask, _ = batch("right")
    others = ids.flip(1)
    fast = compiled(step)
    (want, beside), (got, other) = step(ids, mask, others), fast(ids, mask, others)
    torch.testing.assert_close(got[mask == 1], want[mask == 1])
    assert not got[mask == 0].any()
    torch.testing.assert_close(other, beside)


def averaged(model, x, mask):
    seen = mask.unsqueeze(-1).expand(x.size()).to(x.dtype)
    return (x * seen).sum(1) / seen.sum(1).clamp(min=1e-9)


def filled(model, x, mask):
    return x.masked_fill(mask.unsqueeze(-1) == 0, 0).sum(1) / mask.sum(1, keepdim=True)


def filled_by_seen(model, x, mask):
    return torch.where(mask.bool()[..., None], x, 0.0).sum(1)


@pytest.mark.parametrize("pool", [averaged, filled, filled_by_seen], ids=lambda pool: pool.__name__)
def test_pooling_of_what_the_mask_has_made_zero(pool):
    model = Layer(pool)
    given = batch("holes")[:2]
    (graph,) = capture(model, *given)
    assert_rewritten(run_pass(graph, "drop_padding", padding="drop"))
    (result, gradient), (other, other_gradient) = both(model, *given)
    torch.testing.assert_close(other, result)
    torch.testing.assert_close(other_gradient, gradient)


def filled_with_the_least(model, x, mask):
    return x.masked_fill(mask.unsqueeze(-1) == 0, -1e9).amax(1)


def averaged_by_another_mask(model, x, mask):
    return (x * (mask.roll(1, 1)).unsqueeze(-1)).sum(1)


@pytest.mark.parametrize("pool", [filled_with_the_least, averaged_by_another_mask], ids=lambda pool: pool.__name__)
def test_pooling_of_anything_else_is_left_alone(pool):
    (graph,) = capture(Layer(pool), *batch("holes")[:2])
    assert_untouched(run_pass(graph, "drop_padding", padding="drop"))


def rows_of(x):
    return torch.arange(len(x))


@pytest.mark.parametrize(
    "pick",
    [
        lambda x, mask: x[rows_of(x), mask.sum(1) - 1],
        lambda x, mask: x[rows_of(x), mask.sum(1) - 1, :5],
        lambda x, mask: x[rows_of(x), 0],
        lambda x, mask: x[:, 0],
        lambda x, mask: x[0, 0],
        lambda x, mask: x[:, :1].mean(1),
        lambda x, mask: x[:, [0]].mean(1),
        lambda x, mask: x.index_select(1, torch.tensor([0])).mean(1),
        lambda x, mask: x[mask.sum(1).argsort(), 0],
        lambda x, mask: x.view(-1, 16)[0],
        lambda x, mask: x.view(-1, 16)[torch.tensor([0])].mean(0),
        lambda x, mask: x.unflatten(-1, (2, 8)).transpose(1, 2)[:, :, 0],
        lambda x, mask: (x * mask[..., None])[0].mean(0),
    ],
)
def test_single_tokens_are_read_by_numbers(pick):
    model = Layer(lambda model, x, mask: pick(x, mask))
    given = batch("right")[:2]
    (graph,) = capture(model, *given)
    assert_rewritten(run_pass(graph, "drop_padding", padding="drop"))
    (result, gradient), (other, other_gradient) = both(model, *given)
    torch.testing.assert_close(other, result)
    torch.testing.assert_close(other_gradient, gradient)


@pytest.mark.parametrize(
    "pick",
    [
        lambda x, mask: x[0].mean(0),
        lambda x, mask: x.select(0, 1).mean(0),
        lambda x, mask: x[:2].mean(1),
        lambda x, mask: x[mask.sum(1).argsort()].mean(1),
        lambda x, mask: torch.stack([row.amax(0) for row in x]),
        lambda x, mask: torch.stack(x.unbind(1)).amax(0),
        lambda x, mask: x[:, torch.arange(x.shape[1])].mean(1),
        lambda x, mask: x[1, :4].mean(0),
        lambda x, mask: x[rows_of(x), :4].mean(1),
        lambda x, mask: x[:, :4].mean(1),
        lambda x, mask: x[:, ::4].mean(1),
        lambda x, mask: x.narrow(1, 0, 4).mean(1),
        lambda x, mask: x.split([4, 6], 1)[0].mean(1),
        lambda x, mask: x.view(-1, 16)[torch.arange(20)].mean(0),
        lambda x, mask: x.index_select(0, mask.sum(1).argsort()).mean(1),
        lambda x, mask: x.index_select(1, torch.tensor([0, 7])).mean(1),
        lambda x, mask: x.gather(1, (mask.sum(1) - 1)[:, None, None].expand(-1, 1, 16)).mean(1),
        lambda x, mask: x[rows_of(x) // 2, mask.sum(1) - 1].mean(0),
        lambda x, mask: x[mask.sum(1).argsort(), mask.sum(1) - 1].mean(0),
        lambda x, mask: x[rows_of(x)[:, None], torch.tensor([[0, 7]])].mean(1),
        lambda x, mask: x[mask.bool()].mean(0),
    ],
)
def test_several_tokens_of_a_row_are_not_read_by_numbers(pick):
    model = Layer(lambda model, x, mask: pick(x, mask))
    given = batch("right")[:2]
    (graph,) = capture(model, *given)
    result = run_pass(graph, "drop_padding", padding="drop")
    assert_untouched(result)
    assert "padding is read there" in result.skip_reasons[0]


@pytest.mark.parametrize("is_early", one_in(2, [True, False]))
def test_a_loss_of_shifted_logits(is_early):
    class Shifted(Layer):
        def forward(self, ids, mask, labels):
            hidden = self.attention(ids, mask)
            logits = self.head(hidden)
            shifted = self.head(hidden[:, :-1]) if is_early else logits[:, :-1].contiguous()
            return nn.functional.cross_entropy(shifted.view(-1, WORDS), labels[:, 1:].reshape(-1)), logits

    model = Shifted()
    (graph,) = capture(model, *batch("right"))
    assert_rewritten(run_pass(graph, "drop_padding", padding="drop"))
    for kind in ("right", "left", "holes"):
        assert_same_step(model, model, compiled(model), batch(kind))


@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_reductions(reduction):
    class Reduced(Layer):
        def forward(self, ids, mask, labels):
            logits = self.head(self.attention(ids, mask))
            loss = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction=reduction)
            return loss.sum() / 7, logits

    model = Reduced()
    (graph,) = capture(model, *batch("right"))
    assert_rewritten(run_pass(graph, "drop_padding", padding="drop"))
    assert_same_step(model, model, compiled(model), batch("left"))


def assert_same_at_lengths(model):
    """Outputs, their sizes and gradients, at two lengths: sizes are symbols at the second."""
    fast = compiled(model)
    for rows, length in ((3, 10), (4, 12)):
        given = batch("right", rows, length)
        (result, gradient), (other, other_gradient) = (
            (result, *torch.autograd.grad(result.square().sum(), model.words.weight))
            for result in (function(*given) for function in (model, fast))
        )
        torch.testing.assert_close(other, result)
        torch.testing.assert_close(other_gradient, gradient)


@pytest.mark.parametrize(
    "reader",
    one_in(
        4,
        [
            lambda loss, mask, labels: loss,
            lambda loss, mask, labels: loss.mean(),
            lambda loss, mask, labels: loss.std(),
            lambda loss, mask, labels: loss.topk(5).values,
            lambda loss, mask, labels: loss.view(mask.shape[0], mask.shape[1] - 1).mean(-1),
            lambda loss, mask, labels: (loss * mask[:, 1:].reshape(-1)).sum() / mask[:, 1:].sum(),
            lambda loss, mask, labels: loss[labels[:, 1:].reshape(-1) != -100].mean(),
            lambda loss, mask, labels: loss.view(labels.shape[0], -1).mean(-1),
        ],
    ),
)
def test_losses_of_shifted_tokens(reader):
    class Each(Layer):
        def forward(self, ids, mask, labels):
            logits = self.head(self.attention(ids, mask))[:, :-1].reshape(-1, WORDS)
            loss = nn.functional.cross_entropy(logits, labels[:, 1:].reshape(-1), reduction="none")
            return reader(loss, mask, labels)

    graph, *_ = capture(Each(), *batch("right"))
    assert_rewritten(run_pass(graph, "drop_padding", padding="drop"))
    assert_same_at_lengths(Each())


def test_labels_with_sizes_of_their_own():
    """Each is marked dynamic, so that nothing says that there are as many labels as ids."""

    class Each(Layer):
        def forward(self, ids, mask, labels):
            logits = self.head(self.attention(ids, mask))[:, :-1].reshape(-1, WORDS)
            loss = nn.functional.cross_entropy(logits, labels[:, 1:].reshape(-1), reduction="none")
            return loss.view(len(ids), -1).mean(-1) if self.training else loss.std()

    model, given = Each(), batch("right")
    for each in given:
        torch._dynamo.mark_dynamic(each, (0, 1))
    (graph,) = capture(model, *given)
    result = run_pass(graph, "drop_padding", padding="drop")
    assert_untouched(result)
    assert result.skip_reasons == ["sizes of inputs are not known to be equal"]
    (graph,) = capture(model.eval(), *given)
    assert_rewritten(run_pass(graph, "drop_padding", padding="drop"))


@pytest.mark.parametrize(
    "part",
    one_in(
        4,
        [
            lambda x: x[:, 1:],
            lambda x: x[:, 2:-1],
            lambda x: x[:, -20:7],
            lambda x: x[:, : x.shape[1] // 2 + 1],
            lambda x: x[:, 1:].transpose(1, 2),
            lambda x: x[:, :-1].reshape(-1, 16),
            lambda x: x.unflatten(-1, (2, 8)).transpose(1, 2).reshape(-1, x.shape[1], 8),
            lambda x: x.unflatten(-1, (2, 8)).permute(2, 0, 1, 3).reshape(-1, x.shape[1], 8),
            lambda x: x.unflatten(-1, (2, 8)).transpose(1, 2).flatten(0, 1) * torch.arange(x.shape[1])[:, None],
            lambda x: x.unflatten(-1, (2, 8)).transpose(1, 2).flatten(0, 1) * torch.arange(2 * len(x))[:, None, None],
        ],
    ),
)
def test_what_is_put_back_has_the_sizes_of_eager(part):
    class Part(Layer):
        def forward(self, ids, mask, labels):
            return part(self.attention(ids, mask) * mask[..., None]).std(-2)

    (graph,) = capture(Part(), *batch("right"))
    result = run_pass(graph, "drop_padding", padding="drop")
    assert_rewritten(result)
    assert_same_at_lengths(Part())


def test_log_probabilities_of_tokens():
    class Tokens(Layer):
        def forward(self, ids, mask, labels):
            logits = self.head(self.attention(ids, mask))
            found = logits.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1) * mask
            return found.sum(), logits

    model = Tokens()
    (graph,) = capture(model, *batch("right"))
    assert_rewritten(run_pass(graph, "drop_padding", padding="drop"))
    assert_same_step(model, model, compiled(model), batch("holes"))


def test_labels_that_count_at_hidden_tokens_are_an_error():
    ids, mask, labels = batch("right")
    model = Layer()
    step = compiled(model)
    step(ids, mask, labels)
    labels[2, -1] = 3
    with pytest.raises(ValueError, match="row 2 of a batch has labels that count"):
        step(ids, mask, labels)


def test_a_batch_that_is_hidden_whole_is_an_error():
    ids, mask, labels = batch("right")
    with pytest.raises(ValueError, match="hides all of its tokens"):
        compiled(Layer())(ids, torch.zeros_like(mask), torch.full_like(labels, -100))


def test_a_row_that_is_hidden_whole():
    ids, mask, labels = batch("right")
    mask[0], labels[0] = 0, -100
    model = Layer(is_causal=False)
    assert_same_step(model, model, compiled(model), (ids, mask, labels))
