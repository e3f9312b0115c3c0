"""share_layers through Inductor on a GPU: transformers' models train as they do without it, in the same memory."""

import pytest

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
