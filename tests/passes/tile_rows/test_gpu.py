"""tile_rows through Inductor on a GPU: transformers' models train as they do without it, in less memory."""

import pytest

from tests.passes.gpu_steps import Steps, assert_as_close

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("row", "options"),
    [("llama-lora", {}), ("llama-lora", {"offload": "checkpoints"}), ("llama-8b-lora", {"offload": "checkpoints"})],
)
def test_checkpointed_steps(row, options):
    steps = Steps(row, layers=3, tokens=8192)
    exact, whole = steps.exact(), steps.compiled(**options)
    tiled = steps.compiled(**options, passes={"tile_rows": True})
    assert tiled.counts("tile_rows")["tiles"] >= 8
    assert_as_close(tiled, exact, whole)
    assert tiled.peak < whole.peak
