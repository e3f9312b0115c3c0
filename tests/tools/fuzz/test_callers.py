"""Callers that read late and write early: what shares memory that it should not, or computes too late, is found."""

import dataclasses
from random import Random

import pytest
import torch

from glue_compiler.ops import loss_chunks
from tests.tools.fuzz.made import program
from tools.fuzz import harness
from tools.fuzz.callers import NUMPY_UPDATES, TAKES, UPDATES, draw_step, refills
from tools.fuzz.check import eager_results, module_of, verdict
from tools.fuzz.draw import Draw
from tools.fuzz.programs import Call, Program, Statement, Step
from tools.fuzz.settings import draw_settings


def seen_with(given, wrap):
    expected, module = eager_results(given), module_of(given)
    return harness.differences(module, expected, harness.observe(module, wrap))


def aliased(f):
    """Returns its input's memory where ``f`` returns a copy."""
    return lambda x: (x.view_as(x),)


def reusing_its_memory(f):
    """Writes each result over the one before."""
    memory = torch.empty(4, dtype=torch.float64)

    def call(x):
        memory.copy_((x * 2).detach())
        return ((x * 2).detach().set_(memory),)

    return call


@pytest.mark.parametrize("update", [*UPDATES, *NUMPY_UPDATES])
def test_a_result_that_shares_a_weights_memory_is_found_by_a_write(update):
    copied = program("y = x.clone()", calls=(Call("fresh", 1),))
    assert seen_with(copied, aliased) == []
    stepped = dataclasses.replace(copied, step=Step(update=update))
    if "value.data =" in update:  # the result keeps the memory that the weight has left
        assert seen_with(stepped, aliased) == []
    else:
        assert any("output 0: off by" in each for each in seen_with(stepped, aliased))
    assert seen_with(stepped, lambda f: f) == []


@pytest.mark.parametrize("refill", refills("cpu"))
def test_a_result_that_shares_an_inputs_memory_is_found_late(refill):
    frozen = (Statement("x = torch.arange(1.0, 5.0, dtype=FLOAT).add(seed)"),)
    given = program("y = x.clone()", make=frozen, calls=(Call("fresh", 1), Call("refill", 2)), refill=refill)
    late = dataclasses.replace(given, step=Step(late=True))
    assert seen_with(given, aliased) == []
    if "set_" not in refill and "old.data =" not in refill:
        assert any("call 1: output 0: off by" in each for each in seen_with(late, aliased))
    assert seen_with(late, lambda f: f) == []


def test_memory_that_the_next_call_writes_is_found_late():
    given = program("y = (x * 2).detach()")
    assert seen_with(given, reusing_its_memory) == []
    assert seen_with(dataclasses.replace(given, step=Step(late=True)), reusing_its_memory) != []


@pytest.mark.parametrize("when", ["called", "differentiated", "stepped"])
def test_what_a_caller_takes_is_taken_at_its_time(when):
    given = program("y = x.view_as(x)", calls=(Call("fresh", 1),))
    given = dataclasses.replace(given, step=Step("True", ((when, "out.detach().clone()"),), "value.data.zero_()"))
    taken = eager_results(given)["call 1: output 0, taken 0"]
    assert taken.any() == (when != "stepped")


@pytest.mark.parametrize("taken", TAKES)
def test_a_caller_may_take_any_output(taken):
    outputs = [torch.ones(2, 3, dtype=dtype) for dtype in (torch.float64, torch.int64, torch.bool)]
    module = module_of(dataclasses.replace(program("y = x"), step=Step("True", (("called", taken),))))
    results = {}
    harness.take(module, outputs, "called", results, harness.Memory([]))
    assert len(results) == 3
    assert isinstance(results["output 0, taken 0"], torch.Tensor)


def test_a_loss_of_no_output_is_one_of_all():
    given = program("y = x * 2", step=Step("out.dim() == 7"))
    assert eager_results(given)["call 1: gradient of input 0"] is not None


def test_steps_are_drawn_with_everything():
    steps = [draw_step(Draw(Random(seed))) for seed in range(500)]
    assert {step.update for step in steps} == {"pass", *UPDATES, *NUMPY_UPDATES}
    assert {taken for step in steps for _, taken in step.takes} == set(TAKES)
    assert {step.late for step in steps} == {True, False}


LOGITS = Program(
    kind="test",
    prelude=(Statement("FLOAT = torch.float64"),),
    make=(
        Statement("g = torch.Generator().manual_seed(seed)"),
        Statement("x = torch.randn(8, 3, dtype=FLOAT, generator=g, requires_grad=True)"),
        Statement("weight = torch.randn(5, 3, dtype=FLOAT, generator=g, requires_grad=True)"),
        Statement("target = torch.arange(8) % 5"),
    ),
    inputs=("x", "weight", "target"),
    body=(Statement("logits = F.linear(x, weight)"), Statement("loss = F.cross_entropy(logits, target)")),
    outputs=("loss", "logits"),
    calls=(Call("fresh", 1),),
    step=Step("out.dim() == 0", (), UPDATES[0]),
)
"""The loss is differentiated, the weight written, and then the logits are read."""


def test_logits_that_are_read_behind_a_step_are_an_error_that_is_counted():
    found = verdict(LOGITS)
    assert (found.wrong, found.unread, found.fired) == ([], 1, {"chunk_loss": 1})


@pytest.mark.parametrize("change", ["kept", "taken", "not written"])
def test_logits_that_can_be_read_are_compared(change):
    changes = {
        "kept": {"options": (("logits", "kept"),)},
        "taken": {"step": dataclasses.replace(LOGITS.step, takes=(("called", "out + 0"),))},
        "not written": {"step": dataclasses.replace(LOGITS.step, update="pass")},
    }
    found = verdict(dataclasses.replace(LOGITS, **changes[change]))
    assert (found.wrong, found.unread) == ([], 0)


def test_logits_that_are_computed_too_late_are_found(monkeypatch):
    monkeypatch.setattr("glue_compiler.deferred.operands.Watched.check", lambda self: None)
    assert any("output 1: off by" in each for each in verdict(LOGITS).wrong)


def test_settings_end_with_the_program():
    before = dict(loss_chunks.LIMITS), torch._functorch.config.donated_buffer, torch.get_default_dtype()
    draw = Draw(Random(0))
    for each in (
        "mock.patch.dict(LIMITS, cpu=None)",
        "torch._functorch.config.patch(donated_buffer=False)",
        "default_dtype(torch.float64)",
        "deterministic()",
    ):
        draw.set(each)
    draw_settings(draw, "inductor")
    prelude = ("from glue_compiler.ops.loss_chunks import LIMITS", *(each.text for each in draw.prelude.values()))
    state = "seen = (LIMITS['cpu'] is None, torch._functorch.config.donated_buffer, torch.get_default_dtype())"
    asked = "STATE = (*seen, torch.are_deterministic_algorithms_enabled(), torch._inductor.config.fallback_random)"
    lines = ("global STATE", state, asked, "y = x * 2")
    given = program(*lines, prelude=prelude, settings=tuple(draw.settings), calls=(Call("fresh", 1),))
    assert "(True, False, torch.float64, True, True)" in given.source() + str(eager_results(given))
    after = dict(loss_chunks.LIMITS), torch._functorch.config.donated_buffer, torch.get_default_dtype()
    assert after == before
    assert not torch.are_deterministic_algorithms_enabled()
