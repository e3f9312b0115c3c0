"""peft's adapters, in a loop and in transformers' Trainer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.stacks.test_trainer import logged, trained
from tests.stacks.tiny import LAYERS, causal_model

peft = pytest.importorskip("peft")


def adapted(**changes: Any) -> Any:
    model = causal_model()
    return peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", **changes)
    )


@pytest.mark.parametrize("changes", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_adapters(tmp_path, report, changes):
    torch._dynamo.reset()
    expected = trained(tmp_path, False, model=adapted(**changes))
    actual = trained(tmp_path, True, model=adapted(**changes))
    torch.testing.assert_close(logged(actual), logged(expected))
    report.assert_attention("packed", LAYERS, compiles=2)


def test_checkpointed_adapters(tmp_path, report):
    expected = trained(tmp_path, False, model=adapted(), gradient_checkpointing=True)
    actual = trained(tmp_path, True, model=adapted(), gradient_checkpointing=True)
    torch.testing.assert_close(logged(actual), logged(expected))
    report.assert_attention("packed", LAYERS, compiles=2)
