"""offload_checkpoints(): the same copies around eager checkpoints."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import glue_compiler
from glue_compiler.errors import GlueWarning
from glue_compiler.ops import copy_engine
from tests.passes.overlap_offload.models import Block, Blocks, equal, gradients, step
from tests.slow import slow_but

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def copies(monkeypatch):
    """What the engine did, in order: ``("offload" | "drop" | "reload" | "wait", tensor's address)``."""
    events = []
    for name, method in {
        "offload": "start_offload",
        "drop": "wait_offload",
        "reload": "start_reload",
        "wait": "wait_reload",
    }.items():
        original = getattr(copy_engine.CopyEngine, method)

        def record(self, tensor, *rest, name=name, original=original):
            result = original(self, tensor, *rest)
            events.append(name)
            return result

        monkeypatch.setattr(copy_engine.CopyEngine, method, record)
    return events


def in_context(model):
    with glue_compiler.offload_checkpoints():
        return step(model, model, X)


def forward_in_context(model):
    model.zero_grad()
    with glue_compiler.offload_checkpoints():
        out = model(X)
    out.square().sum().backward()
    return [out.detach(), *gradients(model)]


@pytest.mark.parametrize("reentrant", [False, True])
def test_all_inputs_but_the_last_move_and_no_bit_changes(copies, reentrant):
    class Reentrant(Blocks):
        def forward(self, x):
            x = self.embed(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return self.head(x)

    model = Reentrant(5)
    expected = step(model, model, X)
    assert equal(expected, forward_in_context(model))
    assert copies.count("offload") == copies.count("reload") == 4
    copies.clear()
    assert equal(expected, in_context(model))
    assert copies.count("offload") == copies.count("reload") == 4
    # What the head saves comes after all regions: from there on, inputs are on the host only.
    assert copies[: copies.index("reload")].count("drop") == 4


def test_without_anything_saved_behind_the_regions_the_last_two_are_used_from_where_they_are(copies):
    model = Blocks(5)

    def step_of(context):
        model.zero_grad()
        x = model.embed(X)
        with context:
            for block in model.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            x.sum().backward()
        return gradients(model)

    expected = step_of(contextlib.nullcontext())
    assert equal(step_of(glue_compiler.offload_checkpoints()), expected)
    assert (copies.count("offload"), copies.count("reload")) == (4, 2)


def test_layers_compiled_one_by_one(copies):
    model = Blocks(4)
    expected = step(model, model, X)
    for block in model.blocks:
        block.compile(backend="glue", options={"compiler": "aot_eager"})
    assert equal(expected, in_context(model))
    assert copies.count("offload") == 3


class CheckpointInside(Block):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Scaled(CheckpointInside):
    """Saves a small value besides its input."""

    def forward(self, x):
        return super().forward(x) * x.mean().exp()


def layers_of(kind, count=5):
    """``count`` layers between an embedding and a head; and the layers."""
    torch.manual_seed(0)
    embed, layers, head = torch.nn.Linear(8, 8), [kind(8) for _ in range(count)], torch.nn.Linear(8, 3)
    model = torch.nn.Sequential(embed, *layers, head)
    return model, layers


@pytest.mark.parametrize("compiler", slow_but(("aot_eager",), ["aot_eager", "inductor"]))
@pytest.mark.parametrize("kind", [CheckpointInside, Scaled])
def test_layers_with_the_checkpoint_inside_of_what_is_compiled(copies, kind, compiler):
    """transformers 5.23 (not 5.17) checkpoints in a layer's forward, so that a compiled layer contains it."""
    model, layers = layers_of(kind)
    for layer in layers:
        layer.compile(fullgraph=True, backend=compiler)
    expected = step(model, model, X)
    assert copies == []
    for _ in range(2):
        copies.clear()
        assert equal(in_context(model), expected)
        assert (copies.count("offload"), copies.count("reload")) == (4, 4)
        forward, backward = copies[: copies.index("reload")], copies[copies.index("reload") :]
        assert forward.count("drop") == 4
        assert backward.index("wait") > 0


def test_compiled_layers_that_save_what_they_compute_are_no_regions(copies):
    model, layers = layers_of(Block)
    expected = step(model, model, X)
    for layer in layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    assert equal(in_context(model), expected)
    assert "offload" not in copies


class WithGaps(torch.autograd.Function):
    """The same values on every second place of memory: no view, and not dense."""

    @staticmethod
    def forward(ctx, x):
        return torch.empty_strided(x.shape, [2 * n for n in x.stride()]).copy_(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_an_input_with_gaps_stays(copies):
    """Compiled code relies on the strides that it has seen; what comes back from the host is dense."""

    class Gaps(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(CheckpointInside(8) for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = layer(WithGaps.apply(x))
            return x

    model = Gaps()
    for layer in model.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    x = X.clone().requires_grad_()
    expected = step(model, model, x)
    with glue_compiler.offload_checkpoints():
        assert equal(step(model, model, x), expected)
    assert copies == []


def test_at_most_two_in_flight_and_two_alive(copies):
    forward_in_context(Blocks(6))
    in_flight = alive = most_in_flight = most_alive = 0
    for event in copies:
        in_flight += {"offload": 1, "drop": -1}.get(event, 0)
        # take() waits once for each region; what it took before is done by then.
        alive += event == "reload"
        most_in_flight, most_alive = max(most_in_flight, in_flight), max(most_alive, alive)
        alive -= event == "wait" and alive > 1
    assert (most_in_flight, most_alive) == (2, 2)


def test_the_next_reload_starts_before_this_ones_wait(copies):
    forward_in_context(Blocks(4))
    backward = copies[copies.index("reload") :]
    # The last region's input stayed; taking it starts the reload of the one before.
    assert [e for e in backward if e in ("reload", "wait")] == ["reload", "wait"] * 3 + ["wait"]


def test_tables_that_need_no_gradient_and_leaves_stay(copies):
    table, leaf = torch.randn(4, 8), torch.randn(4, 8, requires_grad=True)
    x = leaf
    with glue_compiler.offload_checkpoints():
        for _ in range(3):
            x = checkpoint(lambda x, t: (x * t).sin(), x, table, use_reentrant=False)
        x.sum().backward()
    assert copies.count("offload") == 1  # the middle one: the first is a leaf, the last is the last


def test_values_saved_outside_of_checkpoints_stay(copies):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
    in_context(model)
    assert copies == []


def test_an_input_changed_in_place_after_the_region_read_it_is_an_error(copies):
    def forward():
        x = torch.ones(4, 8, requires_grad=True) * 2
        y = checkpoint(torch.sin, x, use_reentrant=False)
        x.mul_(3)
        return checkpoint(torch.sin, y, use_reentrant=False).sum() + checkpoint(torch.cos, y, use_reentrant=False).sum()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"), glue_compiler.offload_checkpoints():
        forward().backward()


def test_a_change_after_the_copy_is_done_changes_nothing():
    def run(context, change):
        leaf = torch.ones(4, 8, requires_grad=True)
        first = x = leaf * 2
        with context:
            for _ in range(5):
                x = checkpoint(torch.sin, x, use_reentrant=False)
        if change:
            first.data.mul_(3)
        x.sum().backward()
        return leaf.grad

    assert torch.equal(run(glue_compiler.offload_checkpoints(), True), run(contextlib.nullcontext(), False))


def test_on_a_device_without_copies_inputs_stay_with_one_warning(copies):
    model = Blocks(4).to("meta")
    with pytest.warns(GlueWarning, match="not for 'meta'") as caught, glue_compiler.offload_checkpoints():
        model(X.to("meta")).sum().backward()
    assert len([one for one in caught if one.category is GlueWarning]) == 1
    assert copies == []
    assert all(p.grad is not None for p in model.parameters())


def test_two_forwards_then_two_backwards_in_either_order():
    model = Blocks(4)
    for first in (0, 1):

        def two(context, first=first):
            model.zero_grad()
            with context:
                losses = [model(x).square().sum() for x in (X, 2 * X)]
                losses[first].backward()
                losses[1 - first].backward()
            return gradients(model)

        assert equal(two(contextlib.nullcontext()), two(glue_compiler.offload_checkpoints()))


def test_a_forward_without_backward_and_a_failed_backward_leave_nothing(monkeypatch):
    model = Blocks(4)
    expected = step(model, model, X)
    pool = copy_engine.engine.pool
    with glue_compiler.offload_checkpoints():
        model(X)

    def stop(*_):
        raise RuntimeError("stop")

    with monkeypatch.context() as patch:
        patch.setattr(copy_engine.CopyEngine, "start_reload", stop)
        with pytest.raises(RuntimeError, match="stop"):
            in_context(model)
    gc.collect()
    assert all(block.is_free for block in pool._blocks.values())
    assert equal(in_context(model), expected)


def compiled_layers():
    layers = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Sigmoid()) for _ in range(3)]
    for layer in layers:
        layer.compile(backend="aot_eager")
    return torch.nn.Sequential(*layers)


SAVED_OUTPUTS = {
    "eager": lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Sigmoid()),
    "behind the regions": lambda: torch.nn.Sequential(Blocks(3), torch.nn.Softmax(-1)),
    "of compiled layers": compiled_layers,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(("of compiled layers",), SAVED_OUTPUTS))
def test_a_forward_without_backward_leaves_none_of_its_graph(name):
    """A node that saves its own output must not hold it as the program does, with its way back to the node."""
    model, freed = SAVED_OUTPUTS[name](), []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            context.watched = Watch()
            freed.append(weakref.ref(context.watched))
            return x.clone()

        @staticmethod
        def backward(context, gradient):
            return gradient

    class Watch:
        pass

    with glue_compiler.offload_checkpoints():
        out = model(Watched.apply(X.clone().requires_grad_()))
    gc.collect()
    assert freed[0]() is not None
    del out
    gc.collect()
    assert freed[0]() is None


@pytest.mark.parametrize("change", [torch.Tensor.zero_, torch.Tensor.clone])
def test_a_saved_value_that_was_changed_in_place_is_an_error_as_without_the_context(change):
    def gradient(context):
        x = X.clone().requires_grad_()
        with context:
            y = x.exp()
        with torch.no_grad():
            change(y)
        y.sum().backward()
        return x.grad

    if change is torch.Tensor.clone:
        assert torch.equal(gradient(glue_compiler.offload_checkpoints()), gradient(contextlib.nullcontext()))
        return
    for context in (contextlib.nullcontext(), glue_compiler.offload_checkpoints()):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradient(context)


def test_a_retained_graph_runs_backward_twice():
    model = Blocks(3)

    def twice(context):
        model.zero_grad()
        with context:
            value = model(X).square().sum()
        value.backward(retain_graph=True)
        value.backward()
        return gradients(model)

    assert equal(twice(contextlib.nullcontext()), twice(glue_compiler.offload_checkpoints()))
