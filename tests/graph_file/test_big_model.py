"""A graph of a 28-layer model as a fixture without the model."""

import json
import subprocess
import sys

import pytest
import torch

pytest.importorskip("peft")

from demo.packed_model import packed_batches, packed_qwen3
from glue_compiler.testing import capture, run_pass, save

SCRIPT = """
import json, sys
from glue_compiler.testing import load, run_pass
result = run_pass(load(sys.argv[1]), "hoist_metadata")
print(json.dumps([result.counts, result.rewrites, sorted({name.partition(".")[0] for name in sys.modules})]))
"""


def in_a_fresh_process(path):
    result = subprocess.run([sys.executable, "-c", SCRIPT, path], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [2, 28])
def test_capture_save_load_and_the_same_counts(layers, tmp_path):
    model = packed_qwen3(layers=layers, checkpointing=False, lora=False, hidden=64)
    (batch,) = packed_batches(1, tokens=64, documents=[bytes(range(40, 60)), bytes(range(40, 57))])
    with torch.no_grad():
        (graph,) = capture(model, **batch)
    save(graph, tmp_path / "graph.json.gz")
    result = run_pass(graph, "hoist_metadata")
    counts, rewrites, modules = in_a_fresh_process(tmp_path / "graph.json.gz")
    assert counts == result.counts
    assert rewrites == result.rewrites
    assert counts["syncs_removed"] == 2 * (layers - 1)
    assert not {"transformers", "peft", "demo"} & set(modules)
    assert (tmp_path / "graph.json.gz").stat().st_size < 20_000 * layers
