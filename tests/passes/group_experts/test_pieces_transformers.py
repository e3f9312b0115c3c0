"""jetmoe of the installed transformers, unmodified: parallel experts in its MLP and in its attention."""

import pytest
import torch

from tests.captured import compile_with_glue
from tests.passes.group_experts.piece_loops import assert_grouped

transformers = pytest.importorskip("transformers", minversion="5.0")


@pytest.mark.slow
def test_jetmoe_is_one_graph_without_a_number_read():
    config = transformers.JetMoeConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=2,
        num_key_value_heads=2,
        kv_channels=8,
        intermediate_size=12,
        max_position_embeddings=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        attn_implementation="eager",
    )
    model = transformers.JetMoeForCausalLM(config).eval().double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    ids = torch.randint(0, 64, (2, 7))
    target = torch.randn(2, 7, 64, dtype=torch.float64)

    def step(call):
        model.zero_grad()
        logits = call(input_ids=ids, use_cache=False).logits
        (logits * target).sum().backward()
        return [logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    expected = step(model)
    run = compile_with_glue(model, fullgraph=False, passes={"group_experts": True})
    actual = step(run.call)
    assert len(expected) == len(actual)
    for want, got in zip(expected, actual, strict=True):
        torch.testing.assert_close(got, want)
    assert_grouped(run, loops=8)  # two layers, in each two products of the MLP and two of the attention
    with torch.profiler.profile() as profile:
        step(run.call)
    names = {event.name for event in profile.events()}
    assert not names & {"aten::nonzero", "aten::_local_scalar_dense"}
