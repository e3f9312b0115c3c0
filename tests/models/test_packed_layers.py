"""Unmodified transformers models, compiled layer by layer, whose attention rebuilds the metadata of a packed batch."""

import copy

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

transformers = pytest.importorskip("transformers")

from demo.varlen_attention import packed_attention  # noqa: E402

transformers.AttentionInterface.register("packed_varlen_test", packed_attention)

LAYERS = 4
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "use_cache": False,
}
MODELS = {
    "llama": (transformers.LlamaConfig, transformers.LlamaModel),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3Model),
}


def build(name):
    config_class, model_class = MODELS[name]
    config = config_class(**SIZES)
    config._attn_implementation = "packed_varlen_test"
    return model_class(config).double().train()


def batch(*lengths, seed=0):
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    generator = torch.Generator().manual_seed(seed)
    return {"input_ids": torch.randint(0, 64, positions.shape, generator=generator), "position_ids": positions}


def step(model, inputs):
    model.zero_grad()
    hidden = model(**inputs).last_hidden_state
    target = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1), dtype=hidden.dtype)
    (hidden * target).sum().backward()
    return [hidden.detach(), *(p.grad.clone() for p in model.parameters())]


def reads(run):
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    counts = {event.key: event.count for event in profiler.key_averages()}
    return counts.get("aten::nonzero", 0), counts.get("aten::_local_scalar_dense", 0)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("name", ["llama", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_the_metadata_of_a_step_is_computed_once(name, checkpointing):
    eager = build(name)
    if checkpointing:
        eager.gradient_checkpointing_enable()
    model = copy.deepcopy(eager)
    for layer in model.layers:
        layer.compile(backend="glue", options={"compiler": "aot_eager", "strict": True})
    for inputs in (batch(7, 3, 14), batch(24), batch(1, 2, 21, seed=3)):
        for got, want in zip(step(model, inputs), step(eager, inputs), strict=True):
            torch.testing.assert_close(got, want)
    without = LAYERS * (2 if checkpointing else 1)
    assert reads(lambda: step(eager, batch(5, 19))) == (without, without)
    assert reads(lambda: step(model, batch(5, 19))) == (1, 1)
    # A collator's padding cut off: views of longer tensors.
    for lengths in ((5, 19), (8, 16)):
        cut = {name: tensor[:, :24] for name, tensor in batch(*lengths, 6).items()}
        for got, want in zip(step(model, cut), step(eager, cut), strict=True):
            torch.testing.assert_close(got, want)
    cut = {name: tensor[:, :24] for name, tensor in batch(10, 14, 6).items()}
    assert reads(lambda: step(model, cut)) == (1, 1)
    fresh = batch(6, 18)
    with torch.no_grad():
        model(**batch(9, 15))  # compiles
        assert reads(lambda: model(**fresh)) == (1, 1)
    # Log-probabilities first, then training on the same batch.
    assert reads(lambda: step(model, fresh)) == (0, 0)
