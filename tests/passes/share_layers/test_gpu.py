"""share_layers through Inductor on a GPU: transformers' models train as they do without it, in the same memory."""

import pytest
import torch

from benchmarks.checkpoint_decoder import Decoder, Shape, batch_of
from tests.captured import compile_and_keep
from tests.passes.gpu_steps import Steps, assert_as_close

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ("qwen3-bf16", {}),
        ("gemma3-1b", {}),
        ("llama-lora", {}),
        ("llama-lora", {"offload": "checkpoints"}),
        ("llama-lora", {"kernels": "torch"}),
        ("qwen3-moe", {}),
    ],
)
def test_steps_are_as_close_as_unshared_ones(row, options):
    steps = Steps(row, layers=12 if row == "gemma3-1b" else 6, tokens=2048)
    exact, unshared = steps.exact(), steps.compiled(**options, passes={"share_layers": False})
    shared = steps.compiled(**options)
    assert shared.counts("share_layers")["calls"] >= 4
    assert_as_close(shared, exact, unshared)
    assert shared.peak <= 1.02 * unshared.peak


@pytest.mark.parametrize("options", [{}, {"offload": "checkpoints"}])
def test_checkpointed_attention_runs_without_the_generators_that_torch_keeps_for_it(options):
    """Causal attention of torch's own is tagged as random: AOTAutograd gives both graphs a generator for each."""
    layers, device = 8, torch.device("cuda")
    shape = Shape(256, 512, 4, 2, 64, layers, 2, 512)
    torch.manual_seed(0)
    model, batch = Decoder(shape, device), batch_of(shape, device)
    found = []
    for passes in ({"share_layers": False}, {}):
        torch._dynamo.reset()
        run = compile_and_keep(model, compiler="inductor", **options, passes=passes)
        run.call(*batch).backward()
        found.append([weight.grad.double() for weight in model.parameters() if weight.grad is not None])
        model.zero_grad()
    (report,) = (each for each in run.report.passes if each.name == "share_layers")
    assert report.counts["states"] == layers
    assert report.counts["calls"] >= layers
    assert len(found[0]) == len(found[1])
    for unshared, shared in zip(*found, strict=True):
        assert (shared - unshared).norm() <= 0.02 * unshared.norm()
