"""A budget that is a share of the card, or what it has free, is bytes by the time that a pass reads it."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

from glue_compiler.errors import GlueWarning
from glue_compiler.memory import budget
from glue_compiler.memory.budget import GRAIN, in_bytes
from glue_compiler.ops.device_memory import DeviceMemory, memory_of
from glue_compiler.options import GlueOptions
from tests.captured import compile_with_glue
from tests.passes.overlap_offload.models import Blocks, step

GIB = 2**30
CARD = DeviceMemory(total=80 * GIB, free=60 * GIB, unused=2 * GIB)


@pytest.fixture(autouse=True)
def card(monkeypatch):
    monkeypatch.setattr(budget, "memory_of", lambda device: CARD if device.type == "cuda" else None)


def on_the_card(*sizes):
    with FakeTensorMode():
        return [torch.empty(*sizes, device="cuda", dtype=torch.uint8)]


def budget_of(given, inputs):
    return in_bytes(GlueOptions(memory_budget=given), inputs).budget


def test_a_share_is_of_the_whole_card():
    assert budget_of(0.5, on_the_card(1)) == 40 * GIB


def test_auto_is_what_is_free_and_what_the_inputs_hold_less_a_margin():
    assert budget_of("auto", on_the_card(GIB)) == 59 * GIB  # 60 free, 2 unused, 1 of the inputs, 4 of margin


def test_inputs_of_one_memory_count_once():
    (weight,) = on_the_card(GIB)
    assert budget_of("auto", [weight, weight.detach()]) == 59 * GIB


def test_a_little_more_or_less_is_the_same_plan(monkeypatch):
    found = set()
    for less in (0, 1, GRAIN // 2):
        memory = DeviceMemory(80 * GIB, 60 * GIB + GRAIN // 2 - less, 0)
        monkeypatch.setattr(budget, "memory_of", lambda device, memory=memory: memory)
        found.add(budget_of("auto", on_the_card(1)))
    assert len(found) == 1


def test_with_nothing_free_the_budget_is_nothing(monkeypatch):
    monkeypatch.setattr(budget, "memory_of", lambda device: DeviceMemory(80 * GIB, GIB, 0))
    assert budget_of("auto", on_the_card(1)) == 0


@pytest.mark.parametrize("given", [None, 0, 24 * GIB])
def test_bytes_stay_as_they_are(given):
    assert budget_of(given, [torch.ones(1)]) == given


@pytest.mark.parametrize("given", ["auto", 0.5])
def test_without_a_card_the_model_runs_without_a_budget(given):
    model, x = Blocks(3), torch.randn(4, 8)
    run = compile_with_glue(model, memory_budget=given, passes={"plan_memory": True})
    with pytest.warns(GlueWarning, match=r"is about the memory of a CUDA device.*'cpu'.*'24GiB'"):
        step(run.call, model, x)
    assert not [p for p in run.report.passes if p.name == "plan_memory"]


@pytest.mark.gpu
def test_a_card_says_what_it_has():
    found = memory_of(torch.device("cuda", 0))
    assert 0 < found.free <= found.total
    assert 0 <= found.unused <= found.total
