"""Layers that are compiled once each, and what comes behind them, of padded batches: against eager in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from glue_compiler.backend import GlueBackend
from glue_compiler.errors import GlueWarning
from glue_compiler.ops import batch_memo
from glue_compiler.report.session import Session
from tests.passes.drop_padding.padded_batches import assert_same_step, batch
from tests.passes.drop_padding.test_models import model_of, step_of

LAYERS = 5
BATCHES = [("right", 3, 10), ("left", 3, 10), ("holes", 3, 10), ("none", 3, 10), ("right", 4, 12), ("left", 4, 32)]


def layered(name="qwen3", checkpoints=True):
    model = model_of(name, **{"n_layer" if name == "gpt2" else "num_hidden_layers": LAYERS})
    if checkpoints and model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for weight in model.parameters():
        if weight.dim() == 1:  # biases, which make zeros something else
            nn.init.normal_(weight, std=0.2)
    return model


class Run:
    def __init__(self, function, **options):
        torch._dynamo.reset()
        self.session = Session()
        options = {"padding": "drop", "compiler": "aot_eager", "regions": "auto", "strict": True, **options}
        self.call = torch.compile(function, backend=GlueBackend(session=self.session), options=options)

    def __call__(self, *given):
        return self.call(*given)

    def counts(self):
        """Of the operators in each graph that were written for the tokens that count."""
        found = [
            p.counts.get("operators", 0) for g in self.session.graphs for p in g.passes if p.name == "drop_padding"
        ]
        assert not any(p.error for g in self.session.graphs for p in g.passes)
        return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "gpt2", "llama", "gemma3", "gpt_neox", "bert"])
def test_models(name):
    model = layered(name)
    step = step_of(model)
    fast = Run(step)
    for given in BATCHES:
        assert_same_step(model, step, fast, batch(*given))
    compiled = fast.counts()
    assert len(compiled) <= 2 * 5, "one length and any: in front of the layers, a layer, and what comes behind"
    half = compiled[: len(compiled) // 2]
    assert not half[0], "what makes the mask"
    assert half[-1], "head and loss"
    assert len(list(filter(None, half))) > 1, "a layer"


@pytest.mark.slow
def test_inductor_without_checkpoints():
    model = layered(checkpoints=False)
    step = step_of(model)
    fast = Run(step, compiler="inductor")
    for given in BATCHES[:2] + BATCHES[4:]:
        assert_same_step(model, step, fast, batch(*given))
    assert sum(map(bool, fast.counts())) > 2


@pytest.mark.slow
def test_what_is_known_of_a_batch_is_computed_once(monkeypatch):
    model = layered()
    step = step_of(model)
    fast = Run(step, passes={"memoize_metadata": True})
    assert_same_step(model, step, fast, batch("right"))
    computed = []
    original = batch_memo._compute
    monkeypatch.setattr(batch_memo, "_compute", lambda *args: computed.append(args) or original(*args))
    assert_same_step(model, step, fast, batch("left"))
    # One for graphs with attention, one for the others, which ask for less.
    assert len(computed) <= 2


@pytest.mark.slow
def test_evaluation_between_steps():
    model = layered()
    step = step_of(model)
    fast = Run(step)
    assert_same_step(model, step, fast, batch("right"))
    ids, mask, labels = batch("left")
    with torch.no_grad():
        want, got = step(ids, mask, labels), fast(ids, mask, labels)
        torch.testing.assert_close(got[0], want[0])
        torch.testing.assert_close(got[1][mask.bool()], want[1][mask.bool()])
    assert_same_step(model, step, fast, batch("holes"))


@pytest.mark.slow
@pytest.mark.parametrize("evaluation", [torch.no_grad, torch.inference_mode])
def test_evaluation_and_then_training_with_one_mask(evaluation):
    model = Stack()
    ids, mask, labels = batch("right")
    masks = torch.compile(causal_of, backend="glue", options={"padding": "drop", "compiler": "aot_eager"})(mask)

    def step(ids, labels):
        x = model.words(ids)
        for layer in model.layers:
            x = layer(x, masks)
        return nn.functional.cross_entropy(model.head(x).flatten(0, 1), labels.flatten())

    want, fast = gradients_of(model, step, (ids, labels)), Run(step)
    with evaluation():
        torch.testing.assert_close(fast(ids, labels), want[0].detach())
    torch.testing.assert_close(gradients_of(model, fast, (ids, labels)), want)


def test_a_mask_of_one_row_for_all():
    """Each row of the batch is as long."""
    model = Stack(lambda mask: causal_of(mask[:1]))
    ids, mask, labels = batch("right")
    mask = mask[-1:].expand_as(mask).clone()
    labels = labels.masked_fill((mask == 0) | (labels[-1:] == -100), -100)
    fast = Run(model)
    for _ in range(2):
        assert_same_step(model, model, fast, (ids, mask, labels))


@pytest.mark.slow
def test_a_mask_of_the_callers_own_leaves_all_as_it_is():
    model = layered()
    ids, mask, labels = batch("right")
    causal = torch.ones(10, 10, dtype=torch.bool).tril() & mask.bool()[:, None, None]

    def step(ids, mask, labels):
        found = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False)
        return found.loss, found.logits

    fast = Run(step)
    (want, logits), (got, others) = step(ids, causal, labels), fast(ids, causal, labels)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(others, logits)
    assert not any(fast.counts())


@pytest.mark.slow
def test_batches_with_and_without_a_mask_in_turn():
    model = layered()
    step = step_of(model)
    fast = Run(step)
    ids, mask, labels = batch("right")
    for _ in range(2):
        assert_same_step(model, step, fast, (ids, mask, labels))
        want, got = step(ids, None, ids), fast(ids, None, ids)
        torch.testing.assert_close(got, want)


def written(module, given, result):
    result.mul_(1)
    return result


def replaced(module, given, result):
    return result + 1


@pytest.mark.slow
@pytest.mark.parametrize("hook", [written, replaced])
def test_tokens_that_python_changes_between_layers_are_no_zeros_any_more(hook):
    """What comes behind computes all tokens then, as eager does with what it is given."""
    model = layered(checkpoints=False)
    step = step_of(model)
    model.model.layers[-1].register_forward_hook(hook)
    fast = Run(step)
    ids, mask, labels = batch("right")
    (want, logits), (got, others) = step(ids, mask, labels), fast(ids, mask, labels)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(others[mask.bool()], logits[mask.bool()])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.other = (nn.LayerNorm(16, dtype=torch.float64) for _ in range(2))
        self.projections = nn.Linear(16, 48, dtype=torch.float64)
        self.up, self.down = nn.Linear(16, 32, dtype=torch.float64), nn.Linear(32, 16, dtype=torch.float64)

    def forward(self, x, mask):
        rows, length, _ = x.shape
        split = self.projections(self.norm(x)).view(rows, length, 3, 2, 8).permute(2, 0, 3, 1, 4)
        result = nn.functional.scaled_dot_product_attention(*split.unbind(0), attn_mask=mask)
        x = x + result.transpose(1, 2).reshape(rows, length, 16)
        return x + self.down(nn.functional.gelu(self.up(self.other(x))))


def causal_of(mask):
    places = torch.arange(mask.shape[1])
    return mask.bool()[:, None, None, :] & (places[None, :] <= places[:, None])


class Stack(nn.Module):
    def __init__(self, mask_of=causal_of):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(61, 16, dtype=torch.float64)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(16, 61, dtype=torch.float64)
        self.mask_of = mask_of
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.3)

    def states(self, ids, *masks):
        x, masks = self.words(ids), [self.mask_of(each) for each in masks]
        for number, layer in enumerate(self.layers):
            x = layer(x, masks[number % len(masks)])
        return x

    def forward(self, ids, mask, labels):
        logits = self.head(self.states(ids, mask))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100), logits


def gradients_of(model, step, given):
    model.zero_grad(set_to_none=True)
    loss = step(*given)
    loss.backward()
    return [loss, *(weight.grad for weight in model.parameters())]


def two_batches():
    """Of equal sizes, padded otherwise."""
    ids, mask, labels = batch("right")
    others, other, targets = batch("left")
    return ids, mask, labels, others.flip(1), other, targets


def test_two_batches_of_one_size_in_a_step(recwarn):
    """Each has padding of its own, and what is behind the layers is given both."""
    model = Stack()

    def step(ids, mask, labels, others, other, targets):
        first, second = model.states(ids, mask), model.states(others, other)
        found = [nn.functional.cross_entropy(model.head(x).flatten(0, 1), t.flatten()) for x, t in
                 ((first, labels), (second, targets))]  # fmt: skip
        return found[0] - 2 * found[1]

    fast = Run(step)
    for _ in range(2):
        torch.testing.assert_close(gradients_of(model, fast, two_batches()), gradients_of(model, step, two_batches()))
    assert sum(map(bool, fast.counts())) >= 2
    assert not [each for each in recwarn if "padding" in str(each.message)]


def test_a_layer_that_does_not_train_is_dropped_too():
    model = Stack()
    model.layers[1].requires_grad_(False)
    fast = Run(model)
    assert_same_step(model, model, fast, batch("right"))
    assert all(fast.counts()[1:])


def test_layers_whose_mask_tells_nothing_to_what_follows_are_left_alone():
    model = Stack(lambda mask: mask.bool()[:, None, None, :])
    fast = Run(model)
    ids, mask, labels = batch("right")
    torch.testing.assert_close(fast(ids, mask, labels), model(ids, mask, labels))
    assert not any(fast.counts())
    skips = [s.reason for g in fast.session.graphs for p in g.passes if p.name == "drop_padding" for s in p.skips]
    assert any("cannot be told which tokens are padding" in reason for reason in skips)


def test_what_reads_hidden_tokens_behind_the_layers_is_warned_of():
    model = Stack()
    fast = Run(lambda ids, mask: model.states(ids, mask).mean(1).sum())
    ids, mask, _ = batch("right")
    with pytest.warns(GlueWarning, match="may read them where eager reads what it has computed"):
        fast(ids, mask)


class Listing(Stack):
    """The last states, and those of the second layer."""

    def states(self, ids, mask):
        x, mask, kept = self.words(ids), self.mask_of(mask), []
        for layer in self.layers:
            x = layer(x, mask)
            kept.append(x)
        return x, kept[1]


def test_what_reads_hidden_tokens_of_any_states_is_warned_of():
    model = Listing()

    def step(ids, mask, labels):
        last, second = model.states(ids, mask)
        return nn.functional.cross_entropy(model.head(last).flatten(0, 1), labels.flatten()) + second.square().mean()

    with pytest.warns(
        GlueWarning, match=r"aten.mean.default: it is computed over all dimensions.*test_regions\.py:\d+"
    ):
        Run(step)(*batch("right"))


def test_all_states_behind_the_layers_are_of_the_tokens_that_count(recwarn):
    model = Listing()

    def step(ids, mask, labels):
        return sum(
            nn.functional.cross_entropy(model.head(x / x.norm(dim=-1, keepdim=True)).flatten(0, 1), labels.flatten())
            for x in model.states(ids, mask)
        )

    fast = Run(step)
    for kind in ("right", "left"):
        torch.testing.assert_close(gradients_of(model, fast, batch(kind)), gradients_of(model, step, batch(kind)))
    assert not [each for each in recwarn if "padding" in str(each.message)]


@pytest.mark.parametrize(
    "other",
    [lambda x: x.flatten(0, 1)[:, :3], lambda x: x.sum(-1), lambda x: x.view(*x.shape[:2], 2, 8).transpose(1, 2)],
)
def test_layers_with_results_that_are_no_rows_of_tokens_are_left_alone(other):
    class Both(Block):
        def forward(self, x, mask):
            x = super().forward(x, mask)
            return x, other(x)

    class Summed(Stack):
        def forward(self, ids, mask, labels):
            x, mask, penalty = self.words(ids), self.mask_of(mask), 0.0
            for layer in self.layers:
                x, each = layer(x, mask)
                penalty = penalty + each.square().mean()
            logits = self.head(x)
            return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) + penalty, logits

    model = Summed()
    model.layers = nn.ModuleList(Both() for _ in range(LAYERS))
    fast = Run(lambda *given: model(*given)[0])
    for kind in ("right", "left"):
        given = batch(kind)
        torch.testing.assert_close(
            gradients_of(model, fast, given), gradients_of(model, lambda *given: model(*given)[0], given)
        )
    assert not any(fast.counts())


def test_layers_under_different_padding_masks_are_warned_of():
    model = Stack()
    ids, mask, labels, _, other, targets = two_batches()

    def step(ids, mask, other, labels):
        return nn.functional.cross_entropy(model.head(model.states(ids, mask, other)).flatten(0, 1), labels.flatten())

    with pytest.warns(GlueWarning, match="under different padding masks"):
        Run(step)(ids, mask, other, labels.masked_fill((other == 0) | (targets == -100), -100))


def test_one_mask_for_all_layers_is_not(recwarn):
    model = Stack()
    fast = Run(model)
    for kind in ("right", "left"):
        assert_same_step(model, model, fast, batch(kind))
    assert not [each for each in recwarn if issubclass(each.category, GlueWarning)]


def test_labels_at_hidden_tokens_are_an_error_behind_the_layers():
    fast = Run(Stack())
    ids, mask, labels = batch("right")
    labels[2, -1] = 5
    with pytest.raises(ValueError, match="row 2 of a batch has labels that count"):
        fast(ids, mask, labels)
