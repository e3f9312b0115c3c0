"""Inductor keeps the order: every copy starts before the compute that hides it, every wait stands before first use."""

from __future__ import annotations

import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from tests.captured import compile_with_glue
from tests.passes.overlap_offload.models import Blocks, step

COMPUTE = re.compile(r"extern_kernels\.|cpp_fused|triton_\w+\.run|aten\.\w*mm")


@pytest.fixture(scope="module")
def code():
    """The lines of the forward's and of the backward's ``call``."""
    torch._dynamo.reset()
    model = Blocks(5)
    run = compile_with_glue(model, offload="checkpoints", compiler="inductor", fx_graph_cache=False)
    _, sources = run_and_get_code(lambda: step(run.call, model, torch.randn(4, 8)))
    bodies = [source[source.index("def call(") :].splitlines() for source in sources]
    bodies = [[line for line in body if not line.strip().startswith("#")] for body in bodies]
    (forward,) = [body for body in bodies if any("offload_start" in line for line in body)]
    (backward,) = [body for body in bodies if any("reload_start" in line for line in body)]
    return forward, backward


def calls(lines, operator):
    """``(line, result, operands)`` of each call."""
    pattern = re.compile(rf"(\w+) = torch\.ops\.glue\.{operator}\.default\((.*)\)")
    found = [(place, pattern.search(line)) for place, line in enumerate(lines)]
    return [(place, match[1], [a.strip() for a in match[2].split(",")]) for place, match in found if match]


def pairs(lines, direction):
    """``(start line, wait line, names of the waited-for result)``."""
    waits = calls(lines, f"{direction}_wait")
    for start, result, _ in calls(lines, f"{direction}_start"):
        names = {result, *re.findall(rf"(\w+) = {result}\b", "\n".join(lines))}
        ((wait, waited),) = [(place, name) for place, name, operands in waits if operands[0] in names]
        yield start, wait, {waited, *re.findall(rf"(\w+) = {waited}\b", "\n".join(lines))}


def compute_between(lines, start, end):
    return [line for line in lines[start:end] if COMPUTE.search(line)]


def test_four_copies_each_way(code):
    forward, backward = code
    assert len(list(pairs(forward, "offload"))) == len(list(pairs(backward, "reload"))) == 4


def test_compute_lies_between_each_start_and_its_wait(code):
    for lines, direction in zip(code, ("offload", "reload"), strict=True):
        for start, wait, _ in pairs(lines, direction):
            # A region's backward has six products.
            assert len(compute_between(lines, start, wait)) >= (6 if direction == "reload" else 1)


def test_a_reload_is_waited_for_just_before_it_is_read(code):
    _, lines = code
    for _, wait, names in pairs(lines, "reload"):
        first = next(
            place
            for place in range(wait + 1, len(lines))
            if COMPUTE.search(lines[place]) and names & set(re.findall(r"\w+", lines[place]))
        )
        assert compute_between(lines, wait + 1, first) == []


def test_at_most_two_are_in_flight_or_alive(code):
    forward, backward = code
    held = [(start, wait) for start, wait, _ in pairs(forward, "offload")]
    for start, wait, names in pairs(backward, "reload"):
        last = max(place for place in range(wait, len(backward)) if names & set(re.findall(r"\w+", backward[place])))
        held.append((start + len(forward), last + len(forward)))
    for start, _ in held:
        assert sum(other <= start <= end for other, end in held) <= 2


def test_the_source_is_freed_only_after_its_wait(code):
    forward, _ = code
    sources = {operands[0]: place for place, _, operands in calls(forward, "offload_start")}
    waits = {operands[1]: place for place, _, operands in calls(forward, "offload_wait")}
    assert sources.keys() == waits.keys()
    for source, wait in waits.items():
        freed = [place for place, line in enumerate(forward) if re.search(rf"del .*\b{source}\b", line)]
        assert freed
        assert min(freed) > wait


def test_reloads_are_in_the_order_of_backward(code):
    _, backward = code
    starts = [start for start, _, _ in pairs(backward, "reload")]
    waits = [wait for _, wait, _ in pairs(backward, "reload")]
    assert starts == sorted(starts)
    assert waits == sorted(waits)
