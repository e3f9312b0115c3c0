"""flash_attention_2-style attention with position_ids alone: one graph, and the results of eager."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import glue_compiler.ops  # noqa: F401  registers torch.ops.glue
from tests.captured import compile_with_glue, count

transformers = pytest.importorskip("transformers")
flash = pytest.importorskip("transformers.modeling_flash_attention_utils")

PACKED = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1]])
OTHER = torch.tensor([[0, 1, 0, 1, 2, 3, 4, 0, 0]])
ROW = torch.arange(9)[None]
NAME = "reference_flash"


def one_length(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1)):
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=True)
    return out.transpose(1, 2)


def several_lengths(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1),
):  # fmt: skip
    return torch.ops.glue.varlen_attention(q, k, v, cu_seqlens_q, q.shape[0], causal, -1, softmax_scale)[0]


def attend(module, query, key, value, attention_mask, scaling=None, position_ids=None, **_):
    """What transformers does for flash_attention_2, down to the kernels."""
    out = flash._flash_attention_forward(
        *(tensor.transpose(1, 2) for tensor in (query, key, value)),
        attention_mask,
        query_length=query.shape[2],
        is_causal=module.is_causal,
        softmax_scale=scaling,
        position_ids=position_ids,
        attn_implementation=NAME,
    )
    return out, None


@pytest.fixture
def model(monkeypatch):
    """A tiny Qwen3 with the kernels above in place of the flash-attn package's."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    loaded = {
        "_flash_fn": one_length,
        "_flash_varlen_fn": several_lengths,
        "_pad_fn": flash._pad_input,
        "_unpad_fn": flash._unpad_input,
        "_process_flash_kwargs_fn": flash._lazy_define_process_function(several_lengths),
        "_flash_with_kvcache_fn": None,  # and below: not in transformers 5.17
        "_process_with_kvcache_kwargs_fn": dict,
        "_loaded_implementation": NAME,
    }
    for name, value in loaded.items():
        monkeypatch.setattr(flash, name, value, raising=False)
    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, flash_attention_mask)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.Qwen3Config(**sizes, num_hidden_layers=2, vocab_size=64, head_dim=8, use_cache=False)
    model = transformers.Qwen3ForCausalLM(config)
    model.config._attn_implementation = NAME
    return model


def step(model, call, positions):
    torch.manual_seed(1)
    model.zero_grad()
    ids = torch.randint(0, 64, positions.shape) if positions is not None else torch.randint(0, 64, ROW.shape)
    logits = call(ids, position_ids=positions).logits
    (logits * torch.randn_like(logits)).sum().backward()
    return [logits.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.slow
def test_packed_and_unpacked_batches_are_one_graph_each(model):
    run = compile_with_glue(model)
    for positions in (PACKED, ROW, OTHER, ROW + 3, None):
        for got, want in zip(step(model, run.call, positions), step(model, model, positions), strict=True):
            torch.testing.assert_close(got, want)
    # Packed, not packed, and the one in which the model makes the positions.
    assert [count(graph, torch.ops.glue.varlen_attention) for graph in run.graphs] == [2, 0, 0]
    assert not run.session.capture_events


@pytest.mark.slow
def test_several_rows_ask_nothing(model):
    run = compile_with_glue(model)
    for positions in (ROW.repeat(2, 1), PACKED.repeat(2, 1)):
        for got, want in zip(step(model, run.call, positions), step(model, model, positions), strict=True):
            torch.testing.assert_close(got, want)
    assert len(run.graphs) == 1


@pytest.mark.slow
def test_with_checkpointing(model):
    model.train().gradient_checkpointing_enable()
    run = compile_with_glue(model)
    for positions in (PACKED, ROW):
        for got, want in zip(step(model, run.call, positions), step(model, model, positions), strict=True):
            torch.testing.assert_close(got, want)
    assert len(run.graphs) == 2
