"""Lightning: a compiled model inside of the LightningModule, and ``torch.compile`` around it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.stacks.tiny import LAYERS, causal_model, token_rows, transformers

lightning = pytest.importorskip("lightning")

pytestmark = [pytest.mark.slow, pytest.mark.stack]


class Causal(lightning.LightningModule):
    def __init__(self, compiles: bool) -> None:
        super().__init__()
        self.model = causal_model()
        if compiles:
            self.model.compile(backend="glue")
        self.losses: list[float] = []

    def training_step(self, batch: Any) -> Any:
        return self.model(**batch).loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def losses(module: Causal, called: Any = None) -> torch.Tensor:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=1, **quiet)
    batches = DataLoader(token_rows(16), batch_size=4, collate_fn=transformers.DataCollatorWithFlattening())
    trainer.fit(module if called is None else called, batches)
    return torch.tensor(module.losses)


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_both_places(report, where):
    expected = losses(Causal(compiles=False))
    torch._dynamo.reset()
    module = Causal(compiles=where == "inside")
    actual = losses(module, torch.compile(module, backend="glue") if where == "outside" else None)
    assert len(expected) == 4
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=0)
    report.assert_attention("packed", LAYERS, compiles=2)
