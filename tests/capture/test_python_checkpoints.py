"""A checkpoint that Python calls, as a graph ends in its body: in regions its body is compiled, else told."""

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from glue_compiler.compat import python_checkpoints
from glue_compiler.compat.parts import ANY
from glue_compiler.ops.copy_engine import CopyEngine
from tests.capture.test_layer_regions import Checkpointed, Layer, Run, WithHead, ids, layers

REASON = "a graph ends in the body of a checkpoint"


class Reentrant(Layer):
    def __call__(self, *args, **kwargs):
        call = functools.partial(super().__call__, **kwargs)
        return checkpoint(call, *args, use_reentrant=True) if self.training else call(*args)


class WithDropout(Checkpointed):
    def forward(self, x, mask=None):
        return nn.functional.dropout(super().forward(x, mask), 0.2)


def hooked(kind=Checkpointed, count=5):
    """Layers with a hook inside of their checkpoint that Dynamo does not trace, as those of FSDP2."""
    made = layers(count, kind)
    for layer in made:
        layer.calls = 0
        layer.register_forward_pre_hook(count_call)
    return WithHead(made)


@torch._dynamo.disable
def count_call(module, args):
    module.calls += 1


@pytest.mark.parametrize("kind", [Checkpointed, pytest.param(Reentrant, marks=pytest.mark.slow)])
def test_layers_are_compiled_once_for_a_length_and_once_for_all_others(kind):
    run = Run(hooked(kind))
    for length in (12, 17, 9):
        run.step(ids(length))
    assert [layer.calls for layer in run.model.decoder.layers] == [3 * 2] * 5  # forward and recomputation
    # A reentrant one's forward has no gradients.
    assert run.regions == [f"{kind.__name__} x5"] * (2 if kind is Checkpointed else 4)
    assert {graph.region for graph in run.session.graphs} == {None, f"{kind.__name__} x5"}
    assert not any(REASON in event.reason for event in run.session.capture_events)


@pytest.mark.slow
def test_a_break_deep_in_a_layer():
    class Broken(Checkpointed):
        def forward(self, x, mask=None):
            return x + broken(super().forward(x, mask))

    run = Run(WithHead(layers(5, Broken))).step(ids()).step(ids(17)).step(ids(9))
    assert set(run.regions) == {"Broken x5"}


def test_where_the_loop_is_the_compiled_functions_own():
    run = Run(hooked(count=4).decoder).step(ids()).step(ids(17))
    assert run.regions == ["Checkpointed x4"] * 2
    assert [graph.region for graph in run.session.graphs[:3]] == [None, "Checkpointed x4", None]


@pytest.mark.slow
def test_hooks_around_a_layer_that_is_not_checkpointed():
    run = Run(hooked(Layer, 4)).step(ids()).step(ids(17))
    assert run.regions == ["Layer x4"] * 2


class Counts(Checkpointed):
    def __init__(self, index=0):
        super().__init__(index)
        self.register_buffer("calls_seen", torch.zeros(()))

    def forward(self, x, mask=None):
        y = super().forward(x, mask)
        with torch.no_grad():
            self.calls_seen += 1  # behind the last value that is saved, where eager code stops when it computes again
        return y


def test_a_body_that_writes_runs_as_in_eager():
    run = Run(hooked(Counts, 4)).step(ids()).step(ids(17))
    seen = [[layer.calls_seen.item() for layer in model.decoder.layers] for model in (run.model, run.eager)]
    assert seen[0] == seen[1] == [2] * 4
    assert any("writes memory from outside" in event.reason for event in run.session.capture_events)


class Tells(Layer):
    """Python's objects change behind a break, in front of what backward needs."""

    def body(self, x, mask):
        torch._dynamo.graph_break()
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x, mask) * (1 + 0.01 * self.calls)

    def forward(self, x, mask=None):
        return checkpoint(self.body, x, mask, use_reentrant=False)


class HooksATensor(Layer):
    def body(self, x, mask):
        torch._dynamo.graph_break()
        x.register_hook(lambda gradient: gradient * 2)
        return super().forward(x, mask)

    forward = Tells.forward


@pytest.mark.parametrize("kind", [Tells, HooksATensor])
def test_a_body_that_changes_pythons_objects_is_pythons(kind):
    run = Run(WithHead(layers(4, kind))).step(ids()).step(ids()).step(ids(17))
    seen = [[getattr(layer, "calls", None) for layer in model.decoder.layers] for model in (run.model, run.eager)]
    assert seen[0] == seen[1]
    assert any("changes Python's objects" in event.reason for event in run.session.capture_events)


class TellsFromWithin(Tells):
    """What changes Python's objects is compiled by itself, whole, and called in the checkpoint's body."""

    def __init__(self, index=0):
        super().__init__(index)
        self.inner = torch.compile(self.told, backend="glue", options={"regions": "whole", "compiler": "aot_eager"})

    def told(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        return x * (1 + 0.01 * self.calls)

    def body(self, x, mask):
        torch._dynamo.graph_break()
        return Layer.forward(self, self.inner(x), mask)


def test_whole_code_in_a_body_that_changes_pythons_objects_is_pythons():
    torch.manual_seed(0)
    model, eager = TellsFromWithin(), TellsFromWithin()
    eager.load_state_dict(model.state_dict())
    eager.inner = eager.told
    call = torch.compile(model, backend="glue", options={"compiler": "aot_eager"})
    for length in (5, 5, 7):
        x = torch.randn(1, length, model.width)
        found, expected = (each(x).square().sum() for each in (call, eager))
        torch.testing.assert_close(found, expected)
        found.backward(), expected.backward()
        for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
    assert model.calls == eager.calls


@pytest.mark.slow
def test_two_lengths_before_one_backward():
    """The second one's forward compiles for all lengths; the first one is computed again as it was computed."""
    run = Run(hooked())
    for model, call in ((run.model, run.compiled), (run.eager, run.eager)):
        model.zero_grad()
        (call(ids(12)) + call(ids(17)) * 2).backward()
    for mine, theirs in zip(run.model.parameters(), run.eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-12)
    run.look(ids(9)).step(ids(14))


@pytest.mark.slow
def test_random_numbers_are_drawn_again():
    run = Run(hooked(WithDropout))
    for length in (12, 17, 12):
        torch.manual_seed(length)
        mine = run._step(run.model, run.compiled, ids(length))
        torch.manual_seed(length)
        theirs = run._step(run.eager, run.eager, ids(length))
        for name, want in theirs.items():
            torch.testing.assert_close(mine[name], want, rtol=1e-10, atol=1e-12, msg=name)


class Numbered(WithHead):
    """Each layer has a number of its own, and all of them lie in a checkpoint that Python calls."""

    def forward(self, ids):
        for place, layer in enumerate(self.decoder.layers):
            layer.number = 0.5 + 0.1 * place
        return super().forward(ids)


class WithNumber(Layer):
    def forward(self, x, mask=None):
        return super().forward(x * self.number, mask)

    def __call__(self, x, mask=None):
        return checkpoint(super().__call__, x, mask, use_reentrant=False)


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, ids):
        return checkpoint(self.inner, ids, use_reentrant=False)


@pytest.mark.parametrize("around", [False, True], ids=["layers", "all of them, too"])
def test_what_is_computed_again_meets_the_code_of_its_forward(around):
    """As many compiles as would end the sharing of compiled code, were it not for the checkpoints."""
    model = Numbered(layers(6, WithNumber))
    for layer in model.decoder.layers:
        layer.calls = 0
        layer.register_forward_pre_hook(count_call)
    run = Run(Around(model) if around else model)
    for length in (12, 12, 9, 17):
        run.step(ids(length))
    assert "WithNumber x6" in run.regions


class OnTheHost(Layer):
    """As with transformers' ``offload=True``: what a checkpoint saves is copied, in a context that no graph has."""

    pin_memory = False

    def __call__(self, *args, **kwargs):
        with torch.autograd.graph.save_on_cpu(pin_memory=self.pin_memory):
            return checkpoint(super().__call__, *args, use_reentrant=False, **kwargs)


def two_steps(model):
    return Run(model).step(ids()).step(ids(17))


@pytest.mark.parametrize("model", [hooked, functools.partial(hooked, Layer)], ids=["checkpointed", "plain"])
def test_layers_are_regions_where_a_graph_ends_in_one(model):
    run = two_steps(model())
    assert len(run.regions) == 2
    assert not any(REASON in event.reason for event in run.session.capture_events)


def test_a_checkpoint_in_a_context_is_compiled():
    run = two_steps(WithHead(layers(5, OnTheHost)))
    assert max(graph.nodes_before for graph in run.session.graphs) > 10
    assert not any(REASON in event.reason for event in run.session.capture_events)


class OnThePinnedHost(OnTheHost):
    pin_memory = True


@pytest.fixture
def copies(monkeypatch):
    """The engine's, to the host and back."""
    done = {"start_offload": 0, "start_reload": 0}
    for name in done:
        original = getattr(CopyEngine, name)

        def count(self, *args, name=name, original=original):
            done[name] += 1
            return original(self, *args)

        monkeypatch.setattr(CopyEngine, name, count)
    return done


def test_what_such_a_context_would_copy_in_turn_moves_beside_compute(copies):
    two_steps(WithHead(layers(7, OnThePinnedHost))).step(ids(9))
    # Three steps, and each has the last three inputs still on the device when its backward comes to them.
    assert copies == {"start_offload": 3 * 6, "start_reload": 3 * 4}


def test_a_graph_whose_backward_comes_after_another_forward_has_its_own_inputs(copies):
    run = two_steps(WithHead(layers(7, OnThePinnedHost)))
    found = []
    for model, call in ((run.model, run.compiled), (run.eager, run.eager)):
        model.zero_grad()
        both = [call(ids(length)) for length in (12, 17)]
        both[0].sum().backward()
        both[1].square().sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)
    assert copies["start_reload"] > 0


@pytest.mark.parametrize("by_name", [False, True])
def test_a_checkpoint_that_is_given_one_tensor_twice(by_name):
    class Twice(OnThePinnedHost):
        def __call__(self, x, mask):
            def call(x, other):
                return super(OnTheHost, self).__call__(x * other.tanh(), mask)

            with torch.autograd.graph.save_on_cpu(pin_memory=True):
                twice = {"other": x} if by_name else {}
                return checkpoint(call, *(x,) if by_name else (x, x), use_reentrant=False, **twice)

    run = two_steps(WithHead(layers(5, Twice)))
    assert max(graph.nodes_before for graph in run.session.graphs) > 10


@pytest.mark.parametrize("hooks", ["pageable", "of another"])
def test_other_hooks_are_left_alone(copies, hooks):
    class Other(Layer):
        def __call__(self, *args, **kwargs):
            with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
                return checkpoint(super().__call__, *args, use_reentrant=False, **kwargs)

    two_steps(WithHead(layers(5, OnTheHost if hooks == "pageable" else Other)))
    assert not any(copies.values())


def test_whole_graphs_leave_it_to_torch_and_say_so():
    run = Run(hooked(), {"regions": "whole"}).step(ids()).step(ids(20))
    assert max(graph.nodes_before for graph in run.session.graphs) < 10
    assert [event.reason.startswith(REASON) for event in run.session.capture_events].count(True) == 1


def test_outside_of_compiled_code_a_checkpoint_is_torchs_own(monkeypatch):
    Run(hooked()).step(ids())

    def compiled(*_):
        raise AssertionError("asked")

    monkeypatch.setattr(python_checkpoints, "_with_callback", compiled)
    x = torch.randn(3, requires_grad=True)
    checkpoint(torch.sin, x, use_reentrant=False).sum().backward()
    torch.testing.assert_close(x.grad, x.cos())
    other = torch.compile(lambda x: checkpoint(broken, x, use_reentrant=False), backend="eager")
    torch.testing.assert_close(other(x), x.sin())


def broken(x):
    torch._dynamo.graph_break()
    return x.sin()


def test_a_torch_whose_checkpoint_has_moved_is_left_alone(monkeypatch):
    monkeypatch.setattr(python_checkpoints.CHECKPOINTS, "_is_available", None)
    monkeypatch.setattr(python_checkpoints.CHECKPOINTS, "parts", {"torch._compile:moved": ANY})
    monkeypatch.delattr(torch.utils.checkpoint.checkpoint.__wrapped__, "__dynamo_disable", raising=False)
    with pytest.warns(UserWarning, match="compile of what a checkpoint in Python calls is off"):
        run = Run(hooked()).step(ids())
    assert run.regions == []
