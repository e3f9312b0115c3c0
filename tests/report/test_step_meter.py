"""The second and third step of a planned graph are measured, and the report says what they took."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
import torch

from glue_compiler.graph_pass import Numerics, Stage
from glue_compiler.pipeline import PassReport
from glue_compiler.report.graph_report import GraphReport
from glue_compiler.report.session import Session
from glue_compiler.report.step_meter import Mark, StepMeter

PLANNED = PassReport("plan", Stage.JOINT, Numerics.BITWISE, changed=True, drawing={"budget": 1})


@dataclass
class Event:
    """``number`` of a clock that ticks once for each mark, a millisecond each."""

    number: int
    done: bool = True

    def query(self):
        return self.done

    def elapsed_time(self, other):
        return float(other.number - self.number)


class Device:
    """Marks of a device whose bytes are said in front of each."""

    def __init__(self, *bytes_and_peaks):
        self.said = list(bytes_and_peaks)
        self.events = []

    def mark(self, device):
        self.events.append(Event(len(self.events)))
        allocated, peak = self.said.pop(0)
        return Mark(allocated, peak, self.events[-1])


def metered(device, passes=(PLANNED,)):
    report = GraphReport(passes=list(passes))
    meter = StepMeter(report, Session(), device.mark, kinds=("cpu",))
    x = torch.ones(4, requires_grad=True)  # 16 bytes
    call = meter.compiled(lambda x: (x * 2, None))

    def step():
        call(x)[0].sum().backward()

    return report, step, call, x


def test_the_second_and_the_third_step_are_measured_when_the_next_one_comes():
    device = Device((100, 500), (150, 500), (150, 500), (120, 700), (100, 700), (150, 700), (150, 700), (120, 700))
    report, step, _, _ = metered(device)
    for _ in range(5):
        step()
    first, second = report.measured
    assert first == {"peak": 700 - 100 + 16, "is_exact": True, "microseconds": 2000}
    assert second == {"peak": 700 - 100 + 16, "is_exact": False, "microseconds": 2000}
    assert report.as_json()["measured"] == report.measured


def test_a_step_that_the_device_has_not_done_is_waited_for_by_nobody():
    device = Device(*[(0, 0)] * 8)
    report, step, _, _ = metered(device)
    step()
    step()
    device.events[-1].done = False
    step()
    assert report.measured == []
    device.events[3].done = True
    step()
    assert len(report.measured) == 2


def test_a_forward_without_backward_is_not_a_step():
    device = Device(*[(0, 0)] * 8)
    report, step, call, x = metered(device)
    step()
    call(x)
    with torch.no_grad():
        call(x)
    step()
    step()
    assert len(report.measured) == 1
    assert report.measured[0]["microseconds"] == 2000


def test_without_a_plan_the_call_is_not_wrapped():
    call = object()
    assert StepMeter(GraphReport(passes=[dataclasses.replace(PLANNED, drawing=None)]), Session()).compiled(call) is call


def test_other_devices_are_not_measured():
    device = Device()
    report = GraphReport(passes=[PLANNED])
    call = StepMeter(report, Session(), device.mark).compiled(lambda x: x * 2)
    for _ in range(4):
        call(torch.ones(2, requires_grad=True)).sum().backward()
    assert not device.events
    assert report.measured == []


@pytest.mark.gpu
def test_a_step_on_a_card():
    from tests.captured import compile_with_glue
    from tests.passes.overlap_offload.models import Blocks
    from tests.passes.overlap_offload.models import step as train

    model, x = Blocks(4, 64).cuda(), torch.randn(4096, 64, device="cuda")
    run = compile_with_glue(model, memory_budget="1GiB", passes={"plan_memory": True})
    for _ in range(4):
        train(run.call, model, x)
        torch.cuda.synchronize()
    assert len(run.report.measured) == 2
    assert all(one["peak"] > x.nbytes and one["microseconds"] > 0 for one in run.report.measured)
