"""share_layers: what is alike is called, what differs is not, and no bit of a step changes."""

from __future__ import annotations

import functools
import operator
import runpy

import pytest
import torch
from torch import fx, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from glue_compiler.compat.operators import computes_alone
from glue_compiler.fx.training_pair import TrainingPair
from glue_compiler.passes.share_layers.steps import described, draws_numbers
from glue_compiler.testing import capture, run_pass
from tests.captured import compile_with_glue
from tests.passes.share_layers.models import Layer, Layers, ids, layers, run_both, step

WHOLE = {"regions": "whole"}


def test_equal_layers_call_one_body_in_forward_and_one_in_backward():
    report = run_both(Layers(layers()))
    assert report.counts["bodies"] == 2
    assert report.counts["calls"] >= 2 * 10


@pytest.mark.parametrize("is_on", [True, False])
def test_it_is_on_until_it_is_switched_off(is_on):
    run = compile_with_glue(Layers(layers()), passes={} if is_on else {"share_layers": False})
    run.call(ids())
    assert any(report.name == "share_layers" and report.changed for report in run.report.passes) is is_on


def test_a_small_step_is_left_to_torchs_partitioner():
    run = compile_with_glue(Layers(layers(3)))
    run.call(ids())
    assert all(report.name != "share_layers" for report in run.report.passes)


@pytest.mark.slow
def test_two_kinds_of_layers_are_two_bodies():
    (one,) = capture(Layers(layers(16)), ids(), stage="partitioned")
    (two,) = capture(Layers([*layers(8), *layers(8, eps=1e-5)]), ids(), stage="partitioned")
    assert run_pass(two, "share_layers").counts["bodies"] == run_pass(one, "share_layers").counts["bodies"] + 1


@pytest.mark.slow
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
    run = compile_with_glue(model)
    run.call(torch.randn(2, 4, dtype=torch.float64)).sum().backward()
    report = run.report.passes[-1]
    assert report.name == "share_layers"
    assert report.skips
    assert all("does nothing twice in pieces so long" in skip.reason for skip in report.skips)


def test_frozen_layers_have_bodies_of_their_own_and_no_gradients():
    model = Layers(layers(10))
    for layer in model.layers[:5]:
        layer.requires_grad_(False)
    model.embed.requires_grad_(False)
    assert run_both(model).changed


def test_each_layer_draws_its_own_random_numbers():
    assert run_both(Layers(layers(p=0.5))).counts["calls"] >= 2 * 10


@pytest.mark.slow
def test_checkpointed_layers_draw_the_same_numbers_again():
    class Checkpointed(Layer):
        def forward(self, x, table):
            return checkpoint(super().forward, x, table, use_reentrant=False)

    assert run_both(Layers([Checkpointed(p=0.5) for _ in range(8)])).changed


class Attending(Layer):
    """A layer with attention under a checkpoint, for which torch keeps a state of the random generator."""

    def attend(self, x, table):
        x = super().forward(x, table)
        four = x[:, None]
        return x + nn.functional.scaled_dot_product_attention(four, four, four, dropout_p=self.p)[:, 0]

    def forward(self, x, table):
        return checkpoint(self.attend, x, table, use_reentrant=False)


def test_attention_under_a_checkpoint_needs_no_random_state():
    report = run_both(Layers([Attending() for _ in range(8)]))
    assert report.counts["states"] == 8
    assert report.counts["bodies"] == 2


@pytest.mark.slow
def test_attention_with_dropout_keeps_its_random_state():
    report = run_both(Layers([Attending(p=0.3) for _ in range(8)]))
    assert report.counts["states"] == 0
    assert report.changed


def test_dropout_that_is_given_by_name_is_seen():
    target = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert draws_numbers(target, (), {"dropout_p": 0.1})
    assert not draws_numbers(target, (), {})
    assert draws_numbers(torch.ops.aten.bernoulli.default, (), {})


class Filled(Layer):
    """One tensor of a constant for all layers, once equal ones are merged."""

    def forward(self, x, table):
        return super().forward(x, table) * torch.full((8,), 0.5, dtype=x.dtype)


@pytest.mark.slow
def test_constants_are_made_in_bodies():
    assert run_both(Layers([Filled() for _ in range(12)])).changed
    (pair,) = capture(Layers([Filled() for _ in range(12)]).double(), ids(), stage="partitioned")
    assert run_pass(pair, "share_layers", compiler="aot_eager").counts["bodies"] >= 1
    body = torch.ops.higher_order.invoke_subgraph
    graphs = pair.forward.graph, pair.backward.graph
    calls = [call for graph in graphs for call in graph.find_nodes(op="call_function", target=body)]
    operands = [str(operand.target) for call in calls for operand in call.all_input_nodes]
    assert len(calls) > 8
    assert "aten.full.default" not in operands


FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def attention_with_a_generator(which, dropout):
    """A graph of an attention that runs with the generator that is its input, as one on a GPU."""
    graph = fx.Graph()
    inputs = [graph.placeholder(name) for name in ("query", "key", "value")]
    for node in inputs:
        node.meta["val"] = torch.randn(1, 2, 8, 4)
    generator = graph.placeholder(f"{which}_rng_state_0")
    generator.meta["val"] = torch.Generator()
    runs = torch._prims.rng_prims.graphsafe_run_with_rng_state
    kept = graph.call_function(runs, (FLASH, *inputs, dropout), {"rng_state": generator})
    out = graph.call_function(operator.getitem, (kept, 0))
    out.meta["val"] = torch.randn(1, 2, 8, 4)
    graph.output((out,))
    return fx.GraphModule(nn.Module(), graph)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_with_a_generator_of_its_own_runs_without_it(dropout):
    """Both graphs are given one generator less: AOTAutograd counts forward's, Inductor takes none without a use."""
    pair = TrainingPair(*(attention_with_a_generator(which, dropout) for which in ("fwd", "bwd")), 1)
    report = run_pass(pair, "share_layers", compiler="aot_eager")
    assert report.counts["states"] == (0 if dropout else 1)
    for gm in (pair.forward, pair.backward):
        inputs = [node.name for node in gm.graph.find_nodes(op="placeholder")]
        assert inputs[:3] == ["query", "key", "value"]
        assert len(inputs) == (4 if dropout else 3)
        plain = gm.graph.find_nodes(op="call_function", target=FLASH)
        assert [tuple(value.shape) for node in plain for value in node.meta["val"]] == (
            [] if dropout else [(1, 2, 8, 4), (1, 2, 8)]
        )


def test_a_generator_of_one_graph_alone_stays():
    """Backward would be given one that it does not take."""
    backward = attention_with_a_generator("bwd", 0.1)
    pair = TrainingPair(attention_with_a_generator("fwd", 0.0), backward, 1)
    assert run_pass(pair, "share_layers", compiler="aot_eager").counts["states"] == 0
    assert len(pair.forward.graph.find_nodes(op="placeholder")) == 4


@pytest.mark.slow
def test_buffers_that_layers_update_are_updated():
    class Counts(Layer):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x, table):
            x = super().forward(x, table)
            self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
            return x + self.mean

    # Eager adds one of these up in another order on torch 2.11.
    assert run_both(Layers([Counts() for _ in range(8)]), ids(), ids(), unshared=True).changed


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
    found = torch.compile(model, backend="glue", options={**WHOLE, "compiler": "aot_eager", "strict": True})(ids())
    assert found[2].untyped_storage().data_ptr() == found[1].untyped_storage().data_ptr()  # as in eager
    assert found[4].untyped_storage().data_ptr() != found[1].untyped_storage().data_ptr()


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [True, None])
def test_other_lengths(dynamic):
    assert run_both(Layers(layers()), ids(5), ids(7), ids(6), dynamic=dynamic).changed


@pytest.mark.slow
def test_what_comes_out_of_a_body_is_no_view_for_autograd():
    class Scaled(Layers):
        def forward(self, numbers):
            x, table = self.embed(numbers), torch.ones(numbers.shape[1], 1)
            for layer in self.layers:
                x = layer(x, table).clone()
                x[..., :1] = table * layer.scale[0]
            return x

    run = compile_with_glue(Scaled(layers()).double())
    found = run.call(ids())
    assert run.report.passes[-1].changed
    found.mul_(2).sum().backward()  # an error, if it were one


@pytest.mark.slow
def test_a_dump_has_the_bodies_of_both_graphs_and_runs(tmp_path, capsys):
    options = {**WHOLE, "compiler": "aot_eager", "dump": str(tmp_path)}
    step(model := Layers(layers()).double(), torch.compile(model, backend="glue", options=options), ids())
    (after,) = tmp_path.glob("*/*share_layers.after.py")
    text = after.read_text()
    assert "class shared_layer_forward_0" in text
    assert "class shared_layer_backward_0" in text
    runpy.run_path(str(after), run_name="__main__")
    assert "output 0" in capsys.readouterr().out


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_copies_in_flight_stay_between_bodies(compiler):
    def products_go_to_the_host(context, target, *args, **kwargs):
        products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_CPU_OFFLOAD if target in products else CheckpointPolicy.PREFER_RECOMPUTE

    policy = functools.partial(create_selective_checkpoint_contexts, products_go_to_the_host)

    class Checkpointed(Layer):
        def forward(self, x, table):
            return checkpoint(super().forward, x, table, use_reentrant=False, context_fn=policy)

    model = Layers([Checkpointed() for _ in range(10)]).double()
    run = compile_with_glue(model, compiler=compiler, fx_graph_cache=False)
    for got, want in zip(step(model, run.call, ids()), step(model, model, ids()), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    offload, share = (next(p for p in run.report.passes if p.name == n) for n in ("overlap_offload", "share_layers"))
    assert offload.counts["moved"] >= 10
    assert share.counts["bodies"] >= 1
    assert any("runs beside" in skip.reason for skip in share.skips)


class Stacked(nn.Module):
    """Layers whose weights are views of one tensor, from the start of its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(8, 8, 8))

    def forward(self, x):
        for weight in self.weights:
            y = x @ weight.as_strided(weight.shape, weight.stride(), 0)
            x = torch.tanh(y) * torch.sigmoid(x) + torch.exp(-y.square()) * y.cos()
        return x


def test_views_of_one_tensor_are_alike_if_their_memory_is_aligned_alike():
    rows = torch.empty(8, 9)  # of 36 bytes
    assert described(rows[0]) == described(rows[4])
    assert described(rows[0]) != described(rows[1])
    assert described(rows[0]) != described(rows[0:8, 0][:9])


def test_what_counts_from_the_start_of_a_storage_stays_outside():
    (pair,) = capture(Stacked(), torch.randn(3, 8), stage="partitioned")
    run = run_pass(pair, "share_layers")
    assert any("counts from the start" in reason for reason in run.skip_reasons)


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


@torch.library.custom_op("share_layers::packed_linear", mutates_args=())
def packed_linear(x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    return x @ packed.to(x.dtype).t()


@packed_linear.register_fake
def _(x, packed):
    return x.new_empty(*x.shape[:-1], packed.shape[0])


packed_linear.register_autograd(
    lambda ctx, gradient: (gradient @ ctx.saved_tensors[0].to(gradient.dtype), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
)


class PackedLayer(Layer):
    """Two of its weights are integers, as those of a base of 4 bits are."""

    def __init__(self):
        super().__init__()
        self.register_buffer("first", torch.randint(-2, 3, (16, 8), dtype=torch.int8))
        self.register_buffer("second", torch.randint(-2, 3, (8, 16), dtype=torch.int8))

    def forward(self, x, table):
        return super().forward(x + 0.1 * packed_linear(packed_linear(x, self.first).tanh(), self.second), table)


@pytest.mark.slow
def test_operators_of_other_packages_run_in_bodies():
    torch.manual_seed(0)
    model = Layers([PackedLayer() for _ in range(12)])
    run_both(model)
    (pair,) = capture(model, ids(), stage="partitioned")
    run_pass(pair, "share_layers")
    outside = [node for node in pair.forward.graph.nodes if node.target is torch.ops.share_layers.packed_linear.default]
    assert len(outside) <= 2 * 2  # of the first layer and the last, which may have no other alike


@pytest.mark.parametrize(
    ("operator", "expected"),
    [
        (torch.ops.aten.add.Tensor, True),
        (torch.ops.aten.view.default, True),
        (torch.ops.aten.add_.Tensor, False),
        (torch.ops.share_layers.packed_linear.default, True),
        (torch.ops._c10d_functional.all_reduce.default, False),
        (torch.ops.profiler._record_function_enter_new.default, False),
    ],
    ids=str,
)
def test_which_operators_compute_alone(operator, expected):
    assert computes_alone(operator) is expected


@pytest.mark.slow
def test_inductor_compiles_one_body_and_computes_the_same():
    model = Layers(layers(6))
    inputs = ids()
    plain = step(model, torch.compile(model, backend="inductor"), inputs)
    torch._dynamo.reset()
    shared = step(model, torch.compile(model, backend="glue", options={**WHOLE, "strict": True}), inputs)
    for one, other in zip(plain, shared, strict=True):
        torch.testing.assert_close(one, other)
