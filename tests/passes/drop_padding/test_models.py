"""Models of transformers on padded batches, against eager in fp64."""

import pytest
import torch
import transformers
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from glue_compiler.testing import assert_rewritten, assert_untouched, capture, run_pass
from tests.passes.drop_padding.padded_batches import WORDS, Layer, assert_same_step, batch, compiled
from tests.slow import slow_but
from tests.versions import MASKED_DOUBLE

SIZES = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
WIDE = {**SIZES, "intermediate_size": 24}
GROUPED = {**WIDE, "num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {
    "vocab_size": WORDS, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
MODELS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**GROUPED, "head_dim": 8}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "bert": ("BertForMaskedLM", "BertConfig", {**WIDE, **NO_DROPOUT}),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", WIDE),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**GROUPED, "head_dim": 8, "sliding_window": 4}),
}


def model_of(name, **settings):
    model, config, sizes = MODELS[name]
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**{**sizes, **settings})).double().train()


def step_of(model):
    def step(ids, mask, labels):
        found = model(input_ids=ids, attention_mask=mask, labels=labels, **uses_no_cache(model))
        return found.loss, found.logits

    return step


def uses_no_cache(model):
    return {"use_cache": False} if hasattr(model.config, "use_cache") and not is_bidirectional(model) else {}


def is_bidirectional(model):
    return "MaskedLM" in type(model).__name__


@pytest.mark.parametrize("name", slow_but(("qwen3",), MODELS))
def test_models(name):
    model = model_of(name)
    step = step_of(model)
    graph = capture(step, *batch("right"))[0]
    assert_rewritten(run_pass(graph, "drop_padding", padding="drop"))
    fast = compiled(step)
    for kind in ("right", "left", "holes", "none"):
        assert_same_step(model, step, fast, batch(kind))


@pytest.mark.slow
def test_other_lengths_compile_once_more():
    model = model_of("qwen3")
    step = step_of(model)
    fast = compiled(step)
    counters.clear()
    for kind, rows, length in (("right", 3, 10), ("left", 4, 12), ("holes", 2, 17), ("none", 5, 9)):
        assert_same_step(model, step, fast, batch(kind, rows, length))
    assert counters["stats"]["unique_graphs"] <= 2


@pytest.mark.parametrize(
    "compiler", ["aot_eager", pytest.param("inductor", marks=(MASKED_DOUBLE.mark, pytest.mark.slow))]
)
def test_checkpoints(compiler):
    model = model_of("llama")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    step = step_of(model)
    (graph,) = capture(step, *batch("right"))
    assert_rewritten(run_pass(graph, "drop_padding", padding="drop"))
    fast = compiled(step, compiler)
    for kind in ("right", "holes"):
        assert_same_step(model, step, fast, batch(kind))


@pytest.mark.slow
def test_a_model_that_is_given_embeddings():
    model = model_of("llama")
    words = model.get_input_embeddings()

    def step(ids, mask, labels):
        found = model(inputs_embeds=words(ids).detach(), attention_mask=mask, labels=labels, use_cache=False)
        return found.loss, found.logits

    def given(embeddings, mask, labels):
        return model(inputs_embeds=embeddings, attention_mask=mask, labels=labels, use_cache=False).loss

    ids, mask, labels = batch("left")
    (graph,) = capture(given, words(ids).detach(), mask, labels)
    assert_rewritten(run_pass(graph, "drop_padding", padding="drop"))
    assert_same_step(model, step, compiled(step), (ids, mask, labels))
    embeddings = words(ids).detach().requires_grad_()
    gradients = [
        torch.autograd.grad(function(embeddings, mask, labels), embeddings)[0] for function in (given, compiled(given))
    ]
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.slow
def test_a_classifier_of_the_last_token():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**GROUPED, num_labels=3)
    model = transformers.LlamaForSequenceClassification(config).double()
    ids, mask, _ = batch("right")
    ids = ids.clamp(min=3).masked_fill(mask == 0, 0)

    def step(ids, mask):
        return model(input_ids=ids, attention_mask=mask, use_cache=False).logits

    (graph,) = capture(step, ids, mask)
    assert_rewritten(run_pass(graph, "drop_padding", padding="drop"))
    torch.testing.assert_close(compiled(step)(ids, mask), step(ids, mask))


def test_experts_that_padding_reaches_are_left_alone():
    experts = {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**GROUPED, **experts))
    for graph in capture(step_of(model), *batch("right")):
        result = run_pass(graph, "drop_padding", padding="drop")
        assert_untouched(result)
        assert result.skip_reasons


@pytest.mark.slow
def test_autocast():
    model = model_of("llama").float()
    inner = step_of(model)

    def step(*given):
        with torch.autocast("cpu", torch.bfloat16):
            return inner(*given)

    (graph,) = capture(step, *batch("right"))
    assert_rewritten(run_pass(graph, "drop_padding", padding="drop"))
    ids, mask, labels = batch("right")
    (loss, logits), (other_loss, other_logits) = step(ids, mask, labels), compiled(step)(ids, mask, labels)
    assert (other_logits.dtype, other_loss.dtype) == (logits.dtype, loss.dtype)
    torch.testing.assert_close(other_loss, loss, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(other_logits[mask == 1], logits[mask == 1], rtol=3e-2, atol=3e-2)


class Three(Layer):
    def forward(self, ids, mask, labels):
        hidden = checkpoint(self.attended, self.words(ids), mask, use_reentrant=False)
        hidden = self.attended(hidden, mask)
        hidden = checkpoint(self.attended, hidden, mask, use_reentrant=False)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten()), hidden


def test_a_layer_between_checkpoints():
    """An operand of the second is all that uses the attention of the layer in front of it."""
    model = Three()
    assert_same_step(model, model, compiled(model), batch("holes"))


class Two(Layer):
    def attended(self, x, mask):
        _ = x.shape, x.transpose(1, 2).size()  # bodies keep what nothing uses
        return super().attended(x, mask)

    def forward(self, ids, mask, labels):
        hidden = self.words(ids)
        for _ in range(2):
            hidden = checkpoint(self.attended, hidden, mask, use_reentrant=False)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten()), hidden


@pytest.mark.slow
def test_sizes_that_nothing_uses_of_lengths_that_vary():
    model = Two()
    fast = compiled(model)
    for kind, length in (("holes", 10), ("right", 12), ("left", 14)):
        assert_same_step(model, model, fast, batch(kind, length=length))
