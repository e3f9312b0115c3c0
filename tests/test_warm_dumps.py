"""A second process takes a training step from the caches, and dumps what the first one did."""

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys, torch
from torch._dynamo.utils import counters
from tests.passes.overlap_offload.models import Blocks
from tests.passes.share_layers import models
kind, options = sys.argv[1], json.loads(sys.argv[2])
torch.manual_seed(0)
if kind == "layers":
    model, x = models.Layers(models.layers(8)), models.ids()
else:
    model, x = Blocks(3), torch.ones(4, 8)
call = torch.compile(model, backend="glue", options=options)
results = models.step(model, call, x)
print(json.dumps([
    counters["aot_autograd"].get("autograd_cache_hit", 0),
    counters["inductor"].get("fxgraph_cache_miss", 0),
    [None if result is None else result.tolist() for result in results],
]))
"""


def process(caches, kind, options):
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(caches)}
    command = [sys.executable, "-c", SCRIPT, kind, json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def read(folder):
    """The summary, and the files that it lists."""
    summary = json.loads((folder / "summary.json").read_text())
    return summary, {name: (folder / name).read_text() for name in summary["files"]}


def without_times(summary):
    for graph in summary["graphs"]:
        del graph["from_cache"]
        for each in graph["passes"]:
            assert each.pop("ms") >= 0
    return summary


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options", "name"),
    [
        ("layers", {}, "share_layers"),
        ("layers", {"memory_budget": 10**4}, "plan_memory"),
        ("blocks", {"offload": "checkpoints"}, "overlap_offload"),
    ],
)
def test_a_second_process_hits_and_dumps_the_same(tmp_path, kind, options, name):
    folders = [tmp_path / "first", tmp_path / "second"]
    first, second = (process(tmp_path / "caches", kind, {**options, "dump": str(folder)}) for folder in folders)
    assert first[:2] == [0, 2]
    assert second[:2] == [1, 0]
    assert first[2] == second[2]
    (summary, files), (warm, warm_files) = map(read, folders)
    assert [graph["from_cache"] for graph in summary["graphs"]] == [False]
    assert [graph["from_cache"] for graph in warm["graphs"]] == [True]
    (changed,) = (each for each in summary["graphs"][0]["passes"] if each["name"] == name)
    assert changed["changed"]
    assert any(changed["counts"].values())
    assert without_times(warm) == without_times(summary)
    assert warm_files == files
