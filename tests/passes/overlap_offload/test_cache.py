"""Inductor's caches on disk with offload: a second process hits, offloads too, and an option of the pass misses."""

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys, torch
from glue_compiler.ops.copy_engine import engine
from tests.passes.overlap_offload.models import Blocks, step
torch.manual_seed(0)
model, x = Blocks(3), torch.ones(4, 8)
call = torch.compile(model, backend="glue", options=json.loads(sys.argv[1]))
total = sum(t.double().sum().item() for t in step(call, model, x))
from torch._dynamo.utils import counters
print(json.dumps([
    counters["aot_autograd"].get("autograd_cache_hit", 0), counters["inductor"].get("fxgraph_cache_miss", 0),
    len(engine.pool._blocks), total,
]))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inductor_cache")

    def run(**options):
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder)}
        command = [sys.executable, "-c", SCRIPT, json.dumps(options)]
        result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)

    return run


@pytest.mark.slow
def test_hits_and_misses(run):
    hits, misses, blocks, total = run(offload="checkpoints")
    assert (hits, misses, blocks) == (0, 2, 2)
    assert run(offload="checkpoints") == [1, 0, 2, total]
    assert run(offload="checkpoints", pinned_limit=10**9)[:3] == [0, 2, 2]
    assert run()[:3] == [0, 2, 0]
