"""The predicted streams of a dumped step: sizes and rates in, milliseconds out."""

from __future__ import annotations

import pytest
import torch

import glue_compiler.ops.flop_formulas  # noqa: F401  registers them
from glue_compiler.report.graph_text import GraphText, NodeLine
from glue_compiler.report.predicted_step import Rates, bytes_of, flops_of, predict_step
from glue_compiler.report.recorded import read_folder
from tests.passes.overlap_offload.models import Blocks, step

MM = "torch.ops.aten.mm.default(a, b)"
SHAPES = {"a": "f32[10, 20]", "b": "f32[20, 50]"}
PRODUCT = 2 * 10 * 20 * 50  # floating-point operations
COPIED = 4 * 10 * 20  # bytes


def forward(*nodes):
    inputs = (NodeLine("a", "input", SHAPES["a"]), NodeLine("b", "input", SHAPES["b"]))
    return (GraphText("forward", (*inputs, *nodes)),)


def product(name, layer="layers.0"):
    return NodeLine(name, MM, "f32[10, 50]", layer=layer)


START = NodeLine("host", "torch.ops.glue.offload_start.default(a, None, -1)", "f32[10, 20]")
WAIT = NodeLine("done", "torch.ops.glue.offload_wait.default(host, a, None)", "f32[10, 20]")


@pytest.mark.parametrize(
    ("shape", "nbytes"),
    [
        ("f32[2, 8]", 64),
        ("bf16[3]", 6),
        ("f8e4m3fn[4]", 4),
        ("b8[5]", 5),
        ("i64[]", 8),
        ("f32[s0, 8]", None),
        ("", None),
    ],
)
def test_bytes_of_a_shape(shape, nbytes):
    assert bytes_of(shape) == nbytes


def test_products_cost_what_torch_counts():
    assert flops_of(NodeLine("c", MM, "f32[10, 50]"), SHAPES) == PRODUCT
    bias = NodeLine("c", "torch.ops.aten.addmm.default(bias, a, b)", "f32[10, 50]")
    assert flops_of(bias, {**SHAPES, "bias": "f32[50]"}) == PRODUCT


def test_operands_in_a_list_are_counted():
    settings = "None, t, None, 'mean', -100, 0.0, 1.0, 0.0, torch.float32, [True, {}, False], False"
    for second, products in ((True, 3), (False, 2)):
        text = f"torch.ops.glue.linear_cross_entropy.default([x], [w], {settings.format(second)})"
        shapes = {"x": "f32[32, 8]", "w": "f32[50, 8]", "t": "i64[32]"}
        assert flops_of(NodeLine("c", text, ""), shapes) == products * 2 * 32 * 8 * 50
        assert flops_of(NodeLine("c", text, ""), {**shapes, "x": "f32[s0, 8]"}) is None


def test_what_is_no_product_costs_nothing():
    for text in ("torch.ops.aten.add.Tensor(a, b)", "a + b", "input", "getitem[0]", "torch.nonzero(a)", "x[0] = a"):
        assert flops_of(NodeLine("c", text, "f32[10]"), SHAPES) == 0


def test_a_size_that_is_no_number_is_not_known():
    assert flops_of(NodeLine("c", MM, "f32[s0, 50]"), {**SHAPES, "a": "f32[s0, 20]"}) is None


def test_a_copy_runs_beside_compute_and_is_waited_for():
    # A product takes 1 ms, the copy 2.5 ms: it starts after the first, and after the second compute waits 1.5 ms.
    rates = Rates(PRODUCT * 1e3, COPIED / 2.5e-3)
    found = predict_step(forward(product("c"), START, product("d"), WAIT, product("e", "layers.1")), rates)
    assert [(bar.start, bar.end) for bar in found.to_host] == [(pytest.approx(1), pytest.approx(3.5))]
    assert [(bar.start, bar.end) for bar in found.waits] == [(pytest.approx(2), pytest.approx(3.5))]
    assert [(bar.label, bar.end) for bar in found.compute] == [
        ("layers.0", pytest.approx(2)),
        ("layers.1", pytest.approx(4.5)),
    ]
    assert found.length == pytest.approx(4.5)


def test_a_hidden_copy_costs_no_wait():
    rates = Rates(PRODUCT * 1e3, COPIED / 0.5e-3)
    found = predict_step(forward(product("c"), START, product("d"), WAIT, product("e")), rates)
    assert found.waits == ()
    assert found.length == pytest.approx(3)


def test_copies_of_one_direction_take_turns():
    second = NodeLine("host2", START.text, START.shape)
    rates = Rates(PRODUCT * 1e3, COPIED / 2e-3)
    found = predict_step(forward(product("c"), START, second), rates)
    assert [(bar.start, bar.end) for bar in found.to_host] == [
        (pytest.approx(1), pytest.approx(3)),
        (pytest.approx(3), pytest.approx(5)),
    ]


def test_nothing_is_predicted_without_copies_or_sizes():
    rates = Rates(1e12, 1e9)
    assert predict_step(forward(product("c")), rates) is None
    assert predict_step(forward(START, WAIT), rates) is None


def test_a_dumped_step_hides_its_copies_behind_slow_compute(tmp_path):
    options = {"compiler": "aot_eager", "dump": str(tmp_path), "offload": "checkpoints"}
    model = Blocks(4)
    step(torch.compile(model, backend="glue", options=options), model, torch.randn(4, 8))
    graphs = read_folder(tmp_path).graphs[0].passes[-1].graphs("after")
    slow = predict_step(graphs, Rates(1e6, 1e9))
    assert slow.unknown == 0
    assert len(slow.to_host) == len(slow.from_host) == 3
    assert slow.waits == ()
    assert all(bar.start >= slow.backward for bar in slow.from_host)
    fast = predict_step(graphs, Rates(1e15, 1e3))
    assert fast.waits
