"""Layers that keep what backward needs beside layers that compute it again: results are those of eager, any mixture."""

import itertools
import re
import sys
import threading
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from glue_compiler.backend import GlueBackend
from glue_compiler.errors import GlueWarning
from glue_compiler.handoff import layer_variants
from glue_compiler.memory.layer_plan import SHARE
from glue_compiler.memory.layer_roles import Choice, Role
from glue_compiler.memory.moved_calls import Mover
from glue_compiler.ops.copy_engine import CopyEngine
from glue_compiler.report.session import Session
from tests.capture.test_layer_regions import Checkpointed, Decoder, Layer, Run, WithHead, ids, layers
from tests.memory.test_moved_calls import copies_of
from tests.slow import one_in


class Scripted:
    """A plan that keeps the calls whose numbers are given; ``moving`` on the host, as the ``inputs`` of some."""

    def __init__(self, keeping, moving=lambda n: False, inputs=lambda n: False):
        self.keeping, self.moving, self.inputs, self.numbers = keeping, moving, inputs, iter(range(10**6))
        self.asked, self.told, self.mover = [], [], Mover(CopyEngine(), least=1)
        self.moved = None

    def compiles(self):
        pass

    def before_call(self, call, role):
        return None

    def role(self, call):
        layer = call.layer
        self.asked.append((layer, str(call.kind), call.units))
        number = next(self.numbers)
        choice = Choice.MOVE if self.moving(number) else Choice.KEEP if self.keeping(number) else Choice.AGAIN
        moves_input, back = self.inputs(number), () if self.moved is None else (self.moved,)
        leaves = self.moved if choice is Choice.KEEP or moves_input else None
        self.moved = layer if choice is Choice.MOVE or moves_input else None
        return Role(choice, leaves, back, moves_input)

    def called(self, *_):
        pass

    def ran_out(self):
        self.keeping = self.moving = lambda _: False


@pytest.fixture
def planned(monkeypatch):
    """``planned(keeping, model)``: a run whose layers keep as scripted, and the script."""

    def make(keeping, model, moving=lambda n: False, inputs=lambda n: False, compiler="aot_eager", **how):
        plan = Scripted(keeping, moving, inputs)
        monkeypatch.setattr(layer_variants, "memory_on", lambda device: plan)
        monkeypatch.setattr(layer_variants, "LayerPlan", lambda *_: plan)
        return Run(model, {"memory_budget": 10**9, "compiler": compiler}, **how), plan

    return make


class Embedded(Decoder):
    def forward(self, states):
        states = states * 2.0 + 1.0
        for layer in self.layers:
            states = layer(states)
        return self.norm(states).square().sum()


def products_in_backward(run):
    loss = run.compiled(ids())
    with torch.profiler.profile() as profile:
        loss.backward()
    return sum(event.name in ("aten::mm", "aten::addmm") for event in profile.events())


@pytest.mark.parametrize(
    "keeping", one_in(4, [lambda n: n % 7 < 3, lambda n: False, lambda n: True, lambda n: n % 2 == 0])
)
def test_any_mixture_has_eagers_loss_and_gradients(planned, keeping):
    run, plan = planned(keeping, WithHead(layers(4, Checkpointed)))
    run.step(ids()).step(ids(9)).step(ids(17)).look(ids())
    assert run.regions
    assert len(plan.told) == len(run.regions) - 1  # one is for evaluation, in which nothing is asked
    assert len(plan.asked) == 12
    assert len({layer for layer, *_ in plan.asked}) == 4
    assert [units for *_, units in plan.asked[::4]] == [2 * 12 * 16, 2 * 9 * 16, 2 * 17 * 16]


class Scaled(Checkpointed):
    """A table that backward reads, behind weights."""

    def __init__(self, index=0):
        nn.Module.__init__(self)
        self.linear, self.other = nn.Linear(16, 16), nn.Linear(16, 16, bias=False)
        self.register_buffer("table", torch.linspace(-1, 1, 24 * 16).view(24, 16))

    def forward(self, x, mask=None):
        rows = x.view(-1, 16)
        rows = rows + nn.functional.silu(self.linear(rows)) * self.table
        first, second = self.other(rows).chunk(2, -1)
        return x + torch.cat([second.sin(), first.cos()], -1).view_as(x)


@pytest.mark.slow
@pytest.mark.parametrize("keeping", [lambda n: False, lambda n: n % 2 == 0])
def test_a_backward_writes_over_what_its_own_forward_made_alone(planned, keeping):
    """One that keeps saves other tensors at the same places: intermediate ones, whose memory backward may take."""
    run, _ = planned(keeping, WithHead(layers(4, Scaled)), compiler="inductor")
    run.step(ids()).step(ids())
    for found, want in zip(run.model.buffers(), run.eager.buffers(), strict=True):
        assert torch.equal(found, want)


@pytest.mark.parametrize("moving", one_in(3, [lambda n: True, lambda n: n % 4 < 2, lambda n: n % 3 == 0]))
def test_layers_that_keep_on_the_host_have_eagers_loss_and_gradients(planned, moving):
    run, plan = planned(lambda n: n % 4 == 3, WithHead(layers(4, Checkpointed)), moving)
    run.step(ids()).step(ids(9)).step(ids(17)).look(ids())
    assert len(plan.asked) == 12


@pytest.mark.parametrize(
    ("moving", "inputs"),
    one_in(
        4,
        [
            (lambda n: n % 4 == 1, lambda n: n % 4 < 2),
            (lambda n: False, lambda n: n % 4 < 3),
            (lambda n: n % 3 == 0, lambda n: n % 5 < 3),  # each layer has each role
            (lambda n: True, lambda n: True),
        ],
    ),
)
def test_layers_whose_inputs_lie_on_the_host_have_eagers_loss_and_gradients(planned, moving, inputs):
    run, plan = planned(lambda n: n % 4 == 3, WithHead(layers(4, Checkpointed)), moving, inputs)
    run.step(ids()).step(ids(9)).step(ids(17)).look(ids())
    assert len(plan.asked) == 12


def test_what_moves_and_when(planned, monkeypatch):
    """What the layer makes; it is back when backward has come to the layer behind it, and before it is asked for."""
    run, plan = planned(lambda n: n % 4 == 3, WithHead(layers(4, Checkpointed)), lambda n: n % 4 in (0, 2))
    run.step(ids())
    events = copies_of(plan.mover, monkeypatch)
    loss = run.compiled(ids())
    out = [shape for name, shape in events if name == "start_offload"]
    assert [name for name, _ in events].count("wait_offload") == len(out)  # the last layer keeps: all has left
    assert len(out) >= 2 * 8  # projections, products and statistics of two layers
    assert torch.Size((16, 16)) not in out  # weights stay, and the layers' inputs
    assert torch.Size((2, 12, 16)) in out
    events.clear()
    loss.backward()
    assert sorted(shape for name, shape in events if name == "start_reload") == sorted(out)
    order = [name for name, _ in itertools.groupby(events, key=lambda event: event[0])]
    assert order == ["start_reload", "wait_reload"] * 2  # all of a layer start before the first is asked for


def memory_of_inputs(plan, monkeypatch):
    """Of the layers' calls from here on, in their order; each says whether somebody holds it."""
    found, run = [], plan.mover.run
    monkeypatch.setattr(
        plan.mover,
        "run",
        lambda call, inputs, layer, role, own: (
            found.append(StorageWeakRef(own.untyped_storage())),
            run(call, inputs, layer, role, own),
        )[1],
    )
    return found


def test_an_input_moves_alone_and_its_memory_is_free(planned, monkeypatch):
    """No mask does, no weight, and no input of a layer that keeps. It starts to return one layer before its own."""
    run, plan = planned(lambda n: n % 4 == 3, WithHead(layers(4, Checkpointed)), inputs=lambda n: n % 4 < 3)
    run.step(ids())
    events, found = copies_of(plan.mover, monkeypatch), memory_of_inputs(plan, monkeypatch)
    loss = run.compiled(ids())
    assert events == [("start_offload", (2, 12, 16)), ("wait_offload", (2, 12, 16))] * 3
    assert [each.expired() for each in found] == [True, True, True, False]
    events.clear()
    loss.backward()
    start, wait = "start_reload", "wait_reload"
    assert [name for name, _ in events] == [start, start, wait, start, wait, wait]


def test_an_input_that_somebody_else_holds_stays_and_is_right(planned, monkeypatch):
    class Lists(Decoder):
        def forward(self, ids):
            x, self.seen = self.embedding(ids), []
            for layer in self.layers:
                self.seen.append(x)
                x = layer(x)
            return self.norm(x) + sum(self.seen)

    run, plan = planned(lambda n: n % 4 == 3, WithHead(layers(4, Checkpointed), Lists), inputs=lambda n: n % 4 < 3)
    run.step(ids())
    found = memory_of_inputs(plan, monkeypatch)
    run.step(ids())
    assert len(found) == 4
    assert not any(each.expired() for each in found)


@pytest.mark.parametrize("inputs", [False, True])
def test_a_graph_that_is_dropped_drops_what_has_moved(planned, inputs):
    model = WithHead(layers(4, Checkpointed))
    run, plan = planned(lambda n: False, model, lambda n: not inputs, lambda n: inputs)
    run.step(ids())
    loss = run.compiled(ids())
    moved = list(plan.mover._of_thread.moved.values())[-1]
    assert moved._alive()
    del loss
    assert not moved._alive()
    run.step(ids())


@pytest.mark.parametrize("inputs", [False, True])
def test_backward_twice_over_what_has_moved(planned, inputs):
    model = Embedded(layers(4, Checkpointed))
    run, _ = planned(lambda n: False, model, lambda n: n % 2 == 0, lambda n: inputs)
    states = torch.randn(2, 12, 16, dtype=torch.double, requires_grad=True)
    with torch._functorch.config.patch(donated_buffer=False):
        once, twice = (torch.autograd.grad(loss, states, retain_graph=True)[0] for loss in 2 * [run.compiled(states)])
    torch.testing.assert_close(once, twice)
    torch.testing.assert_close(once, torch.autograd.grad(run.eager(states), states)[0])


def test_layers_of_which_other_weights_train_are_kinds_of_their_own(planned):
    model = WithHead(layers(5, Checkpointed))
    for name, weight in model.named_parameters():
        weight.requires_grad_("layers.1." not in name)
    run, plan = planned(lambda n: False, model)
    run.step(ids())
    # A kind says how often it was compiled, too.
    gradients = [kind.rsplit(maxsplit=1)[-1] for _, kind, _ in plan.asked]
    assert len(set(gradients)) == 2
    assert gradients.count(gradients[1]) == 1


def test_nothing_moves_where_hooks_on_saved_tensors_are_forbidden(planned):
    run, plan = planned(lambda n: False, WithHead(layers(4, Checkpointed)), lambda n: True)
    run.step(ids())
    asked = len(plan.asked)
    with torch.autograd.graph.disable_saved_tensors_hooks("no hooks"):
        loss = run.compiled(ids())
    assert len(plan.asked) == asked
    torch.testing.assert_close(loss, run.eager(ids()))
    run.step(ids())
    assert len(plan.asked) > asked


@pytest.mark.slow
def test_what_is_kept_is_not_computed_again(planned):
    found = []
    for keeping in (lambda n: True, lambda n: n % 4 == 0, lambda n: False):
        torch._dynamo.reset()
        run, _ = planned(keeping, WithHead(layers(4, Checkpointed)))
        run.step(ids())
        found.append(products_in_backward(run))
    kept, mixed, again = found
    assert kept < mixed < again, found
    assert (mixed - kept) == 3 * (again - mixed)


class Drops(Checkpointed):
    def __init__(self, index=0):
        super().__init__(index)
        self.drop = nn.Dropout(0.5)

    def forward(self, x, mask=None):
        return super().forward(self.drop(x), mask)


@pytest.mark.slow
def test_random_numbers_of_the_forward_are_those_of_backward(planned):
    found = []
    for keeping in (lambda n: True, lambda n: False):
        torch._dynamo.reset()
        torch.manual_seed(0)
        run, _ = planned(keeping, WithHead(layers(4, Drops)))
        run.compiled(ids())
        run.model.zero_grad()
        torch.manual_seed(1)
        run.compiled(ids()).backward()
        found.append([p.grad for p in run.model.parameters()])
    for kept, again in zip(*found, strict=True):
        torch.testing.assert_close(kept, again, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_around_all_meets_one_variant(planned, use_reentrant):
    """It calls again in backward: what that saves must be what was saved."""
    run, plan = planned(lambda n: n % 3 == 0, Embedded(layers(4, Checkpointed)))
    states = torch.randn(2, 12, 16, dtype=torch.double, requires_grad=True)
    found = []
    for call in (run.compiled, run.eager):
        states.grad = None
        checkpoint(call, states, use_reentrant=use_reentrant).backward()
        found.append(states.grad if not use_reentrant else None)
    assert not plan.asked
    assert found[0] is None or torch.allclose(*found)


def test_layers_without_a_checkpoint_are_compiled_once(planned):
    run, plan = planned(lambda n: True, WithHead(layers(4, Layer)))
    with pytest.warns(GlueWarning, match=r"chooses nothing: Layer x4 has no checkpoint to choose in"):
        run.step(ids())
    assert run.regions == ["Layer x4"]
    assert not plan.asked


class CheckpointedInside(Layer):
    def forward(self, x, mask=None):
        return checkpoint(super().forward, x, mask, use_reentrant=False)


def test_a_hook_behind_a_layer_is_no_layer_without_parameters(planned):
    found = layers(4, CheckpointedInside)
    for layer in found:
        layer.register_forward_hook(lambda module, given, result: result * 1.1)
    run, plan = planned(lambda n: True, WithHead(found))
    with warnings.catch_warnings():
        warnings.simplefilter("error", GlueWarning)
        run.step(ids())
    assert plan.asked


def test_one_graph_of_all_layers_is_told(planned):
    run, plan = planned(lambda n: True, WithHead(layers(4, Checkpointed)), fullgraph=True)
    with pytest.warns(GlueWarning, match=r"chooses nothing: no layers are found .* with fullgraph=True"):
        run.step(ids())
    assert not plan.asked


def test_pieces_that_ddp_cuts_are_told(planned, monkeypatch):
    """For each of which torch expects one compile. It cuts graphs between their checkpoints."""
    monkeypatch.setattr(layer_variants.dynamo, "is_piece_for_ddp", lambda: True)
    run, plan = planned(lambda n: True, WithHead(layers(4, Checkpointed)))
    with pytest.warns(GlueWarning, match=r"chooses nothing: DDP cuts Checkpointed x4 into pieces"):
        run.step(ids())
    assert not plan.asked


def test_a_device_that_does_not_say_what_it_holds_is_told():
    run = Run(WithHead(layers(4, Checkpointed)), {"memory_budget": "auto"})
    with pytest.warns(GlueWarning, match=r"memory of a CUDA device, and Checkpointed x4 computes on 'cpu'"):
        run.step(ids())
    assert run.regions


@torch.library.custom_op("test_layer_variants::sends", mutates_args=())
def sends(x: torch.Tensor) -> torch.Tensor:
    return x * 2


sends.register_fake(torch.empty_like)
sends.register_autograd(lambda context, gradient: gradient * 2)


class Sends(Layer):
    def forward(self, x, mask=None):
        return checkpoint(lambda x: sends(super(Sends, self).forward(x, mask)), x, use_reentrant=False)


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_compute_again_alike_what_may_communicate(planned, monkeypatch, ranks):
    run, plan = planned(lambda n: True, WithHead(layers(4, Sends)))
    monkeypatch.setattr(layer_variants, "_is_one_of_several_ranks", lambda: ranks == 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.step(ids())
    assert any("may communicate in a checkpoint" in str(each.message) for each in caught) == (ranks == 2)
    assert bool(plan.asked) == (ranks == 1)


def policy(context, func, *args, **kwargs):
    is_product = func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_RECOMPUTE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


class Selective(Layer):
    def __call__(self, *args, **kwargs):
        how = {"use_reentrant": False, "context_fn": partial(create_selective_checkpoint_contexts, policy)}
        return checkpoint(super().__call__, *args, **how, **kwargs)


@pytest.mark.slow
def test_what_a_policy_must_recompute_is_not_kept(planned):
    found = []
    for kind in (Checkpointed, Selective):
        torch._dynamo.reset()
        run, _ = planned(lambda n: True, WithHead(layers(4, kind)))
        run.step(ids())
        found.append(products_in_backward(run))
    assert found[0] < found[1]


class Counts(Checkpointed):
    def __init__(self, index=0):
        super().__init__(index)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, mask=None):
        self.calls.add_(1)
        return super().forward(x * self.calls, mask)


@pytest.mark.slow
def test_a_layer_that_reads_what_it_writes_has_no_choice(planned):
    """In a recomputation it would read another number."""
    run, plan = planned(lambda n: True, WithHead(layers(4, Counts)))
    with pytest.warns(GlueWarning, match="Counts x4 has a checkpoint that writes memory from outside"):
        run.compiled(ids()).backward()
    assert run.regions
    assert not plan.asked


def test_no_memory_for_a_layer_that_keeps(planned):
    run, plan = planned(lambda n: True, WithHead(layers(4, Checkpointed)))
    run.step(ids())

    def fails(*_):
        raise torch.OutOfMemoryError("no memory")

    variant = layer_variants.LayerVariants(plan, "kind", 0, 1, lambda *_: None, fails, 0)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        variant(nn.Parameter(torch.ones(1)), torch.ones(3))
    assert "Run this step again" in str(getattr(caught.value, "__notes__", ["Run this step again"]))
    run.step(ids())


def test_threads_have_what_leaves_of_their_own():
    mover, errors = Mover(CopyEngine(), least=1), []
    weight = torch.ones(64, requires_grad=True)

    def run():
        try:
            for _ in range(100):
                for layer in range(6):
                    choice = Choice.AGAIN if layer == 0 else Choice.MOVE if layer < 4 else Choice.KEEP
                    role = Role(choice, layer - 2 if layer > 1 else None, (layer - 1,) * (layer > 0), layer < 2)
                    x = weight * 2.0
                    (result,) = mover.run(lambda x: ((x * weight).exp(),), (x,), layer, role, x)
                result.sum().backward()
        except Exception as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert errors == []


@pytest.mark.gpu
@pytest.mark.parametrize("keep", [0, 0.6, 2, 6])
def test_steps_on_a_device_fit_the_budget(keep):
    """The budget is what a step takes that computes all again, and what ``keep`` layers keep, as the plan tells it.

    More may fit: a layer that keeps computes nothing again, which takes memory too, and inputs leave for the host.
    """
    layers = [Checkpointed(i, width=256) for i in range(6)]
    x = torch.randn(8, 1024, 256, device="cuda")

    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(layers)

        def forward(self, x):
            x = x * 1.0 + 1.0
            for layer in self.layers:
                x = layer(x)
            return x.square().mean()

    def peak(**options):
        torch._dynamo.reset()
        model = Stack().cuda()
        session = Session()
        compiled = torch.compile(model, backend=GlueBackend(session=session), options={"regions": "auto", **options})
        for step in range(8):
            if step == 5:
                torch.cuda.reset_peak_memory_stats()
            compiled(x).backward()
            model.zero_grad(set_to_none=True)
        told = [graph.memory_plan for graph in session.graphs if graph.memory_plan]
        return torch.cuda.max_memory_allocated(), told

    least, _ = peak()
    _, told = peak(memory_budget=2**36)
    kept = re.fullmatch(r"6 of 6 layers keep what backward needs: ([\d.]+) MiB, .*", told[-1])
    each = float(kept[1]) / 6 * 2**20
    found, told = peak(memory_budget=int((least + keep * each) / SHARE) + 2**21)
    assert found <= (least + keep * each) / SHARE + 2**21
    kept = int(re.match(r"(\d) of 6 layers keep", told[-1])[1]) if told else 0
    assert int(keep) <= kept <= 6, told
