"""transformers' Trainer, told no more than ``torch_compile_backend="glue"``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.stacks.tiny import LAYERS, TRAINING, causal_model, logged, token_rows, tokenizer, transformers

pytestmark = [pytest.mark.slow, pytest.mark.stack]

STEPS = 6
ROWS = 4 * STEPS


def arguments(folder: Any, compiled: bool, **changes: Any) -> Any:
    # Not AdamW, which moves a weight just as far by a gradient that is no more than rounding.
    optimizer = {"optim": "sgd", "learning_rate": 1.0}
    defaults = {**TRAINING, **optimizer, "output_dir": str(folder), "max_steps": STEPS}
    if compiled:
        defaults["torch_compile_backend"] = "glue"
    return transformers.TrainingArguments(**{**defaults, **changes})


def packed(**_: Any) -> Any:
    return transformers.DataCollatorWithFlattening()


def padded(**_: Any) -> Any:
    return transformers.DataCollatorForLanguageModeling(tokenizer(), mlm=False)


def trained(folder: Any, compiled: bool, collator: Any = packed, model: Any = None, **changes: Any) -> Any:
    torch._dynamo.reset()
    trainer = transformers.Trainer(
        model=causal_model() if model is None else model,
        args=arguments(folder, compiled, **changes),
        train_dataset=token_rows(ROWS * changes.get("gradient_accumulation_steps", 1)),
        data_collator=collator(),
        **({"eval_dataset": token_rows(8, 5, 16)} if "eval_strategy" in changes else {}),
    )
    trainer.train()
    return trainer


def assert_trains_as_eager(folder: Any, rtol: float = 1e-5, **changes: Any) -> Any:
    """The losses of all steps and the weights after them; returns the trainer that glue compiled for."""
    expected, actual = trained(folder, False, **changes), trained(folder, True, **changes)
    assert len(logged(expected)) == STEPS
    torch.testing.assert_close(logged(actual), logged(expected), rtol=rtol, atol=0)
    weights = expected.model.state_dict()
    assert actual.model.state_dict().keys() == weights.keys()
    if rtol <= 1e-5:
        for name, weight in actual.model.state_dict().items():
            torch.testing.assert_close(weight, weights[name], rtol=1e-4, atol=1e-5)
    return actual


def test_packed_batches(tmp_path, report):
    assert_trains_as_eager(tmp_path)
    report.assert_attention("packed", LAYERS, compiles=2)


def test_padded_batches(tmp_path, report):
    assert_trains_as_eager(tmp_path, collator=padded)
    report.assert_attention("packed", LAYERS, compiles=2)


def test_accumulated_gradients(tmp_path, report):
    assert_trains_as_eager(tmp_path, gradient_accumulation_steps=2)
    report.assert_attention("packed", LAYERS, compiles=2)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(tmp_path, report, use_reentrant):
    assert_trains_as_eager(
        tmp_path, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": use_reentrant}
    )
    report.assert_attention("packed", LAYERS, compiles=2)


@pytest.mark.parametrize("collator", [packed, padded])
def test_autocast_over_fp32_weights(tmp_path, report, collator):
    assert_trains_as_eager(tmp_path, collator=collator, bf16=True, rtol=2e-2)
    report.assert_attention("packed", LAYERS, compiles=2)


def test_evaluation_between_steps(tmp_path, report):
    trainer = assert_trains_as_eager(tmp_path, eval_strategy="steps", eval_steps=3)
    expected = trained(tmp_path, False, eval_strategy="steps", eval_steps=3)
    torch.testing.assert_close(logged(trainer, "eval_loss"), logged(expected, "eval_loss"))
    # Those of the training: the Trainer evaluates the model that it was given, not what torch.compile made of it.
    report.assert_attention("packed", LAYERS, compiles=2)


def test_a_trained_model_generates(tmp_path, report):
    expected, actual = trained(tmp_path, False), trained(tmp_path, True)
    prompt = torch.tensor([[1, 5, 9, 13]])
    generated = [
        trainer.model.eval().generate(prompt, max_new_tokens=8, do_sample=False) for trainer in (expected, actual)
    ]
    assert torch.equal(*generated)
    report.assert_attention("packed", LAYERS, compiles=2)


def test_a_checkpoint_loads_and_goes_on(tmp_path, report):
    once = trained(tmp_path / "once", True)
    trained(tmp_path / "twice", True, save_strategy="steps", save_steps=3)
    saved = str(tmp_path / "twice" / "checkpoint-3")
    loaded = transformers.LlamaForCausalLM.from_pretrained(saved)  # with names that hold no trace of the compile
    torch._dynamo.reset()
    resumed = transformers.Trainer(
        model=loaded,
        args=arguments(tmp_path / "twice", True),
        train_dataset=token_rows(ROWS),
        data_collator=packed(),
    )
    resumed.train(resume_from_checkpoint=saved)
    torch.testing.assert_close(logged(resumed)[3:], logged(once)[3:])
    report.assert_attention("packed", LAYERS, compiles=6)
