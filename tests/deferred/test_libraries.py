"""What libraries do to a model's outputs: wrappers of distributed training, accelerate, transformers, checkpoints."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from glue_compiler.deferred.tensor import defer
from glue_compiler.errors import GlueDeferredError
from tests.deferred.logits import PLAIN, is_deferred

WORDS, HIDDEN, BATCH, TOKENS = 13, 8, 4, 6


class Model(nn.Module):
    """Returns a loss, and logits that are deferred or not."""

    def __init__(self, is_deferring: bool, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.is_deferring = is_deferring
        self.words = nn.Embedding(WORDS, HIDDEN, dtype=dtype)
        self.head = nn.Linear(HIDDEN, WORDS, bias=False, dtype=dtype)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.words(input_ids).tanh()
        logits = functional.linear(hidden, self.head.weight)
        loss = functional.cross_entropy(logits.flatten(0, 1), (input_ids if labels is None else labels).flatten())
        if self.is_deferring:
            logits = defer(PLAIN, [hidden], [self.head.weight])
        return {"loss": loss, "logits": logits}


def _batch() -> Tensor:
    return torch.randint(WORDS, (BATCH, TOKENS), generator=torch.Generator().manual_seed(1))


def _only_loss(outputs: dict[str, Tensor]) -> Tensor:
    return outputs["loss"]


def _loss_and_logits(outputs: dict[str, Tensor]) -> Tensor:
    return outputs["loss"] + outputs["logits"].logsumexp(-1).square().mean()


def _gradients(model: nn.Module, total: Tensor) -> list[Tensor]:
    total.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return [g.full_tensor() if hasattr(g, "full_tensor") else g for g in gradients]


def _assert_same_step(wrap: Any, reads: Any) -> None:
    found, expected = wrap(Model(True)), Model(False)
    outputs = found(_batch())
    assert is_deferred(outputs["logits"])
    one, other = _gradients(found, reads(outputs)), _gradients(expected, reads(expected(_batch())))
    assert is_deferred(outputs["logits"]) == (reads is _only_loss)
    for gradient, wanted in zip(one, other, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-12)


@pytest.fixture
def one_process(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


READS = pytest.mark.parametrize("reads", [_only_loss, _loss_and_logits])


@READS
@pytest.mark.parametrize(
    "how", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=["plain", "unused", "static"]
)
def test_ddp(one_process, reads, how):
    _assert_same_step(lambda model: DistributedDataParallel(model, **how), reads)


@READS
def test_fsdp2(one_process, reads):
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    _assert_same_step(lambda model: fully_shard(model, mesh=mesh), reads)


def test_fsdp2_has_gathered_another_weight(one_process):
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    model = fully_shard(Model(True), mesh=mesh, reshard_after_forward=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    outputs = model(_batch())
    outputs["loss"].backward()
    optimizer.step()
    model(_batch())
    with pytest.raises(GlueDeferredError):
        outputs["logits"].sum()


@READS
def test_checkpoints_and_hooks_on_saved_tensors(reads):
    def checkpointed(model):
        forward = model.forward
        model.forward = lambda ids: checkpoint(forward, ids, use_reentrant=False)
        return model

    _assert_same_step(checkpointed, reads)

    def saved_on_host(model):
        forward = model.forward

        def run(ids):
            with torch.autograd.graph.save_on_cpu():
                return forward(ids)

        model.forward = run
        return model

    _assert_same_step(saved_on_host, reads)


def test_pytrees_and_copies_of_outputs():
    from torch.utils import _pytree as pytree

    outputs = Model(True)(_batch())
    leaves, spec = pytree.tree_flatten(outputs)
    again = pytree.tree_unflatten(leaves, spec)
    assert again["logits"] is outputs["logits"]
    detached = pytree.tree_map(lambda tensor: tensor.detach(), outputs)
    assert is_deferred(detached["logits"])
    expected = Model(False)(_batch())["logits"].detach()
    assert torch.equal(copy.deepcopy(detached)["logits"], expected)


class TestAccelerate:
    @pytest.fixture(autouse=True)
    def operations(self):
        self.operations = pytest.importorskip("accelerate.utils.operations")

    def test_outputs_in_fp32(self):
        outputs = self.operations.convert_to_fp32(Model(True, torch.bfloat16)(_batch()))
        assert is_deferred(outputs["logits"])
        assert outputs["logits"].dtype == torch.float32
        assert torch.equal(outputs["logits"] + 0, Model(False, torch.bfloat16)(_batch())["logits"].float())

    def test_forwards_in_fp32(self):
        model = Model(True, torch.bfloat16)
        model.forward = self.operations.convert_outputs_to_fp32(model.forward)
        outputs = model(_batch())
        assert outputs["logits"].dtype == torch.float32
        (outputs["loss"] + outputs["logits"].mean()).backward()
        assert model.head.weight.grad is not None

    @pytest.mark.parametrize("name", ["gather", "pad_across_processes", "reduce", "broadcast", "concatenate"])
    def test_collectives(self, name, one_process):
        from accelerate import PartialState

        PartialState(cpu=True)
        with torch.no_grad():
            found, expected = (Model(kind)(_batch())["logits"] for kind in (True, False))
        if name == "concatenate":
            found, expected = [found, found], [expected, expected]
        run = getattr(self.operations, name)
        assert torch.equal(run(found) + 0, run(expected))

    def test_collectives_of_torch(self, one_process):
        with torch.no_grad():
            found, expected = (Model(kind)(_batch())["logits"] for kind in (True, False))
        results = [torch.empty_like(expected)]
        torch.distributed.all_gather(results, found)
        assert torch.equal(results[0], expected)
        torch.distributed.all_reduce(found)
        assert torch.equal(found + 0, expected)
        whole = torch.empty_like(expected)
        torch.distributed.all_gather_into_tensor(whole, found[:, 1:].contiguous().new_ones(expected.shape))
        assert (whole == 1).all()

    def test_slices_and_moves(self):
        found, expected = ({"logits": Model(kind)(_batch())["logits"]} for kind in (True, False))
        part = self.operations.slice_tensors(found, slice(0, 2))
        assert is_deferred(part["logits"])
        torch.testing.assert_close(part["logits"] + 0, expected["logits"][:2])
        moved = self.operations.send_to_device(found, torch.device("cpu"))
        assert is_deferred(moved["logits"])


class TestTransformers:
    @pytest.fixture(autouse=True)
    def library(self):
        self.transformers = pytest.importorskip("transformers")

    def test_model_outputs(self):
        from transformers.modeling_outputs import CausalLMOutput

        outputs = CausalLMOutput(**Model(True)(_batch()))
        assert is_deferred(outputs.to_tuple()[1])
        assert is_deferred(CausalLMOutput(**dict(outputs.items())).logits)

    @pytest.mark.slow
    @pytest.mark.parametrize("bf16", [False, True])
    def test_trainer_evaluates_and_predicts(self, bf16, tmp_path):
        def results(is_deferring: bool) -> Any:
            rows = [{"input_ids": ids, "labels": ids} for ids in _batch()]
            arguments = self.transformers.TrainingArguments(
                output_dir=str(tmp_path),
                per_device_train_batch_size=2,
                per_device_eval_batch_size=3,
                max_steps=2,
                bf16=bf16,
                eval_accumulation_steps=1,
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                learning_rate=0.1,
                seed=3,
            )
            trainer = self.transformers.Trainer(
                Model(is_deferring, torch.float32),
                arguments,
                train_dataset=rows,
                eval_dataset=rows,
                compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
            )
            trainer.train()
            prediction = trainer.predict(rows)
            metrics = trainer.evaluate()
            return prediction.predictions, metrics["eval_loss"], metrics["eval_accuracy"]

        found, expected = results(True), results(False)
        assert isinstance(found[0], np.ndarray)
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-2 if bf16 else 1e-5, atol=1e-2 if bf16 else 1e-5)
        assert found[1:] == pytest.approx(expected[1:], rel=1e-2 if bf16 else 1e-5)

    def test_trainers_label_smoothing(self):
        from transformers.trainer_pt_utils import LabelSmoother

        totals = [LabelSmoother(0.1)(Model(kind)(_batch()), _batch(), shift_labels=True) for kind in (True, False)]
        torch.testing.assert_close(*totals)


class TestTrl:
    @pytest.fixture(autouse=True)
    def library(self):
        self.utils = pytest.importorskip("trl.trainer.utils")

    def test_entropy_and_log_probabilities(self):
        found, expected = Model(True), Model(False)
        results = []
        for model in (found, expected):
            logits = model(_batch())["logits"]
            entropy = self.utils.entropy_from_logits(logits[:, :-1])
            chosen = self.utils.selective_log_softmax(logits[:, :-1] / 0.7, _batch()[:, 1:])
            results.append((entropy, chosen, *_gradients(model, (entropy + chosen).square().sum())))
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)

    def test_accuracy_makes_no_logits(self, monkeypatch):
        monkeypatch.setattr("glue_compiler.deferred.values.CHUNK_BYTES", 2 * WORDS * 8)
        logits = Model(True)(_batch())["logits"]
        shifted = logits[..., :-1, :].contiguous()
        assert torch.equal(shifted.argmax(dim=-1), Model(False)(_batch())["logits"][:, :-1].argmax(-1))
        assert is_deferred(shifted)
        assert is_deferred(logits)
