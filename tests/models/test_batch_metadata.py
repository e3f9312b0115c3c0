"""Other metadata of unmodified transformers models than packed positions: images of a vision tower, padding, masks."""

import copy

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

transformers = pytest.importorskip("transformers", minversion="5.0")

from transformers import modeling_flash_attention_utils as flash_utils  # noqa: E402
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen2_5_vl  # noqa: E402
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3_vl  # noqa: E402

GLUE = {"compiler": "aot_eager", "strict": True}
TINY = {"hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32, "patch_size": 7}


def host_reads(run):
    """How often a step asks for a number on the device; Dynamo's guards read Python's numbers so and do not count."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    return sum(event.name == "aten::_local_scalar_dense" and not in_a_guard(event) for event in profiler.events())


def in_a_guard(event):
    return event is not None and (event.name == "TorchDynamo Cache Lookup" or in_a_guard(event.cpu_parent))


def train(model, loss_input, *args, **kwargs):
    model.zero_grad()
    output = model(*args, **kwargs)
    hidden = getattr(output, "last_hidden_state", output[0])
    (hidden * loss_input[: len(hidden)]).sum().backward()
    return [hidden.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_same(got, want):
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


TOWERS = {
    "qwen2_5_vl": lambda depth: qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel(
        qwen2_5_vl.Qwen2_5_VLVisionConfig(**TINY, depth=depth, window_size=28, fullatt_block_indexes=[1, 3])
    ),
    "qwen3_vl": lambda depth: qwen3_vl.Qwen3VLVisionModel(
        qwen3_vl.Qwen3VLVisionConfig(**TINY, depth=depth, deepstack_visual_indexes=[], num_position_embeddings=64)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "whole"),
    [("qwen2_5_vl", False), pytest.param("qwen3_vl", True, marks=pytest.mark.slow)],
    ids=["layers", "whole"],
)
def test_a_vision_tower_reads_its_image_lengths_once_for_all_layers(name, whole):
    def reads(depth):
        torch.manual_seed(0)
        tower = TOWERS[name](depth).double()
        eager = copy.deepcopy(tower)
        for block in [tower] if whole else tower.blocks:
            block.compile(backend="glue", options=GLUE)
        config = tower.config
        size = config.in_channels * config.temporal_patch_size * config.patch_size**2
        for grid in ([[1, 4, 4], [1, 4, 8]], [[1, 8, 4], [1, 4, 4]]):
            grid = torch.tensor(grid)
            patches = torch.randn(int(grid.prod(-1).sum()), size, dtype=torch.double)
            weights = torch.randn(len(patches), config.hidden_size, dtype=torch.double)
            assert_same(train(tower, weights, patches, grid), train(eager, weights, patches, grid))
        return host_reads(lambda: train(tower, weights, patches, grid))

    assert reads(2) == reads(4)


def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=True, softmax_scale=None, **_):
    """Written out, because sdpa asks whether there are tokens, and their number is unbacked; kernels do not ask."""
    assert causal
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    token = torch.arange(q.shape[0])
    document = torch.bucketize(token, cu_seqlens_q[1:], right=True)
    distance = token[:, None] - token
    seen = (document[:, None] == document) & (distance >= 0) & (distance < max_seqlen_k)
    scores = torch.einsum("qhd,khd->hqk", q, k) * softmax_scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)


def dense(*_, **__):
    raise AssertionError("a batch with padding takes the varlen kernel")


@pytest.fixture
def flash_attention(monkeypatch):
    """transformers' flash_attention_2 path, with exact attention in place of the package's kernels."""
    stand_in = {
        "_loaded_implementation": "flash_attention_2",
        "_flash_fn": dense,
        "_flash_varlen_fn": varlen,
        "_pad_fn": flash_utils._pad_input,
        "_unpad_fn": flash_utils._unpad_input,
        "_process_flash_kwargs_fn": flash_utils._lazy_define_process_function(varlen),
    }
    for name, value in stand_in.items():
        monkeypatch.setattr(flash_utils, name, value)


def text_model(config_class, model_class, attention, layers=4, **more):
    config = config_class(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        use_cache=False,
        pad_token_id=0,
        **more,
    )
    model = model_class(config).double().train()
    model.config._attn_implementation = attention
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    "checkpointing", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "checkpointing"]
)
def test_padding_under_flash_attention_is_counted_once(flash_attention, checkpointing):
    model = text_model(transformers.LlamaConfig, transformers.LlamaModel, "flash_attention_2", layers=2)
    if checkpointing:
        model.gradient_checkpointing_enable()
    eager = copy.deepcopy(model)
    for layer in model.layers:
        layer.compile(backend="glue", options=GLUE)

    def batch(*lengths):
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        return {"input_ids": torch.randint(1, 64, mask.shape), "attention_mask": mask.long()}

    weights = torch.randn(2, 16, 32, dtype=torch.double)
    for lengths in ((9, 16), (16, 3), (1, 16)):
        inputs = batch(*lengths)
        assert_same(train(model, weights, **inputs), train(eager, weights, **inputs))
    inputs = batch(5, 16)
    per_layer = host_reads(lambda: train(eager, weights, **inputs))
    once = host_reads(lambda: train(model, weights, **inputs))
    calls = len(model.layers) * (2 if checkpointing else 1)
    assert per_layer - once == calls - 1, "one call reads the longest length, the others find it"


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["layers", "whole"])
def test_masks_of_two_kinds(whole):
    """gemma3's layers take one of two masks, which the model makes once; each layer here makes its own."""
    model = text_model(
        transformers.Gemma3TextConfig,
        transformers.Gemma3TextModel,
        "masks_of_two_kinds_test",
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    eager = copy.deepcopy(model)
    for module in [model] if whole else model.layers:
        module.compile(backend="glue", options=GLUE)
    weights = torch.randn(1, 16, 32, dtype=torch.double)

    def batch(*lengths):
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        return {"input_ids": torch.randint(1, 64, positions.shape), "position_ids": positions}

    for lengths in ((9, 7), (16,), (1, 12, 3)):
        inputs = batch(*lengths)
        assert_same(train(model, weights, **inputs), train(eager, weights, **inputs))
    inputs = batch(2, 14)
    assert host_reads(lambda: train(eager, weights, **inputs)) == len(model.layers)
    # Layer by layer too: neither kind of layer needs its mask, and what is left of both prologues is the same.
    assert host_reads(lambda: train(model, weights, **inputs)) == 1


def own_mask(module, query, key, value, _, *, scaling, position_ids, sliding_window=None, **__):
    documents = int((position_ids == 0).sum())
    starts = position_ids.flatten().argsort(stable=True)[:documents]
    token = torch.arange(query.shape[2])
    document = torch.bucketize(token, starts, right=True)
    distance = token[:, None] - token
    mask = (document[:, None] == document) & (distance >= 0)
    if sliding_window is not None:
        mask = mask & (distance < sliding_window)
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = (query @ key.mT * scaling).masked_fill(~mask, float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2), None


transformers.AttentionInterface.register("masks_of_two_kinds_test", own_mask)
