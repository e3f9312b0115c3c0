"""TRL's trainers: supervised packed in all ways, preferences, and reinforcement with generation in between."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.stacks.tiny import LAYERS, TRAINING, causal_model, datasets, logged, texts, tokenizer, transformers, words

trl = pytest.importorskip("trl")

pytestmark = [pytest.mark.slow, pytest.mark.stack]

STEPS = 4
# Of the loss that TRL computes in chunks: torch.compile ends the graph at its products into slices of a buffer.
CHUNKED_LOSS = ("Attempted to call op with non-contiguous `out=` tensor",)
COMMON = {**TRAINING, "bf16": False, "max_steps": STEPS}


def trained(trainer: Any) -> tuple[torch.Tensor, list[dict[str, torch.Tensor | None]]]:
    """The losses, and the gradients of each step."""
    gradients = []

    class Recorder(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            found = given["model"].named_parameters()
            gradients.append({name: None if p.grad is None else p.grad.clone() for name, p in found})

    trainer.add_callback(Recorder())
    trainer.train()
    return logged(trainer), gradients


def assert_trains_as_eager(build: Any, **changes: Any) -> None:
    """In losses, gradients, and which are None; ``build`` makes a trainer from what its configuration takes."""
    (expected, wanted), (actual, found) = (
        trained(build(**{**COMMON, **how, **changes})) for how in ({}, {"torch_compile_backend": "glue"})
    )
    assert len(expected) == len(wanted) == STEPS
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    for step, other in zip(wanted, found, strict=True):
        names = {name.removeprefix("_orig_mod."): gradient for name, gradient in other.items()}
        assert {name for name, gradient in step.items() if gradient is None} == {
            name for name, gradient in names.items() if gradient is None
        }
        for name, gradient in step.items():
            if gradient is not None:
                torch.testing.assert_close(names[name], gradient, rtol=1e-3, atol=1e-4, msg=name)


def rows_of(*names: str) -> Any:
    generator = random.Random(0)
    return datasets.Dataset.from_list([{name: words(generator, 3, 8) for name in names} for _ in range(16)])


def supervised(folder: Any, data: Any, *, layers: int = LAYERS, **given: Any) -> Any:
    def build(**changes: Any) -> Any:
        torch._dynamo.reset()
        torch.manual_seed(0)
        return trl.SFTTrainer(
            model=causal_model(num_hidden_layers=layers),
            args=trl.SFTConfig(output_dir=str(folder), **{"max_length": 48, **changes}),
            train_dataset=data,
            processing_class=tokenizer(),
            **given,
        )

    return build


def preferences(folder: Any, layers: int = LAYERS) -> Any:
    def build(**changes: Any) -> Any:
        torch._dynamo.reset()
        return trl.DPOTrainer(
            model=causal_model(num_hidden_layers=layers),
            ref_model=causal_model(seed=1, num_hidden_layers=layers),
            # TRL switches checkpointing off and on around the reference, and each time transformers adds a hook, for
            # which every backend compiles again.
            args=trl.DPOConfig(output_dir=str(folder), max_length=48, gradient_checkpointing=False, **changes),
            train_dataset=rows_of("prompt", "chosen", "rejected"),
            processing_class=tokenizer(),
        )

    return build


def rewards(folder: Any, layers: int = LAYERS) -> Any:
    def build(**changes: Any) -> Any:
        torch._dynamo.reset()
        torch.manual_seed(0)
        config = causal_model(num_labels=1, num_hidden_layers=layers).config
        return trl.RewardTrainer(
            model=transformers.LlamaForSequenceClassification(config),
            args=trl.RewardConfig(output_dir=str(folder), max_length=48, gradient_checkpointing=False, **changes),
            train_dataset=rows_of("chosen", "rejected"),
            processing_class=tokenizer(),
        )

    return build


def reinforcement(folder: Any, layers: int = LAYERS) -> Any:
    def count_of_words(completions: list[str], **_: Any) -> list[float]:
        return [float(text.count("w1")) for text in completions]

    def build(**changes: Any) -> Any:
        torch._dynamo.reset()
        torch.manual_seed(0)
        return trl.GRPOTrainer(
            model=causal_model(num_hidden_layers=layers),
            reward_funcs=count_of_words,
            args=trl.GRPOConfig(
                output_dir=str(folder),
                num_generations=2,
                max_completion_length=6,
                gradient_checkpointing=False,  # as above
                **changes,
            ),
            train_dataset=rows_of("prompt"),
            processing_class=tokenizer(),
        )

    return build


@pytest.mark.parametrize(
    ("changes", "compiles"),
    [
        ({"packing": True, "packing_strategy": "bfd"}, 2),
        ({"packing": True, "packing_strategy": "wrapped"}, 1),
        ({"padding_free": True, "max_length": None}, 2),
    ],
    ids=["bfd", "wrapped", "padding_free"],
)
def test_supervised(tmp_path, report, changes, compiles):
    assert_trains_as_eager(supervised(tmp_path, texts(160 if "packing" in changes else 16)), **changes)
    report.assert_attention("packed", LAYERS, compiles, breaks=CHUNKED_LOSS)


def test_the_loss_of_completions_only(tmp_path, report):
    generator = random.Random(0)
    rows = [{"prompt": words(generator, 3, 8), "completion": " " + words(generator, 3, 8)} for _ in range(16)]
    data = datasets.Dataset.from_list(rows)
    assert_trains_as_eager(supervised(tmp_path, data), completion_only_loss=True)
    report.assert_attention("packed", LAYERS, compiles=2, breaks=CHUNKED_LOSS)


def test_preferences(tmp_path, report):
    assert_trains_as_eager(preferences(tmp_path))
    # Two of the model that is trained, and two of the reference, without gradients.
    report.assert_attention("packed", LAYERS, compiles=4, breaks=CHUNKED_LOSS)


def test_judgements_of_single_completions(tmp_path, report):
    """KTO: the completions, and for the divergence those of the next rows of the batch."""
    generator = random.Random(0)
    rows = [
        {"prompt": words(generator, 3, 8), "completion": " " + words(generator, 3, 8), "label": place % 3 > 0}
        for place in range(16)
    ]

    def build(**changes: Any) -> Any:
        torch._dynamo.reset()
        return trl.KTOTrainer(
            model=causal_model(),
            ref_model=causal_model(seed=1),
            args=trl.KTOConfig(output_dir=str(tmp_path), max_length=48, gradient_checkpointing=False, **changes),
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer(),
        )

    assert_trains_as_eager(build)
    report.assert_attention("packed", LAYERS, compiles=4, breaks=CHUNKED_LOSS)


def test_rewards(tmp_path, report):
    """One number for each row: a head that chunk_loss has nothing to do with."""
    assert_trains_as_eager(rewards(tmp_path))
    report.assert_attention("packed", LAYERS, compiles=2)


def test_reinforcement(tmp_path, report):
    assert_trains_as_eager(reinforcement(tmp_path))
    report.assert_attention("packed", LAYERS, compiles=2, breaks=CHUNKED_LOSS)


def adapters() -> Any:
    return pytest.importorskip("peft").LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0)


PADDED = {
    "supervised": lambda folder: supervised(folder, texts(16), layers=5, peft_config=adapters()),
    "preferences": lambda folder: preferences(folder, layers=5),
    "rewards": lambda folder: rewards(folder, layers=5),
    "reinforcement": lambda folder: reinforcement(folder, layers=5),
}


@pytest.mark.parametrize("regions", ["auto", "whole"])
@pytest.mark.parametrize("name", PADDED)
def test_padding_is_dropped(tmp_path, report, monkeypatch, name, regions):
    monkeypatch.setenv("GLUE_PADDING", "drop")
    monkeypatch.setenv("GLUE_REGIONS", regions)
    assert_trains_as_eager(PADDED[name](tmp_path))
    packed = [counts["packed"] for counts in report.counts("drop_padding") if "packed" in counts]
    assert set(packed) == {1 if regions == "auto" else 5}
    assert not report.attention, "some layer has seen padding"


@pytest.mark.parametrize("name", ["preferences", "reinforcement"])
def test_prompts_are_computed_once(tmp_path, report, monkeypatch, name):
    monkeypatch.setenv("GLUE_PADDING", "drop")
    monkeypatch.setenv("GLUE_PREFIX", "share")
    assert_trains_as_eager(PADDED[name](tmp_path))
    assert any(counts.get("shared_prefixes") for counts in report.counts("drop_padding"))
