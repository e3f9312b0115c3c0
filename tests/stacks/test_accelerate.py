"""accelerate: a loop of one's own with an ``Accelerator``, and the same script under ``accelerate launch``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.stacks.tiny import LAYERS

pytest.importorskip("accelerate")

pytestmark = [pytest.mark.slow, pytest.mark.stack]

LAUNCH = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes=1")
SCRIPT = """
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from tests.stacks.tiny import causal_model, token_rows, transformers

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2{arguments})
model = causal_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
batches = DataLoader(token_rows(16), batch_size=4, collate_fn=transformers.DataCollatorWithFlattening())
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
losses = []
for batch in batches:
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
torch.save(losses, sys.argv[1])
"""


def losses(folder: Path, arguments: str, *launcher: str) -> list[float]:
    script, result = folder / "train.py", folder / "losses.pt"
    script.write_text(SCRIPT.replace("{arguments}", arguments))
    command = [sys.executable, *launcher, str(script), str(result)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)
    assert done.returncode == 0, done.stderr
    return torch.load(result)


@pytest.mark.parametrize(
    ("arguments", "launcher", "compiles"),
    [
        (', dynamo_backend="glue"', (), 2),
        # The launcher's default is dynamic=False: a compile for each length. With dynamic=True Dynamo hands its first
        # graph on, and begins again.
        ("", (*LAUNCH, "--dynamo_backend=glue", "--dynamo_use_dynamic"), 2),
    ],
    ids=["script", "launch"],
)
def test_the_name_in_one_word(tmp_path, report, arguments, launcher, compiles):
    expected = losses(tmp_path, "")
    actual = losses(tmp_path, arguments, *launcher)
    assert len(expected) == 4
    assert actual == pytest.approx(expected, rel=1e-5)
    report.assert_attention("packed", LAYERS, compiles)
