"""share_layers: what is alike is called, what differs is not, and no bit of a step changes."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from glue_compiler.fx.training_pair import TrainingPair
from glue_compiler.ops.offload import TRANSFERS
from glue_compiler.testing import capture, run_pass
from tests.captured import compile_with_glue
from tests.passes.share_layers.models import Layer, Layers, ids, layers, run_both, step

SHARED = {"passes": {"share_layers": True}}


def test_equal_layers_call_one_body_in_forward_and_one_in_backward():
    report = run_both(Layers(layers()))
    assert report.counts["bodies"] == 2
    assert report.counts["calls"] >= 2 * 10


def test_it_is_off_until_it_is_asked_for():
    run = compile_with_glue(Layers(layers()))
    run.call(ids())
    assert all(report.name != "share_layers" for report in run.report.passes)


@pytest.mark.slow
def test_two_kinds_of_layers_are_two_bodies():
    (one,) = capture(Layers(layers(16)), ids(), stage="partitioned")
    (two,) = capture(Layers([*layers(8), *layers(8, eps=1e-5)]), ids(), stage="partitioned")
    assert run_pass(two, "share_layers").counts["bodies"] == run_pass(one, "share_layers").counts["bodies"] + 1


def test_kinds_of_layers_may_take_turns():
    assert run_both(Layers([Layer(eps=1e-6 if i % 3 else 1e-5) for i in range(16)])).changed


def test_a_layer_with_another_constant_is_not_called_as_its_neighbours_are():
    model = Layers(layers())
    model.layers[4].eps = 1e-5
    (pair,) = capture(model.double(), ids(), stage="partitioned")
    run = run_pass(pair, "share_layers")
    assert run.report.changed
    left = [node.name for node in pair.forward.graph.nodes if node.target is torch.ops.aten.rsqrt.default]
    assert "rsqrt_4" in left
    assert "rsqrt_5" not in left


def test_a_few_operators_are_not_worth_a_body():
    model = nn.Sequential(
        *(nn.Linear(4, 4) for _ in range(20)), *(nn.Tanh() if i % 2 else nn.GELU() for i in range(90))
    ).double()
    run = compile_with_glue(model, passes={"share_layers": True})
    run.call(torch.randn(2, 4, dtype=torch.float64)).sum().backward()
    report = run.report.passes[-1]
    assert report.name == "share_layers"
    assert all("again" in skip.reason for skip in report.skips)


def test_frozen_layers_have_bodies_of_their_own_and_no_gradients():
    model = Layers(layers(10))
    for layer in model.layers[:5]:
        layer.requires_grad_(False)
    model.embed.requires_grad_(False)
    assert run_both(model).changed


def test_each_layer_draws_its_own_random_numbers():
    assert run_both(Layers(layers(p=0.5))).counts["calls"] >= 2 * 10


def test_checkpointed_layers_draw_the_same_numbers_again():
    class Checkpointed(Layer):
        def forward(self, x, table):
            return checkpoint(super().forward, x, table, use_reentrant=False)

    assert run_both(Layers([Checkpointed(p=0.5) for _ in range(8)])).changed


def test_buffers_that_layers_update_are_updated():
    class Counts(Layer):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x, table):
            x = super().forward(x, table)
            self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
            return x + self.mean

    assert run_both(Layers([Counts() for _ in range(8)]), ids(), ids()).changed


@pytest.mark.slow
def test_what_layers_return_to_the_caller_is_memory_of_its_own():
    class Returns(Layers):
        def forward(self, numbers):
            x, table = self.embed(numbers), torch.ones(numbers.shape[1], 1)
            every = [x]
            for layer in self.layers:
                x = layer(x, table)
                every += [x, x.transpose(0, 1), x.detach()[0]]
            return tuple(every)

    model = Returns(layers()).double()
    assert run_both(model, unshared=True).changed
    torch._dynamo.reset()
    found = torch.compile(model, backend="glue", options={**SHARED, "compiler": "aot_eager", "strict": True})(ids())
    assert found[2].untyped_storage().data_ptr() == found[1].untyped_storage().data_ptr()  # as in eager
    assert found[4].untyped_storage().data_ptr() != found[1].untyped_storage().data_ptr()


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [True, None])
def test_other_lengths(dynamic):
    assert run_both(Layers(layers()), ids(5), ids(7), ids(6), dynamic=dynamic).changed


def test_saved_values_keep_their_names():
    (pair,) = capture(Layers(layers()), ids(), stage="partitioned")
    before = [node.name for node in pair.saved]
    assert run_pass(pair, "share_layers").report.changed
    assert [node.name for node in pair.saved] == before


@pytest.mark.slow
def test_limited_fuel_shares_the_first_bodies_only():
    (pair,) = capture(Layers(layers()), ids(), stage="partitioned")
    run = run_pass(pair, "share_layers", fuel=1)
    assert run.counts["bodies"] == 1
    assert len(run.rewrites) == 1


def test_graphs_with_copies_in_flight_are_left_alone():
    (pair,) = capture(Layers(layers()), ids(), stage="partitioned")
    (start,) = (target for target in TRANSFERS if target.name() == "glue::offload_start")
    saved = next(node for node in pair.saved if node.op != "placeholder")
    with pair.forward.graph.inserting_after(saved):
        copy = pair.forward.graph.call_function(start, (saved, None, -1))
    copy.meta["val"] = saved.meta["val"]
    run = run_pass(pair, "share_layers")
    assert any("copies to the host" in reason for reason in run.skip_reasons)
    assert run.counts["bodies"] == 1  # backward's


def test_a_write_is_no_part_of_a_body():
    graph = fx.Graph()
    x, *weights = (graph.placeholder(name) for name in ("x", *(f"w{i}" for i in range(8))))
    value = x
    for node in (x, *weights):
        node.meta["val"] = torch.empty(4, 4, device="meta")
    for weight in weights:
        for target in (torch.ops.aten.mul.Tensor, torch.ops.aten.add_.Tensor, *[torch.ops.aten.add.Tensor] * 30):
            value = graph.call_function(target, (value, weight))
            value.meta["val"] = torch.empty(4, 4, device="meta")
    graph.output((value,))
    pair = TrainingPair(fx.GraphModule(nn.Module(), graph), fx.GraphModule(nn.Module(), fx.Graph()), 1)
    pair.backward.graph.output(())
    run = run_pass(pair, "share_layers")
    assert any("may do more" in reason for reason in run.skip_reasons)
    writes = [node for node in pair.forward.graph.nodes if node.target is torch.ops.aten.add_.Tensor]
    assert len(writes) == 8


@pytest.mark.slow
def test_inductor_compiles_one_body_and_computes_the_same():
    model = Layers(layers(6))
    inputs = ids()
    plain = step(model, torch.compile(model, backend="inductor"), inputs)
    torch._dynamo.reset()
    shared = step(model, torch.compile(model, backend="glue", options={**SHARED, "strict": True}), inputs)
    for one, other in zip(plain, shared, strict=True):
        torch.testing.assert_close(one, other)
