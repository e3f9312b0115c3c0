"""A rank that runs out of memory in a compiled layer ends the job with its reason, though others wait for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

engine, backend = sys.argv[1:]
step = 0


@torch.library.custom_op("failing_rank::work", mutates_args=())
def work(x: Tensor) -> Tensor:
    if dist.get_rank() == 1 and step == 2:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 things")
    return x.clone()


work.register_fake(torch.empty_like)
work.register_autograd(lambda context, gradient: gradient)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))

    def forward(self, x):
        return work(x @ self.weight).sin()


dist.init_process_group("gloo")
model = nn.Sequential(*[Layer() for _ in range(3)])
if backend != "eager":
    for layer in model:
        layer.compile(backend=backend, options={"compiler": "aot_eager"})
if engine == "fsdp2":
    mesh = dist.init_device_mesh("cpu", (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    call = fully_shard(model, mesh=mesh)
else:
    call = DistributedDataParallel(model)
for step in range(4):
    call(torch.ones(4 + step, 8)).sum().backward()
    print(f"rank {dist.get_rank()} has step {step}", flush=True)
"""


@pytest.mark.parametrize("backend", ["eager", "glue"])
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_rank_that_runs_out_of_memory_ends_the_job(tmp_path, engine, backend):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(tmp_path / "train.py"), engine, backend],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
    )
    assert done.returncode != 0
    assert "rank 1 has step 1" in done.stdout
    assert "has step 2" not in done.stdout
    assert "OutOfMemoryError: CUDA out of memory. Tried to allocate 3 things" in done.stderr
