"""The predicted peak is the one that torch's profiler sees allocated, where operators run one by one."""

from __future__ import annotations

import json

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.captured import compile_with_glue
from tests.passes.plan_memory.test_gradients import Checkpointed, Stack


def most_allocated(run, path):
    """The most bytes at a time that ``run`` holds of what it allocates."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    seen.export_chrome_trace(str(path))
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    total = most = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        total += event["args"]["Bytes"]
        most = max(most, total)
    return most


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Stack, Checkpointed])
def test_the_predicted_peak_is_what_is_allocated(kind, tmp_path):
    model, x, gradient = kind(6), torch.randn(8, 128, 8), torch.ones(8, 128, 8)
    largest = None
    for share in (None, 0.8, 0.6):
        torch._dynamo.reset()
        budget = 2**40 if largest is None else int(share * largest)
        run = compile_with_glue(model, memory_budget=budget, passes={"plan_memory": True})

        def one_step(run=run):
            model.zero_grad(set_to_none=True)
            run.call(x).backward(gradient)

        one_step()
        model.zero_grad(set_to_none=True)
        inputs = sum(parameter.nbytes for parameter in model.parameters()) + x.nbytes
        measured = most_allocated(one_step, tmp_path / "trace.json") + inputs
        (report,) = (p for p in run.report.passes if p.name == "plan_memory")
        largest = largest or report.counts["peak"]
        # The gradient that backward gets is the caller's, and was there before.
        assert measured <= report.counts["peak"] <= 1.01 * (measured + gradient.nbytes)
