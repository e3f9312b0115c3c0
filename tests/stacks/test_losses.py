"""Losses of the libraries' trainings come without logits, and what reads the logits afterwards finds eager's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from glue_compiler.deferred.tensor import DeferredTensor
from glue_compiler.ops import loss_chunks
from tests.stacks.test_trainer import STEPS, arguments, packed, padded
from tests.stacks.tiny import VOCABULARY, causal_model, logged, token_rows, transformers

pytestmark = [pytest.mark.slow, pytest.mark.stack]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """The batches of these tests are of more than one chunk."""
    limits = loss_chunks.ChunkLimits(target_bytes=1, least_rows=4, multiple=4)
    monkeypatch.setitem(loss_chunks.LIMITS, "cpu", limits)


class Recording(transformers.Trainer):
    """A Trainer that keeps the gradients of every step, and what its model returned."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.gradients: list[dict[str, torch.Tensor | None]] = []
        self.is_deferred: list[bool] = []

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **others: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **others)
        self.is_deferred.append(isinstance(outputs["logits"], DeferredTensor))
        self.read(outputs["logits"])
        return (loss, outputs) if return_outputs else loss

    def read(self, logits: torch.Tensor) -> None:
        """What a subclass does with them."""

    def training_step(self, model: Any, *given: Any, **others: Any) -> torch.Tensor:
        loss = super().training_step(model, *given, **others)
        found = self.model.named_parameters()
        self.gradients.append({name: None if p.grad is None else p.grad.clone() for name, p in found})
        return loss


def trained(folder: Any, backend: str | None, model: Any, collator: Any = packed, **changes: Any) -> Any:
    torch._dynamo.reset()
    trainer_class = changes.pop("trainer_class", Recording)
    given = {name: changes.pop(name) for name in ("compute_loss_func",) if name in changes}
    trainer = trainer_class(
        model=model,
        args=arguments(folder, False, **changes, **({"torch_compile_backend": backend} if backend else {})),
        train_dataset=token_rows(4 * STEPS * changes.get("gradient_accumulation_steps", 1)),
        data_collator=collator(),
        **given,
    )
    trainer.train()
    return trainer


def assert_trains_as_eager(
    folder: Any, make: Any = causal_model, tolerance: float = 1e-4, eager: str | None = None, **changes: Any
) -> Any:
    """Losses, gradients of every step, which of them are None; returns glue's trainer, then that of ``eager``."""
    expected, actual = (trained(folder, backend, make(), **changes) for backend in (eager, "glue"))
    assert not any(expected.is_deferred)
    assert len(logged(expected)) == STEPS
    torch.testing.assert_close(logged(actual), logged(expected), rtol=tolerance, atol=tolerance)
    for wanted, found in zip(expected.gradients, actual.gradients, strict=True):
        assert wanted.keys() == found.keys()
        for name, gradient in wanted.items():
            assert (gradient is None) == (found[name] is None), name
            if gradient is not None:
                torch.testing.assert_close(found[name], gradient, rtol=tolerance, atol=tolerance, msg=name)
    return actual, expected


def assert_without_logits(report: Any, compiles: int, **counts: int) -> None:
    """The pass wrote a loss in each of so many graphs, and their logits are deferred."""
    found = [{name: each.get(name, 0) for name in ("losses", "statistics", "deferred")} for each in losses_of(report)]
    assert found == [{"losses": 1, "statistics": 0, "deferred": 1, **counts}] * compiles, report.skips("chunk_loss")
    assert not report.skips("chunk_loss")


def losses_of(report: Any) -> list[dict[str, int]]:
    """For each graph where the pass did something, what it counted."""
    return [counts for counts in report.counts("chunk_loss") if any(counts.values())]


@pytest.mark.parametrize("collator", [packed, padded])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_training(tmp_path, report, collator, accumulation):
    """The sum of a batch's losses, by how many tokens all accumulated batches have."""
    trainer, _ = assert_trains_as_eager(tmp_path, collator=collator, gradient_accumulation_steps=accumulation)
    assert all(trainer.is_deferred)
    assert_without_logits(report, compiles=2)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(tmp_path, report, use_reentrant):
    changes = {"gradient_checkpointing_kwargs": {"use_reentrant": use_reentrant}}
    trainer, _ = assert_trains_as_eager(tmp_path, gradient_checkpointing=True, **changes)
    assert all(trainer.is_deferred)
    assert_without_logits(report, compiles=2)


def test_autocast(tmp_path, report):
    """accelerate makes outputs fp32 and wraps the forward in autocast."""
    trainer, _ = assert_trains_as_eager(tmp_path, bf16=True, tolerance=5e-2)
    assert all(trainer.is_deferred)
    assert_without_logits(report, compiles=2)


def test_weights_of_16_bits(tmp_path, report):
    trainer, _ = assert_trains_as_eager(tmp_path, lambda: causal_model().bfloat16(), tolerance=5e-2)
    assert all(trainer.is_deferred)
    assert_without_logits(report, compiles=2)


def test_tied_embeddings(tmp_path, report):
    assert_trains_as_eager(tmp_path, lambda: causal_model(tie_word_embeddings=True))
    assert_without_logits(report, compiles=2)


class Measuring(Recording):
    """Entropy and accuracy of tokens, as TRL's trainers took them from logits."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.measured: list[torch.Tensor] = []

    def read(self, logits: torch.Tensor) -> None:
        utils = pytest.importorskip("trl.trainer.utils")
        with torch.no_grad():
            entropy = utils.entropy_from_logits(logits, chunk_size=8)
            predictions = logits[..., :-1, :].contiguous().argmax(dim=-1)
        self.measured += [entropy, predictions]
        # In chunks of rows, none of which is kept: the memory for all of them was never taken.
        if isinstance(logits, DeferredTensor):
            assert not logits._deferred.memory.exists


def test_entropy_and_accuracy_of_tokens(tmp_path, report):
    ours, eagers = assert_trains_as_eager(tmp_path, collator=padded, trainer_class=Measuring)
    assert all(ours.is_deferred)
    for found, wanted in zip(ours.measured, eagers.measured, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert_without_logits(report, compiles=2)


class Regularising(Recording):
    """Adds a loss of the logits, so that gradients reach the model through them, too."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **others: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **others)
        loss = loss + 1e-2 * outputs["logits"].logsumexp(-1).square().mean()
        return (loss, outputs) if return_outputs else loss


def test_another_loss_of_returned_logits(tmp_path, report):
    trainer, _ = assert_trains_as_eager(tmp_path, trainer_class=Regularising)
    assert all(trainer.is_deferred)
    assert_without_logits(report, compiles=2)


def smoothed(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    logits = outputs["logits"][..., :-1, :].flatten(0, 1)
    targets = labels[..., 1:].flatten()
    total = nn.functional.cross_entropy(logits, targets, label_smoothing=0.1, reduction="sum")
    return total / num_items_in_batch


# transformers 5.23 asks the compiled module for its class to know whether labels are to be shifted, and with no backend
# of torch.compile finds it; so what is compared with is compiled, too.
@pytest.mark.parametrize(
    "changes", [{"label_smoothing_factor": 0.1, "eager": "eager"}, {"compute_loss_func": smoothed}]
)
def test_a_loss_outside_of_the_model(tmp_path, report, changes):
    """What is compiled has no loss: its logits are what eager's are."""
    trainer, _ = assert_trains_as_eager(tmp_path, collator=padded, **changes)
    assert not any(trainer.is_deferred)
    assert not losses_of(report)


def test_the_trainers_label_smoother_in_the_graph(report):
    from transformers.trainer_pt_utils import LabelSmoother

    rows = padded()([token_rows(4)[i] for i in range(4)])
    labels = rows.pop("labels")

    def step(model: Any) -> torch.Tensor:
        return LabelSmoother(0.1)(model(**rows), labels, shift_labels=True)

    losses = []
    for compile_ in (lambda f: f, lambda f: torch.compile(f, backend="glue")):
        model = causal_model()
        loss = compile_(step)(model)
        loss.backward()
        losses.append([loss.detach(), *(p.grad for p in model.parameters())])
    for found, wanted in zip(losses[1], losses[0], strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert_without_logits(report, compiles=1, losses=0, statistics=1, deferred=0)


def accuracy(predictions: Any) -> dict[str, float]:
    logits, labels = predictions.predictions, predictions.label_ids
    assert isinstance(logits, np.ndarray)
    assert logits.shape == (*labels.shape, VOCABULARY)
    hits = (logits[:, :-1].argmax(-1) == labels[:, 1:])[labels[:, 1:] != -100]
    return {"accuracy": hits.mean(), "norm": float(np.square(logits[labels != -100]).mean())}


def evaluated(folder: Any, compiled: bool, **changes: Any) -> Any:
    """A trainer that evaluates, the model compiled by its owner: the Trainer itself compiles for training only."""
    torch._dynamo.reset()
    model = causal_model()
    if compiled:
        model.compile(backend="glue")
    preprocess = changes.pop("preprocess", None)
    trainer = Recording(
        model=model,
        args=arguments(folder, False, **changes),
        eval_dataset=token_rows(12),
        data_collator=padded(),
        compute_metrics=accuracy if preprocess is None else lambda given: {"mean": float(given.predictions.mean())},
        preprocess_logits_for_metrics=preprocess,
    )
    return trainer, trainer.evaluate(), trainer.predict(token_rows(8))


@pytest.mark.parametrize(
    ("changes", "accumulation", "preprocess"),
    [
        ({}, None, None),
        ({}, 1, None),
        ({}, 1, lambda logits, labels: logits.argmax(-1)),
        ({"bf16": True}, None, None),
        ({"bf16_full_eval": True}, None, None),
    ],
    ids=["fp32", "by_batch", "argmax", "amp", "bf16"],
)
def test_evaluate_and_predict(tmp_path, report, accumulation, preprocess, changes):
    given = {"preprocess": preprocess, "eval_accumulation_steps": accumulation, **changes}
    (_, *expected), (trainer, *actual) = (evaluated(tmp_path, compiled, **given) for compiled in (False, True))
    tolerance = 5e-2 if changes else 1e-4
    assert all(trainer.is_deferred)
    for name, number in expected[0].items():
        if not name.endswith(("runtime", "per_second", "time")):
            assert actual[0][name] == pytest.approx(number, rel=tolerance), name
    if preprocess is None:
        np.testing.assert_allclose(actual[1].predictions, expected[1].predictions, rtol=tolerance, atol=tolerance)
    elif not changes:
        assert np.array_equal(actual[1].predictions, expected[1].predictions)
    assert np.array_equal(actual[1].label_ids, expected[1].label_ids)
    assert all(counts["losses"] == 1 and counts["deferred"] == 1 for counts in losses_of(report))
    assert losses_of(report)


def test_evaluate_with_a_label_smoother(tmp_path, report):
    (_, *expected), (trainer, *actual) = (
        evaluated(tmp_path, compiled, label_smoothing_factor=0.1) for compiled in (False, True)
    )
    assert not any(trainer.is_deferred)
    assert actual[0]["eval_loss"] == pytest.approx(expected[0]["eval_loss"], rel=1e-5)
    np.testing.assert_allclose(actual[1].predictions, expected[1].predictions, rtol=1e-4, atol=1e-5)


def adapted(**changes: Any) -> Any:
    peft = pytest.importorskip("peft")
    config = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **changes}
    torch.manual_seed(0)
    model = peft.get_peft_model(causal_model(), peft.LoraConfig(**config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # they start as zeros, and so would the gradients of lora_A
                parameter.copy_(0.1 * torch.randn(parameter.shape))
    return model


ADAPTED = {
    "frozen": {},
    "trained": {"modules_to_save": ["lm_head"]},
    "lora": {"target_modules": ["q_proj", "lm_head"]},
    "rslora": {"target_modules": ["lm_head"], "use_rslora": True},
    "dropout": {"target_modules": ["lm_head"], "lora_dropout": 0.5},
    "all": {"target_modules": "all-linear", "modules_to_save": ["embed_tokens"]},
}


@pytest.mark.parametrize(
    ("head", "changes"), [*((head, {}) for head in ADAPTED), ("trained", {"bf16": True}), ("lora", {"bf16": True})]
)
def test_adapted_heads(tmp_path, report, head, changes):
    tolerance = 5e-2 if changes else 1e-4
    trainer, _ = assert_trains_as_eager(tmp_path, lambda: adapted(**ADAPTED[head]), tolerance, **changes)
    assert all(trainer.is_deferred)
    assert_without_logits(report, compiles=2)
    trains_head = head in ("trained", "lora", "rslora", "dropout")
    assert (
        any("lm_head" in name and gradient is not None for name, gradient in trainer.gradients[0].items())
        == trains_head
    )


def test_gradient_scaling_in_fp16(report):
    """The training step of the scripts of PyTorch: accelerate has none in fp16 on a CPU."""
    batches = [padded()([token_rows(16)[i + 4 * j] for i in range(4)]) for j in range(4)]

    def run(compiled: bool) -> list[torch.Tensor]:
        torch._dynamo.reset()
        model = causal_model()
        call = torch.compile(model, backend="glue") if compiled else model
        optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=1e-2), torch.amp.GradScaler("cpu", 1024.0)
        found = []
        for batch in batches:
            with torch.autocast("cpu", torch.float16):
                loss = call(**batch, num_items_in_batch=torch.tensor(40)).loss
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return found

    for found, wanted in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
    assert_without_logits(report, compiles=2)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("reads", [False, True])
def test_accelerate(report, precision, reads):
    """Losses, and, if the loop ``reads`` them before the step of the optimizer, all logits."""
    accelerate = pytest.importorskip("accelerate")

    def run(**how: Any) -> list[torch.Tensor]:
        torch._dynamo.reset()
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # holds the backend of the run before
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=precision, **how)
        model = causal_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        data = torch.utils.data.DataLoader(token_rows(16), batch_size=4, collate_fn=padded())
        prepared, optimizer, data = accelerator.prepare(model, optimizer, data)
        found = []
        for batch in data:
            with accelerator.accumulate(prepared):
                outputs = prepared(**batch)
                assert isinstance(outputs.logits, DeferredTensor) == bool(how)
                assert outputs.logits.dtype == torch.float32
                if reads:
                    found.append(accelerator.gather_for_metrics(outputs.logits).softmax(-1).detach())
                accelerator.backward(outputs.loss)
                found += [outputs.loss.detach(), *(p.grad.clone() for p in model.parameters())]
                optimizer.step()
                optimizer.zero_grad()
        return found

    tolerance = 1e-4 if precision == "no" else 5e-2
    for found, wanted in zip(run(dynamo_backend="glue"), run(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    assert all(counts["losses"] == 1 and counts["deferred"] == 1 for counts in losses_of(report))
    assert losses_of(report)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_preferences_and_policies_in_the_graph(report, temperature):
    """TRL's log-probabilities of tokens, and entropies, in one graph with the model, as its DPO and GRPO took them."""
    utils = pytest.importorskip("trl.trainer.utils")
    rows = padded()([token_rows(4)[i] for i in range(4)])
    del rows["labels"]

    def policy(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logits = model(**rows, logits_to_keep=6).logits[:, :-1] / temperature
        tokens = rows["input_ids"][:, -5:]
        logps = utils.selective_log_softmax(logits, tokens)
        with torch.no_grad():
            entropy = utils.entropy_from_logits(logits, chunk_size=8)
        return logps, entropy

    results = []
    for compile_ in (lambda f: f, lambda f: torch.compile(f, backend="glue")):
        model = causal_model()
        logps, entropy = compile_(policy)(model)
        (-logps * torch.linspace(-1, 1, logps.numel()).view_as(logps)).sum().backward()
        results.append([logps.detach(), entropy, *(p.grad for p in model.parameters())])
    for found, wanted in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert any(counts["statistics"] for counts in losses_of(report)), report.skips("chunk_loss")
