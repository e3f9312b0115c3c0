"""Layers that are compiled one by one: how often the metadata is computed, and that every call gets its own batch's."""

import copy
import threading

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from glue_compiler.backend import GlueBackend
from glue_compiler.report.session import Session
from tests.passes.hoist_metadata.test_one_graph import packed_layer, positions_of
from tests.slow import one_in, slow_but

LAYERS = 4


@pytest.fixture(autouse=True, scope="module")
def device_is_up():
    """Dynamo's first compile initializes CUDA, for any backend; a checkpoint whose forward that is refuses to run."""
    if torch.cuda.is_available():
        torch.cuda.init()


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4, dtype=torch.float64))

    def forward(self, x, positions):
        return packed_layer(x, positions, self.weight)


class CheckpointedInside(Layer):
    def forward(self, x, positions):
        return checkpoint(super().forward, x, positions, use_reentrant=False)


class OtherLayer(Layer):
    """Another graph with the same metadata."""

    def forward(self, x, positions):
        return packed_layer(x.sin(), positions, self.weight) + x


class Stack(torch.nn.Module):
    def __init__(self, *kinds, outside=None):
        super().__init__()
        self.layers = torch.nn.ModuleList(kind() for kind in kinds)
        self.outside = outside

    def forward(self, x, positions):
        for layer in self.layers:
            x = (
                checkpoint(layer, x, positions, use_reentrant=self.outside)
                if self.outside is not None
                else layer(x, positions)
            )
        return x


class Compiled:
    """An eager stack, and the same one compiled layer by layer."""

    def __init__(self, *kinds, outside=None, **options):
        self.eager = Stack(*kinds, outside=outside)
        self.model = copy.deepcopy(self.eager)
        self.session = Session()
        backend = GlueBackend(session=self.session)
        for layer in self.model.layers:
            layer.compile(backend=backend, options={"compiler": "aot_eager", "strict": True, **options})

    def step(self, model, positions, seed=0):
        """Output and gradients of input and weights."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(positions.numel(), 4, dtype=torch.float64, generator=generator, requires_grad=True)
        target = torch.randn(x.shape, dtype=x.dtype, generator=generator)
        model.zero_grad()
        out = model(x, positions)
        (out * target).sum().backward()
        return [out.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]

    def check(self, positions, seed=0):
        got = self.step(self.model, positions, seed)
        for a, b in zip(got, self.step(self.eager, positions, seed), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)

    def reads(self, positions, step=True):
        """(nonzeros, host reads) of a training step, or of a forward without gradients."""
        x = torch.randn(positions.numel(), 4, dtype=torch.float64)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            if step:
                self.step(self.model, positions)
            else:
                with torch.no_grad():
                    self.model(x, positions)
        counts = {event.key: event.count for event in profiler.key_averages()}
        return counts.get("aten::nonzero", 0), counts.get("aten::_local_scalar_dense", 0)


KINDS = {
    "plain": ([Layer] * LAYERS, None, LAYERS),
    "checkpoint around layers": ([Layer] * LAYERS, False, 2 * LAYERS),
    "reentrant checkpoint around layers": ([Layer] * LAYERS, True, 2 * LAYERS),
    "checkpoint inside layers": ([CheckpointedInside] * LAYERS, None, 2 * LAYERS),
    "two kinds of layers": ([Layer, OtherLayer] * (LAYERS // 2), None, LAYERS),
}


@pytest.mark.parametrize("name", slow_but(("checkpoint inside layers", "two kinds of layers"), KINDS))
def test_a_training_step_computes_the_metadata_once(name):
    kinds, outside, without = KINDS[name]
    stack = Compiled(*kinds, outside=outside)
    stack.check(positions_of(5, 1, 6))
    stack.check(positions_of(3, 9), seed=1)
    assert stack.reads(positions_of(2, 10)) == (1, 1)
    off = Compiled(*kinds, outside=outside, passes={"memoize_metadata": False, "hoist_metadata": False})
    off.check(positions_of(5, 1, 6))
    assert off.reads(positions_of(2, 10)) == (without, without)


def test_a_forward_without_gradients_and_the_training_step_after_it_share_one():
    stack = Compiled(*[Layer] * LAYERS)
    stack.check(positions_of(5, 7))
    batch = positions_of(4, 8)
    stack.reads(positions_of(12), step=False)
    assert stack.reads(batch, step=False) == (1, 1)
    assert stack.reads(batch) == (0, 0)
    stack.check(batch)


def test_inference_mode_then_training_on_one_batch():
    stack = Compiled(*[Layer] * 2)
    batch = positions_of(4, 8)
    with torch.inference_mode():
        stack.model(torch.randn(12, 4, dtype=torch.float64), batch)
    stack.check(batch)


def test_layers_share_one_artifact_and_no_value_recompiles():
    stack = Compiled(*[Layer] * LAYERS)
    for lengths in ((12,), (1,) * 12, (3, 9), (2, 2, 8)):
        stack.check(positions_of(*lengths))
    # One graph for the first layer, whose input is a leaf; transformers' layers share in the same way.
    assert len(stack.session.graphs) <= 2


class Positions(torch.nn.Module):
    """A buffer and a view of it; a deep copy has both on one memory, with a version counter each."""

    def __init__(self, *lengths):
        super().__init__()
        self.register_buffer("whole", positions_of(*lengths))
        self.view = self.whole[:]


def refill_copied_buffer(*lengths):
    module = copy.deepcopy(Positions(*lengths))
    return module.view, module.whole.copy_


def refill_another_tensor_over_the_pool(*lengths):
    pool = positions_of(*lengths)
    filled = torch.empty(0, dtype=pool.dtype).set_(pool.untyped_storage(), 0, pool.shape)
    return pool, filled.copy_


REFILLS = {
    "copy_": lambda *lengths: (p := positions_of(*lengths), p.copy_),
    "data": lambda *lengths: (p := positions_of(*lengths), lambda other: p.data.copy_(other)),
    "storage": lambda *lengths: (
        p := positions_of(*lengths),
        lambda other: p.untyped_storage().copy_(other.untyped_storage()),
    ),
    "buffer that was copied with its view": refill_copied_buffer,
    "another tensor over the pool": refill_another_tensor_over_the_pool,
    "numpy": lambda *lengths: (p := positions_of(*lengths), lambda other: p.numpy().__setitem__(..., other.numpy())),
}


@pytest.mark.parametrize("make", one_in(2, REFILLS.values()), ids=REFILLS)
def test_a_refill_between_two_layers_and_between_two_steps(make):
    stack = Compiled(Layer, Layer)
    positions, refill = make(6, 6)
    stack.check(positions)
    with torch.no_grad():
        x = torch.randn(12, 4, dtype=torch.float64)
        first = stack.model.layers[0](x, positions)
        assert torch.equal(first, stack.eager.layers[0](x, positions))
        refill(positions_of(2, 2, 8))
        assert torch.equal(stack.model.layers[1](first, positions), stack.eager.layers[1](first, positions))
    for lengths in ((3, 9), (1, 11), (5, 7)):
        refill(positions_of(*lengths))
        stack.check(positions)
        refill(positions_of(4, 4, 4))
        assert stack.reads(positions) == (1, 1), "layers of one step still share"


def test_batches_that_are_views_of_one_tensor():
    """Padding cut off, and a batch in two parts whose gradients are summed."""
    stack = Compiled(*[Layer] * LAYERS)
    padded = torch.cat([positions_of(5, 7), torch.zeros(4, dtype=torch.int64)])
    for view in (padded[:12], *torch.stack([positions_of(2, 10), positions_of(12)])):
        stack.check(view)
    assert stack.reads(padded[:12]) == (0, 0)
    padded[12:] = 1
    assert stack.reads(padded[:12]) == (0, 0), "a write beside the view"
    padded[3] = 0
    assert stack.reads(padded[:12]) == (1, 1)
    micro = torch.stack([positions_of(4, 8), positions_of(6, 6)])
    assert [stack.reads(part) for part in micro] == [(1, 1)] * 2


def test_models_in_turn():
    stacks, batches = [Compiled(Layer, Layer) for _ in range(2)], [positions_of(6, 6), positions_of(1, 11)]
    for _ in range(2):
        for stack, batch in zip(stacks, batches, strict=True):
            stack.check(batch)


@pytest.mark.slow
def test_threads_of_data_parallel_training():
    stack, failures = Compiled(Layer, Layer), []
    stack.check(positions_of(5, 7))

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(12, 4, dtype=torch.float64, generator=generator)
        try:
            for _ in range(1000 // 4):
                first = int(torch.randint(1, 12, (1,), generator=generator))
                positions = positions_of(first, 12 - first)
                with torch.no_grad():
                    assert torch.equal(stack.model(x, positions), stack.eager(x, positions))
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_selective_checkpointing_around_a_layer():
    """Its dispatch modes pair the operators of the recomputation with those of the forward."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(context, operator, *args, **kwargs):
        saves = operator in (torch.ops.aten.nonzero.default, torch.ops.aten.mm.default)
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    stack = Compiled(Layer, Layer)
    stack.check(positions_of(5, 7))

    def forward(model):
        def run(x, positions):
            for layer in model.layers:
                contexts = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
                x = checkpoint(layer, x, positions, use_reentrant=False, context_fn=contexts)
            return x

        return run

    batch = positions_of(3, 3, 6)
    results = []
    for model in (stack.model, stack.eager):
        model.zero_grad()
        x = torch.ones(12, 4, dtype=torch.float64, requires_grad=True)
        out = forward(model)(x, batch)
        out.square().sum().backward()
        results.append([out.detach(), x.grad, *(p.grad.clone() for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
