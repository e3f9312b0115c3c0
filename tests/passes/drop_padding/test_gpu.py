"""Padded batches on a GPU: half precision beside eager's, and how often the host waits."""

from __future__ import annotations

import warnings

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from glue_compiler.backend import GlueBackend
from glue_compiler.report.session import Session

pytestmark = pytest.mark.gpu

ROWS, LENGTH = 4, 1024


def model_of(layers=5):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, use_cache=False,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).cuda().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(LENGTH // 4, LENGTH, (ROWS, 1), generator=generator)
    ids = torch.randint(512, (ROWS, LENGTH), generator=generator)
    mask = torch.arange(LENGTH) < lengths
    return ids.cuda(), mask.long().cuda(), ids.masked_fill(~mask, -100).cuda()


def gradients_of(model, step, given):
    model.zero_grad(set_to_none=True)
    step(*given).backward()
    return [weight.grad.float() for weight in model.parameters()]


@pytest.mark.parametrize("regions", ["auto", "whole"])
def test_gradients_are_those_of_eager_as_far_as_half_precision_goes(regions):
    model = model_of()

    def step(ids, mask, labels):
        return model(input_ids=ids, attention_mask=mask, labels=labels).loss

    session = Session()
    options = {"padding": "drop", "regions": regions, "strict": True}
    want = [gradients_of(model, step, batch(seed)) for seed in range(3)]
    model.bfloat16()
    rounded = [gradients_of(model, step, batch(seed)) for seed in range(3)]
    fast = torch.compile(step, backend=GlueBackend(session=session), options=options)
    found = [gradients_of(model, fast, batch(seed)) for seed in range(3)]
    for exact, eager, glue in zip(want, rounded, found, strict=True):
        for a, b, c in zip(exact, eager, glue, strict=True):
            assert (c - a).norm() <= 1.5 * (b - a).norm() + 0.01 * a.norm()
    counts = [p.counts for g in session.graphs for p in g.passes if p.name == "drop_padding"]
    assert any(each.get("packed") for each in counts)


def waits_of(layers):
    """Of the host for the device, in one step on a batch like those before."""
    model = model_of(layers).bfloat16()

    def step(ids, mask, labels):
        return model(input_ids=ids, attention_mask=mask, labels=labels).loss

    fast = torch.compile(step, backend="glue", options={"padding": "drop", "regions": "auto"})
    for seed in range(3):
        gradients_of(model, fast, batch(seed))
    given = batch(3)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            gradients_of(model, fast, given)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    # The mode's own warning, once a process, names synchronizing operations, too.
    return [str(each.message) for each in found if "called a synchronizing" in str(each.message)]


def test_the_host_waits_as_often_for_many_layers_as_for_few():
    assert len(waits_of(8)) == len(waits_of(5)) > 0
