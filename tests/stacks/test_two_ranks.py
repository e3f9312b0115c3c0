"""accelerate and transformers' Trainer on two ranks of a launcher: DDP, and FSDP2 as accelerate prepares it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.stacks.tiny import transformers  # noqa: F401  skips where it, or datasets, is not installed

pytest.importorskip("accelerate")

pytestmark = [pytest.mark.slow, pytest.mark.stack]

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
LAYERS = 4
"""As many as regions ask for."""
ACCELERATE = """
import sys

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType, TorchDynamoPlugin
from torch.utils.data import DataLoader
from tests.stacks.tiny import causal_model, token_rows, transformers

folder, engine, compiles = sys.argv[1:]
sharded = FullyShardedDataParallelPlugin(
    fsdp_version=2,
    auto_wrap_policy="transformer_based_wrap",
    transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    activation_checkpointing=engine == "fsdp2, checkpointed",
)
compiled = {"backend": "glue", "use_regional_compilation": compiles == "layers"}
plugins = {"dynamo_plugin": TorchDynamoPlugin(**compiled)} if compiles != "eager" else {}
accelerator = Accelerator(cpu=True, **plugins)
if engine != "ddp":  # which accelerate ignores on a CPU
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, sharded
model = causal_model(num_hidden_layers={layers})
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
batches = DataLoader(token_rows(32), batch_size=4, collate_fn=transformers.DataCollatorWithFlattening())
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
assert any(hasattr(weight, "full_tensor") for weight in model.parameters()) == (engine != "ddp")
losses = []
for batch in batches:
    loss = model(**batch).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
torch.save(losses, f"{folder}/{accelerator.process_index}.pt")
"""
TRAINER = """
import sys

import torch
from tests.stacks.tiny import TRAINING, causal_model, logged, token_rows, transformers

folder, compiles = sys.argv[1:]
arguments = transformers.TrainingArguments(
    **{**TRAINING, "optim": "sgd", "learning_rate": 1.0, "output_dir": folder, "max_steps": 4, "ddp_backend": "gloo"},
    torch_compile_backend="glue" if compiles != "eager" else None,
)
trainer = transformers.Trainer(
    model=causal_model(num_hidden_layers={layers}),
    args=arguments,
    train_dataset=token_rows(64),
    data_collator=transformers.DataCollatorWithFlattening(),
)
trainer.train()
assert arguments.world_size == 2
# The Trainer logs the mean over ranks, on the first.
found = [*logged(trainer).tolist(), *trainer.model.model.norm.weight.tolist(), arguments.process_index]
torch.save(found, f"{folder}/{arguments.process_index}.pt")
"""


def results(folder: Path, script: str, *how: str) -> list[list[float]]:
    """What each rank saves."""
    (folder / "train.py").write_text(script.replace("{layers}", str(LAYERS)))
    command = [sys.executable, *TORCHRUN, str(folder / "train.py"), str(folder), *how]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def assert_equal(found: list[list[float]], expected: list[list[float]]) -> None:
    assert expected[0] != expected[1]  # each rank has its own batches
    for got, want in zip(found, expected, strict=True):
        assert len(want) >= 4
        assert got == pytest.approx(want, rel=1e-4, abs=1e-5)


def attentions(report: Any) -> set[int]:
    """Of all graphs with attention, how many they have without a mask."""
    counts = report.counts("specialize_attention")
    return {found for each in counts if (found := each.get("packed", 0) + each.get("listed", 0))}


@pytest.fixture(scope="module")
def eager(tmp_path_factory: Any) -> list[list[float]]:
    return results(tmp_path_factory.mktemp("eager"), ACCELERATE, "ddp", "eager")


@pytest.mark.parametrize(
    ("engine", "compiles", "regions", "layers"),
    [
        ("ddp", "whole", "whole", {LAYERS}),
        ("ddp", "layers", "whole", {1}),
        ("fsdp2", "whole", "auto", {1}),
        ("fsdp2", "whole", None, {1}),
        ("fsdp2", "layers", "whole", {1}),
        ("fsdp2, checkpointed", "whole", "auto", {1}),
        ("fsdp2, checkpointed", "layers", "auto", {1}),
        ("fsdp2, checkpointed", "layers", None, {1}),
        ("fsdp2, checkpointed", "layers", "whole", set()),
    ],
)
def test_accelerate(tmp_path, report, monkeypatch, eager, engine, compiles, regions, layers):
    """accelerate puts FSDP2's hooks inside of its checkpoints, whose bodies torch, and ``"whole"``, leave to Python."""
    if regions is not None:
        monkeypatch.setenv("GLUE_REGIONS", regions)
    assert_equal(results(tmp_path, ACCELERATE, engine, compiles), eager)
    assert attentions(report) == layers
    reason = "Without options={'regions': 'whole'} it is compiled"
    assert any(reason in each for each in report.left_to_eager) == (not layers)


def test_trainer(tmp_path, report):
    assert_equal(results(tmp_path, TRAINER, "glue"), results(tmp_path, TRAINER, "eager"))
    assert attentions(report) == {1}
