"""Inductor's caches on disk: a second process hits them, and a change of glue misses them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import glue_compiler.passes.hoist_metadata as hoist_metadata

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parent.parent

SCRIPT = """
import json, sys, torch
from pathlib import Path
options, touched = json.loads(sys.argv[1]), sys.argv[2]
if touched:
    read = Path.read_bytes
    Path.read_bytes = lambda self: read(self) + (b"# changed" if str(self) == touched else b"")

def fn(x, positions, weight):
    for _ in range(2):
        n = torch.nonzero(positions == 0).shape[0]
        x = torch.tanh(x @ weight) / n
    return x

from torch._dynamo.utils import counters
x, weight = torch.ones(4, 4), torch.ones(4, 4, requires_grad=True)
torch.compile(fn, backend="glue", options=options)(x, torch.tensor([0, 1, 0, 1]), weight).sum().backward()
caches = {**counters["inductor"], **counters["aot_autograd"]}
print(json.dumps({name: count for name, count in caches.items() if "cache" in name}))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inductor_cache")

    def run(options=None, touched=""):
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder)}
        command = [sys.executable, "-c", SCRIPT, json.dumps(options or {}), str(touched)]
        result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)

    assert run()["fxgraph_cache_miss"] == 3  # batch prologue, forward and backward: fills the cache
    return run


def hits(counters):
    return counters.get("autograd_cache_hit", 0), counters.get("fxgraph_cache_miss", 0)


def test_a_second_process_hits(run):
    assert hits(run()) == (2, 0)


# Which options, passes and files are in the key: tests/pipeline/test_run.py and test_sources.py ask, without processes.
def test_an_option_of_a_pass_misses(run):
    assert hits(run({"hoist_limit": 5})) == (0, 3)


def test_a_pass_switched_off_misses(run):
    assert hits(run({"passes": {"memoize_metadata": False}})) == (0, 2)


@pytest.mark.parametrize("source", ["rewrite.py", "../../glue_compiler/fx/effects.py"])
def test_a_changed_source_misses(run, source):
    assert hits(run(touched=(Path(hoist_metadata.__file__).parent / source).resolve())) == (0, 3)


def test_what_no_pass_reads_hits(run, tmp_path):
    assert hits(run({"dump": str(tmp_path)})) == (2, 0)


ARTIFACTS = """
import sys, torch
from pathlib import Path
from torch._dynamo.utils import counters
from tests.capture.test_layer_regions import Checkpointed, WithHead, ids, layers

file = Path(sys.argv[1])
if file.exists():
    torch.compiler.load_cache_artifacts(file.read_bytes())
torch.manual_seed(0)
torch.compile(WithHead(layers(4, Checkpointed)), backend="glue")(ids()).backward()
if not file.exists():
    data, _ = torch.compiler.save_cache_artifacts()
    file.write_bytes(data)
print(counters["aot_autograd"]["total"], counters["aot_autograd"]["autograd_cache_hit"])
"""


def test_a_machine_with_the_artefacts_of_another_compiles_nothing(tmp_path):
    found = []
    for machine in ("first", "second"):
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / machine), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", ARTIFACTS, str(tmp_path / "artifacts")]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        found.append([int(each) for each in done.stdout.split()[-2:]])
    (total, hits), again = found
    assert hits == 0 < total
    assert again == [total, total]
