"""Training loops that are not one forward and one backward: gradients stay right and nothing is left behind."""

from __future__ import annotations

import gc
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from glue_compiler.errors import GlueWarning
from glue_compiler.ops import copy_engine
from glue_compiler.ops.pinned_pool import PinnedPool
from tests.captured import compile_with_glue
from tests.passes.overlap_offload.models import Blocks, equal, gradients, step

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
Y = torch.randn(4, 8, generator=torch.Generator().manual_seed(4))


@pytest.fixture(scope="module")
def compiled():
    torch._dynamo.reset()
    model = Blocks(5)
    return model, compile_with_glue(model, offload="checkpoints").call


@pytest.fixture(autouse=True)
def clean_dynamo():
    """The module's compiled model stays: this replaces the fixture that resets Dynamo."""


@pytest.fixture
def pool(monkeypatch):
    pool = PinnedPool()
    monkeypatch.setattr(copy_engine.engine, "pool", pool)
    return pool


def used(pool):
    gc.collect()
    return sum(not block.is_free for block in pool._blocks.values())


def loss(call, x):
    return call(x).square().sum()


def test_host_memory_is_reused_from_step_to_step(compiled, pool):
    model, call = compiled
    expected = step(model, model, X)
    for _ in range(3):
        assert equal(step(call, model, X), expected)
    assert len(pool._blocks) == 4
    assert used(pool) == 0


def test_a_forward_without_backward_leaves_nothing(compiled, pool):
    model, call = compiled
    call(X)
    assert used(pool) == 0
    assert equal(step(call, model, X), step(model, model, X))


@pytest.mark.parametrize("first", [0, 1])
def test_two_forwards_then_two_backwards_in_either_order(compiled, pool, first):
    model, call = compiled

    def two(call):
        model.zero_grad()
        losses = [loss(call, X), loss(call, Y)]
        losses[first].backward()
        losses[1 - first].backward()
        return gradients(model)

    assert equal(two(call), two(model))
    assert len(pool._blocks) == 8
    assert used(pool) == 0


def test_an_exception_in_mid_backward_then_a_clean_step(compiled, pool, monkeypatch):
    model, call = compiled
    expected = step(model, model, X)
    start, calls = copy_engine.engine.start_reload, []

    def fail_at_the_third(*args):
        calls.append(args)
        if len(calls) == 3:
            raise RuntimeError("third reload")
        return start(*args)

    with monkeypatch.context() as patch:
        patch.setattr(copy_engine.engine, "start_reload", fail_at_the_third)
        with pytest.raises(RuntimeError, match="third reload"):
            step(call, model, X)
    calls.clear()
    assert used(pool) == 0
    assert copy_engine.engine.in_flight() == 0
    assert equal(step(call, model, X), expected)


@pytest.mark.slow
def test_a_graph_that_is_retained_runs_backward_twice(compiled, pool):
    model, _ = compiled

    def twice(call):
        model.zero_grad()
        value = loss(call, X)
        value.backward(retain_graph=True)
        value.backward()
        return gradients(model)

    # A compiled graph may be retained as long as it donates no buffers.
    with torch._functorch.config.patch(donated_buffer=False):
        torch._dynamo.reset()
        retained = compile_with_glue(model, offload="checkpoints").call
        assert equal(twice(retained), twice(model))
    assert used(pool) == 0


def test_gradients_accumulate(compiled, pool):
    model, call = compiled

    def accumulate(call):
        model.zero_grad()
        for x in (X, Y, X):
            loss(call, x).backward()
        return gradients(model)

    assert equal(accumulate(call), accumulate(model))


def test_an_input_changed_in_place_after_the_forward(compiled, pool):
    """The batch is a graph input: it is not moved, and what is moved was copied from values of the graph's own."""
    model, call = compiled

    def change(call):
        model.zero_grad()
        x = X.clone() * 1
        value = loss(call, x)
        with torch.no_grad():
            x.data.mul_(2)
        value.backward()
        return gradients(model)[2:]  # the embedding's own gradient reads the batch, as eager code does

    assert equal(change(call), change(model))


def test_two_models_share_the_pool(compiled, pool):
    model, call = compiled
    other = Blocks(4)
    other_call = compile_with_glue(other, offload="checkpoints").call
    expected = step(model, model, X), step(other, other, Y)
    for _ in range(2):
        assert equal(step(call, model, X), expected[0])
        assert equal(step(other_call, other, Y), expected[1])
    assert len(pool._blocks) == 4


def test_pinning_refused_warns_once_and_stays_right():
    def refuse(nbytes, pinned):
        if pinned:
            raise RuntimeError("cannot lock pages")
        return torch.empty(nbytes, dtype=torch.uint8)

    pool = PinnedPool(refuse)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hosts = [pool.take(X, pinned=True) for _ in range(3)]
    assert [str(w.message) for w in caught if w.category is GlueWarning] != []
    assert len([w for w in caught if w.category is GlueWarning]) == 1
    assert "cannot lock pages" in str(caught[0].message)
    assert len({host.data_ptr() for host in hosts}) == 3
    assert pool.pinned_bytes() == 0


def test_the_limit_on_pinned_memory_holds():
    pool = PinnedPool(lambda nbytes, pinned: torch.empty(nbytes, dtype=torch.uint8))
    first = pool.take(X, pinned=True, limit=200)
    with pytest.warns(GlueWarning, match="limit of 200 bytes"):
        pool.take(Y, pinned=True, limit=200)
    assert pool.pinned_bytes() == 128
    del first
    pool.take(X[:1], pinned=True, limit=130)  # free memory of another size makes room
    assert pool.pinned_bytes() == 32


def test_page_locked_bytes_count_as_they_are():
    pool = PinnedPool(lambda nbytes, pinned: torch.empty(nbytes, dtype=torch.uint8))
    block = pool.take(torch.empty(160, dtype=torch.uint8), pinned=True, limit=160)
    assert (pool.held_bytes(), pool.pinned_bytes()) == (160, 160)
    with pytest.warns(GlueWarning, match="limit of 319 bytes"):
        other = pool.take(torch.empty(160, dtype=torch.uint8), pinned=True, limit=319)
    assert block.data_ptr() != other.data_ptr()


@pytest.mark.gpu
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_without_page_locked_memory_a_step_on_a_gpu_is_the_same(monkeypatch, compiler):
    model, x = Blocks(4).cuda(), X.cuda()
    call = compile_with_glue(model, offload="checkpoints", compiler=compiler).call
    expected = step(call, model, x)

    def refuse(nbytes, pinned):
        if pinned:
            raise RuntimeError("cannot lock pages")
        return torch.empty(nbytes, dtype=torch.uint8)

    monkeypatch.setattr(copy_engine.engine, "pool", PinnedPool(refuse))
    with pytest.warns(GlueWarning, match="cannot lock pages"):
        assert equal(step(call, model, x), expected)
    assert equal(step(call, model, x), expected)


@pytest.mark.gpu
def test_a_step_on_a_gpu_while_another_stream_is_current():
    model, x = Blocks(4).cuda(), X.cuda()
    expected = step(compile_with_glue(model).call, model, x)
    torch._dynamo.reset()
    call = compile_with_glue(model, offload="checkpoints").call
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(5):
            assert equal(step(call, model, x), expected)
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_hooks_on_saved_tensors_around_an_offloaded_graph_on_a_gpu():
    model, x = Blocks(4).cuda(), X.cuda()
    expected = step(compile_with_glue(model).call, model, x)
    torch._dynamo.reset()
    call = compile_with_glue(model, offload="checkpoints").call
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        for _ in range(5):
            assert equal(step(call, model, x), expected)


def test_a_view_keeps_its_block_in_use():
    pool = PinnedPool()
    view = pool.take(X, pinned=False)[1:].view(torch.uint8)
    (block,) = pool._blocks.values()
    assert not block.is_free
    del view
    assert block.is_free


def test_reset_gives_host_memory_back(compiled, pool):
    model = Blocks(3)
    step(torch.compile(model, backend="glue", options={"offload": "checkpoints", "compiler": "aot_eager"}), model, X)
    assert pool._blocks
    torch.compiler.reset()
    assert not pool._blocks


def _ddp_worker(rank, folder):
    # Ranks meet at a file: a port that was free a moment ago may be another program's when rank 0 opens it. A rank
    # whose peer has failed ends, instead of waiting half an hour in a collective.
    store, limit = f"file://{folder}/store", timedelta(seconds=200)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=limit)
    results = []
    for options in ({}, {"offload": "checkpoints"}):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(Blocks(4))
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
        call = torch.compile(model, backend="glue", options={"compiler": "aot_eager", **options})
        results.append([tensor.tolist() for tensor in step(call, model, x)])
    moved = copy_engine.engine.pool._blocks
    (folder / f"rank{rank}").write_text(repr((results[0] == results[1], len(moved))))
    dist.barrier()  # neither may leave while the other still reads from it
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_with_ddp_and_gloo(tmp_path):
    # Joined: if one rank fails, the other is ended, and the failure is raised here.
    torch.multiprocessing.spawn(_ddp_worker, (tmp_path,), nprocs=2, daemon=True)
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["(True, 3)"] * 2
