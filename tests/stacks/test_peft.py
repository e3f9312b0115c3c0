"""peft's adapters, in a loop and in transformers' Trainer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.stacks.test_trainer import trained
from tests.stacks.tiny import LAYERS, causal_model, logged

peft = pytest.importorskip("peft")

pytestmark = [pytest.mark.slow, pytest.mark.stack]


def adapted(**changes: Any) -> Any:
    model = causal_model()
    config = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **changes}
    return peft.get_peft_model(model, peft.LoraConfig(**config))


def assert_trains_as_eager(folder: Any, make: Any = adapted, **changes: Any) -> Any:
    expected = trained(folder, False, model=make(), **changes)
    actual = trained(folder, True, model=make(), **changes)
    torch.testing.assert_close(logged(actual), logged(expected))
    return actual


@pytest.mark.parametrize("checkpointing", [False, True])
def test_lora(tmp_path, report, checkpointing):
    """With checkpointing a hook of peft's makes the embedding's output ask for a gradient."""
    assert_trains_as_eager(tmp_path, gradient_checkpointing=checkpointing)
    report.assert_attention("packed", LAYERS, compiles=2)


def test_adapters_that_are_loaded_again(tmp_path, report):
    assert_trains_as_eager(tmp_path).save_model(str(tmp_path / "adapters"))

    def resumed() -> Any:
        return peft.PeftModel.from_pretrained(causal_model(), str(tmp_path / "adapters"), is_trainable=True)

    assert_trains_as_eager(tmp_path, resumed)
    report.assert_attention("packed", LAYERS, compiles=4)


def test_dora(tmp_path, report):
    """peft's code asks for the module of a class, at which torch.compile ends the graph for every backend."""

    def dora() -> Any:
        return adapted(use_dora=True, target_modules=["q_proj"])

    assert_trains_as_eager(tmp_path, dora)
    assert report.graphs
    assert all("startswith" in reason for reason in report.graph_breaks)
