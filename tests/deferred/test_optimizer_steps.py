"""Logits that are read after an optimizer's step are those from before it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from glue_compiler.deferred import optimizer_steps
from glue_compiler.deferred.optimizer_steps import STEPS
from glue_compiler.errors import GlueDeferredError
from tests.captured import compile_with_glue
from tests.deferred.logits import CAPPED, Operands, is_deferred
from tests.passes.chunk_loss.runs import ONLY

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "AdamW, one by one": lambda p: torch.optim.AdamW(p, foreach=False),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, fused=True),
    "one that writes data": lambda p: WritesData(p, {}),
}


class WritesData(torch.optim.Optimizer):
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad)


def _stepped(operands, optimizer=OPTIMIZERS["SGD"]):
    optimizer = optimizer([*operands.weights, *operands.biases])
    for each in (*operands.weights, *operands.biases):
        each.grad = torch.ones_like(each)
    optimizer.step()


READS = {
    "all": lambda x: x + 0,
    "rows": lambda x: x[:, -1] + 0,
    "a cast": lambda x: x.float() + 0,
    "a copy": lambda x: x.clone() + 0,
    "picked rows": lambda x: x[torch.tensor([1])] + 0,
    "the largest": lambda x: x.argmax(-1),
    "numpy": lambda x: torch.from_numpy(x.detach().numpy()),
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_they_are_read(name, optimizer):
    operands = Operands(CAPPED)
    expected = READS[name](operands.eager()).detach()
    logits = operands.deferred()
    _stepped(operands, OPTIMIZERS[optimizer])
    assert is_deferred(logits)
    torch.testing.assert_close(READS[name](logits).detach(), expected)  # some rows have other kernels than all


WAITING = {
    "detached": lambda x: x.detach(),
    "rows": lambda x: x[:, -1],
    "a cast": lambda x: x.float(),
    "a copy": lambda x: x.clone(),
    "picked rows": lambda x: x[torch.tensor([1])],
}


@pytest.mark.parametrize("name", WAITING)
def test_what_was_made_of_them_before_is_read_too(name):
    operands = Operands(CAPPED)
    part, expected = WAITING[name](operands.deferred()), WAITING[name](operands.eager()).detach()
    _stepped(operands)
    assert is_deferred(part)
    torch.testing.assert_close(part.detach() + 0, expected)


def test_they_are_read_after_several_steps():
    operands = Operands()
    logits, expected = operands.deferred(), operands.eager().detach()
    for _ in range(3):
        _stepped(operands)
    assert torch.equal(logits.detach() + 0, expected)


def test_a_write_before_the_step_is_still_an_error():
    operands = Operands()
    logits = operands.deferred()
    operands.weights[0].data.mul_(2.0)
    _stepped(operands)
    with pytest.raises(GlueDeferredError):
        logits.sum()


def test_backward_through_them_is_the_error_that_eager_has():
    operands = Operands()
    logits, eager = operands.deferred(), operands.eager()
    _stepped(operands)
    for each in (logits, eager):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            each.sum().backward()


def _copies_of(operands):
    return [each for each in STEPS._living() if each.is_copied and each.operand.shape == operands.weights[0].shape]


def test_a_weight_that_the_optimizer_does_not_write_is_not_copied():
    operands = Operands()
    logits = operands.deferred()
    other = torch.zeros(3, requires_grad=True)
    other.grad = torch.ones(3)
    torch.optim.SGD([other], lr=0.1).step()
    assert not _copies_of(operands)
    assert torch.equal(logits, operands.eager())


def test_no_copy_is_left_when_they_are_gone():
    operands = Operands()
    logits = operands.deferred()
    _stepped(operands)
    (copied,) = _copies_of(operands)
    copy = weakref.ref(copied.tensor)
    del logits, copied
    gc.collect()
    assert copy() is None


def test_logits_of_several_calls_share_a_copy():
    operands = Operands()
    several = [operands.deferred() for _ in range(3)]
    _stepped(operands)
    assert len({id(each.tensor) for each in _copies_of(operands)}) == 1
    assert all(torch.equal(each.detach() + 0, several[0].detach() + 0) for each in several)


def test_logits_that_were_read_before_need_no_copy():
    operands = Operands()
    logits = operands.deferred()
    values = logits.detach() + 0
    _stepped(operands)
    assert not _copies_of(operands)
    assert torch.equal(logits.detach() + 0, values)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8, dtype=torch.float64)
        self.head = nn.Linear(8, 11, dtype=torch.float64)

    def forward(self, x, target):
        logits = self.head(self.body(x).tanh())
        return F.cross_entropy(logits, target), logits


def _training(model, forward, read_after):
    """Predictions of four steps, read after each step, or after the next forward."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    predictions, before = [], None
    for rows in (5, 7, 5, 6):
        x = torch.randn(rows, 8, dtype=torch.float64, generator=generator)
        target = torch.randint(11, (rows,), generator=generator)
        loss, logits = forward(x, target)
        if before is not None and read_after == "next forward":
            predictions.append(before.detach() + 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if read_after == "step":
            predictions.append(logits.detach() + 0)
        before = logits
    return predictions


def test_the_accuracy_of_a_training_loop():
    torch.manual_seed(0)
    model = Model()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    expected = _training(model, model, "step")
    model.load_state_dict(state)
    compiled = compile_with_glue(model, passes=ONLY)
    result = _training(model, compiled.call, "step")
    assert all(graph.passes[0].counts["deferred"] == 1 for graph in compiled.session.graphs)
    for one, other in zip(result, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.LBFGS])
@pytest.mark.parametrize("by_name", [False, True])
def test_logits_that_the_steps_closure_makes(optimizer, by_name):
    def last_predictions(call):
        torch.manual_seed(0)
        model.load_state_dict(state)
        stepped = optimizer(model.parameters(), lr=0.1)
        x, target, seen = torch.randn(5, 8, dtype=torch.float64), torch.arange(5), []

        def closure():
            stepped.zero_grad()
            loss, logits = call(x, target)
            loss.backward()
            seen.append(logits)
            return loss

        stepped.step(closure=closure) if by_name else stepped.step(closure)
        return seen[-1].detach() + 0

    model = Model()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    expected = last_predictions(model)
    torch.testing.assert_close(last_predictions(compile_with_glue(model, passes=ONLY).call), expected)


def test_a_copy_goes_before_the_next_call_of_the_model():
    model = Model()
    with pytest.raises(GlueDeferredError, match="has been written since"):
        _training(model, compile_with_glue(model, passes=ONLY).call, "next forward")


def test_a_compiled_step_of_the_optimizer():
    operands = Operands(dtype=torch.float32)
    logits, expected = operands.deferred(), operands.eager().detach()
    optimizer = torch.optim.SGD(operands.weights, lr=0.1)
    operands.weights[0].grad = torch.ones_like(operands.weights[0])
    torch.compile(optimizer.step, backend="eager")()
    assert torch.equal(logits.detach() + 0, expected)


class TestRoom:
    """What is decided on a GPU, told here what its memory holds."""

    @pytest.fixture
    def on_gpu(self, monkeypatch):
        def told(room: bool):
            monkeypatch.setattr(optimizer_steps, "_has_room", lambda *_: room)

        monkeypatch.setattr(STEPS, "were_read_late", False)
        monkeypatch.setattr(STEPS, "_steps_on_host", 2)
        return told

    def test_without_room_the_first_steps_alone_copy(self, on_gpu):
        on_gpu(room=False)
        copied = []
        for _ in range(4):
            operands = Operands()
            logits = operands.deferred()
            _stepped(operands)
            copied.append(bool(_copies_of(operands)))
            del logits
        assert copied == [True, True, False, False]

    def test_a_program_that_asked_once_may_ask_again(self, on_gpu):
        on_gpu(room=False)
        for _ in range(4):
            operands = Operands()
            expected = operands.eager().detach()
            logits = operands.deferred()
            _stepped(operands)
            assert torch.equal(logits.detach() + 0, expected)

    def test_with_room_each_step_copies(self, on_gpu):
        on_gpu(room=True)
        for _ in range(4):
            operands = Operands()
            logits = operands.deferred()
            _stepped(operands)
            assert _copies_of(operands)
            del logits

    @pytest.mark.parametrize(
        ("now", "peak", "has_state", "expected"),
        [(100, 1000, True, True), (100, 1000, False, False), (500, 1000, True, False)],
    )
    def test_a_peak_is_room_for_the_copy_and_the_step(self, monkeypatch, now, peak, has_state, expected):
        statistics = {"allocated_bytes.all.current": now, "allocated_bytes.all.peak": peak}
        monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: statistics)
        weight = torch.zeros(50, device="meta", dtype=torch.float32)

        class OnGpu:
            device, nbytes = torch.device("cuda"), weight.nbytes

        optimizer = torch.optim.SGD([torch.zeros(1)])
        optimizer.state = {0: {}} if has_state else {}
        assert optimizer_steps._has_room([OnGpu], [weight], optimizer) is expected
