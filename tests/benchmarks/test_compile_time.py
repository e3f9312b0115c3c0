"""The benchmark of first steps: its row of separate experts, and the curve that it draws."""

import math
import re

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks.compile_time_rows import ROWS
from benchmarks.curves_svg import Curve, Panel, draw
from benchmarks.end_to_end_rows import Size
from tests.captured import compile_and_keep


def test_separate_experts_are_those_of_qwen3_30b():
    model = ROWS["expert-loop"].build(Size(64, 64, 2, False), "meta", "sdpa").model
    experts = [p for name, p in model.named_parameters() if ".experts." in name]
    assert len(experts) == 2 * 128 * 3
    assert {p.numel() for p in experts} == {2048 * 768}
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert any(name.endswith("mlp.gate.weight") for name in trained)
    assert all("norm" in name or name.endswith("mlp.gate.weight") for name in trained)


@pytest.mark.slow
def test_separate_experts_are_grouped_and_their_layers_shared():
    workload = ROWS["expert-loop"].build(Size(64, 64, 4, True), "cpu", "sdpa")
    run = compile_and_keep(workload.model)
    run.call(**workload.batch(64, torch.Generator().manual_seed(0))).loss.backward()
    counts = {p.name: p.counts for p in run.report.passes}
    assert counts["group_experts"]["loops_grouped"] == 4
    assert counts["share_layers"]["calls"] >= 4


def points_of(text):
    found = [re.findall(r"([\d.]+),([\d.]+)", line) for line in re.findall(r'points="([^"]*)"', text)]
    return [[(float(x), float(y)) for x, y in points] for points in found]


def test_a_curve_stands_where_its_numbers_of_layers_are():
    curve = Curve("glue", [10.0, math.nan, 40.0, 80.0])
    ((first, third, last),) = points_of(
        draw("title", "layers", [Panel("seconds", [curve], least=0.0)], (8, 16, 32, 64))
    )
    assert (third[0] - first[0]) / (last[0] - first[0]) == pytest.approx((32 - 8) / (64 - 8), abs=0.01)
    # From zero on: the height is the number of seconds.
    assert (first[1] - last[1]) / (third[1] - last[1]) == pytest.approx((80 - 10) / (80 - 40), abs=0.01)


def test_steps_are_counted_from_one():
    text = draw("title", "steps", [Panel("loss", [Curve("glue", [3.0, 2.0, 1.0])])])
    ((first, middle, last),) = points_of(text)
    assert middle[0] - first[0] == pytest.approx(last[0] - middle[0], abs=0.1)
    assert ">1</text>" in text
    assert ">3</text>" in text
