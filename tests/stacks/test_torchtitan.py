"""torchtitan's trainer with ``--compile.backend glue``, in one process and in two."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.stacks.tiny import texts, tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.stack]

ROOT = Path(__file__).parents[2]
LLAMA = ("llama3", "debugmodel")
EXPERTS = ("qwen3", "debugmodel_moe")
STEPS = 3
LOSS_ALONE = "what it is a loss of is not made in this graph"
"""The trainer compiles its loss by itself."""

if importlib.util.find_spec("torchtitan") is None:
    pytest.skip("needs torchtitan 0.2", allow_module_level=True)
if not importlib.metadata.version("torchtitan").startswith("0.2."):
    pytest.skip("later ones than torchtitan 0.2 have attention for a GPU alone", allow_module_level=True)


def logged(model: tuple[str, str], processes: int, options: str, folder: Path) -> torch.Tensor:
    """Loss and gradient norm of each step, from the trainer's log."""
    name, flavor = model
    launch = f"-m torch.distributed.run --nproc_per_node={processes} --rdzv_backend=c10d --rdzv_endpoint=localhost:0"
    settings = (
        f"--model.name={name} --model.flavor={flavor} --model.hf_assets_path=assets --training.dataset=c4_test"
        f" --training.seq_len=64 --training.local_batch_size=2 --training.steps={STEPS} --lr_scheduler.warmup_steps=1"
        " --training.mixed_precision_param=float32 --metrics.log_freq=1 --metrics.disable_color_printing"
        f" --debug.seed=0 {options}"
    )
    command = [sys.executable, *launch.split(), "-m", "tests.stacks.torchtitan_on_a_cpu", *settings.split()]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    variables = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HOME": str(folder / "cache"), "GLUE_STRICT": "1"}
    environment = {**os.environ, **variables}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-5000:]
    assert "Training completed" in done.stdout
    found = re.findall(r"step: +(\d+) +loss: +([\d.]+) +grad_norm: +([\d.]+)", done.stdout)
    return torch.tensor([[float(number) for number in each] for each in sorted(set(found))])


@pytest.fixture
def folder(tmp_path):
    """What the trainer reads: a tokenizer and, where it looks for its data set, one."""
    tokenizer().save_pretrained(tmp_path / "assets")
    data = tmp_path / "tests/assets/c4_test"
    data.mkdir(parents=True)
    texts(200).to_json(data / "data.json")
    return tmp_path


@pytest.mark.parametrize(
    ("model", "processes", "options"),
    [
        pytest.param(LLAMA, 1, "--activation_checkpoint.mode=full", id="one process"),
        pytest.param(LLAMA, 2, "--activation_checkpoint.selective_ac_option=op", id="FSDP2"),
        pytest.param(LLAMA, 2, "--parallelism.tensor_parallel_degree=2", id="tensor parallel"),
        pytest.param(EXPERTS, 2, "--parallelism.expert_parallel_degree=2", id="expert parallel"),
    ],
)
def test_trains_as_eager_does(model, processes, options, folder, report):
    expected = logged(model, processes, options, folder)
    actual = logged(model, processes, f"{options} --compile.enable --compile.backend=glue", folder)
    assert len(expected) == STEPS
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert not report.graph_breaks
    assert not report.left_to_eager
    losses = report.skips("chunk_loss")
    assert len(losses) == processes
    assert all(reason.startswith(LOSS_ALONE) for reason in losses), losses
    assert len(report.graphs) <= 5 * processes  # no block is compiled for each step
