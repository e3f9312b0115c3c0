"""Branches on what an integer input says: one graph for each way, results as in eager, and near misses that break."""

from __future__ import annotations

import gc
import multiprocessing
import operator
import weakref
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.captured import compile_with_glue, count, result_and_gradients

ROW = torch.arange(6)[None]
PACKED = torch.tensor([[0, 1, 2, 0, 1, 0]])


def is_packed(position: Tensor) -> Tensor:
    growing = torch.arange(position.shape[1], device=position.device) + position.min()
    return (growing - position).abs().sum().bool()


def layers(x: Tensor, position: Tensor) -> Tensor:
    for _ in range(3):
        x = x.sin() * position[0, :, None] if is_packed(position) else x.cos()
    return x


def rows(length: int = 6) -> Tensor:
    return torch.randn(length, 4, dtype=torch.float64, requires_grad=True)


def assert_same(fn, run, *args) -> None:
    x = rows(args[0].shape[1] if isinstance(args[0], Tensor) else 6)
    expected = result_and_gradients(lambda x: fn(x, *args), [x])
    actual = result_and_gradients(lambda x: run.call(x, *args), [x])
    for want, got in zip(expected, actual, strict=True):
        torch.testing.assert_close(got, want)


def test_each_way_is_one_graph_and_a_later_call_takes_its_own():
    run = compile_with_glue(layers)
    for position in (PACKED, ROW, PACKED.flip(1), ROW + 5, PACKED, ROW):
        assert_same(layers, run, position)
    assert len(run.graphs) == 2


@pytest.mark.parametrize("dynamic", [None, True])
def test_lengths_that_vary(dynamic):
    run = compile_with_glue(layers, dynamic=dynamic)
    for length in (6, 9, 4):
        assert_same(layers, run, torch.arange(length)[None])
        assert_same(layers, run, torch.arange(length)[None] % 3)
    assert len(run.graphs) == (2 if dynamic else 4)  # of one length, then of any


@pytest.mark.parametrize("dynamic", [False, True])
def test_positions_made_in_the_graph(dynamic):
    def fn(x, unused):
        return layers(x, torch.arange(x.shape[0])[None])

    run = compile_with_glue(fn, dynamic=dynamic)
    assert_same(fn, run, ROW)
    assert len(run.graphs) == 1


def test_a_branch_inside_a_checkpoint():
    def fn(x, position):
        return checkpoint(layers, x, position, use_reentrant=False)

    run = compile_with_glue(fn)
    for position in (PACKED, ROW):
        assert_same(fn, run, position)
    assert len(run.graphs) == 2


def test_a_condition_that_is_read_back():
    def fn(x, position):
        return x.sin() if is_packed(position).item() else x.cos()

    run = compile_with_glue(fn)
    for position in (PACKED, ROW, PACKED):
        assert_same(fn, run, position)
    assert len(run.graphs) == 2


def test_an_input_that_is_changed_between_calls():
    run = compile_with_glue(layers)
    position = ROW.clone()
    assert_same(layers, run, position)
    position[0, 3:] -= 3
    assert_same(layers, run, position)
    assert len(run.graphs) == 2


def written(x, position):
    position.add_(1)
    position[0, 0] = 7
    return x.sin() if is_packed(position) else x.cos()


def written_view(x, position):
    position[0].zero_()
    return x.sin() if is_packed(position) else x.cos()


def written_copy(x, position):
    copy = position + 1
    copy.zero_()
    return x.sin() if copy.sum().bool() else x.cos()


def of_floats(x, position):
    return x.sin() if (x > 0).all() else x.cos()


def of_two_inputs(x, position, other):
    return x.sin() if (position == other).all() else x.cos()


def drawn(x, position):
    return x.sin() if torch.rand(()).round().bool() else x.cos()


def of_a_number_of_rows(x, position):
    return x.sin() if torch.nonzero(position)[0, 0].bool() else x.cos()


def of_an_integer(x, position):
    return x.sin() if position.sum() else x.cos()


@pytest.mark.parametrize(
    "fn", [written, written_view, written_copy, of_floats, of_two_inputs, of_a_number_of_rows, of_an_integer]
)
def test_other_conditions_break_the_graph_as_before(fn):
    more = [ROW.clone()] if fn is of_two_inputs else []
    run = compile_with_glue(fn, fullgraph=False)
    x = rows()
    for position in (PACKED, ROW):
        expected = fn(x, position.clone(), *more)
        torch.testing.assert_close(run.call(x, position.clone(), *more), expected)
    assert {event.reason.split(":")[0] for event in run.session.capture_events} <= {"Unsupported", "UserError"}
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compile_with_glue(fn).call(x, PACKED.clone(), *more)


def test_random_conditions_break_the_graph():
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compile_with_glue(drawn).call(rows(), PACKED)


def test_an_assertion_stays_one():
    def fn(x, position):
        assert (position >= 0).all()
        return x.sin()

    run = compile_with_glue(fn)
    assert_same(fn, run, PACKED)
    with pytest.raises((RuntimeError, AssertionError)):
        run.call(rows(), PACKED - 1)
    assert len(run.graphs) == 1


def test_the_third_condition_breaks_the_graph():
    def fn(x, position):
        for limit in (1, 2, 3):
            x = x.sin() if (position > limit).any() else x.cos()
        return x

    with pytest.raises(torch._dynamo.exc.Unsupported):
        compile_with_glue(fn).call(rows(), PACKED)


def test_other_backends_break_as_before():
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(layers, backend="aot_eager", fullgraph=True)(rows(), PACKED)


def test_a_guard_keeps_no_input():
    def branches(ids, x):
        return x.sin() if (ids > 0).all() else x.cos()

    compiled = torch.compile(branches, backend="glue", options={"compiler": "aot_eager"}, fullgraph=True)
    ids, x = torch.tensor([1, 2]), torch.randn(2)
    torch.testing.assert_close(compiled(ids, x), x.sin())
    kept = weakref.ref(ids.untyped_storage())
    tensor = weakref.ref(ids)
    del ids
    gc.collect()
    assert tensor() is None
    assert kept() is None
    torch.testing.assert_close(compiled(torch.tensor([0, 2]), x), x.cos())


def compile_in_several_threads() -> float:
    def branches(ids, x):
        return x.sin() if (ids > 0).all() else x.cos()

    def one(number):
        compiled = torch.compile(branches, backend="glue", options={"compiler": "aot_eager"}, fullgraph=True)
        x = torch.full((number + 2,), 0.5)
        return [compiled(torch.tensor([sign]), x) - expected(x) for sign, expected in ((1, torch.sin), (0, torch.cos))]

    with ThreadPoolExecutor(4) as pool:
        return max(float(each.abs().max()) for several in pool.map(one, range(4)) for each in several)


@pytest.mark.slow
def test_first_compiles_in_several_threads():
    # Torch 2.11: once a thread that has compiled ends, Dynamo leaves what follows a graph break to eager, or crashes.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(compile_in_several_threads).result() == 0


@torch.library.custom_op("glue_tests::add_four_to_each", mutates_args={"tensors"})
def add_four_to_each(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.add_(4)


WRITES = {
    "data": lambda p: p.data.add_(4),
    "item of data": lambda p: p.data.__setitem__(0, 9),
    "view of data": lambda p: p.data.view(2, 1)[0].add_(4),
    "data is another": lambda p: setattr(p, "data", p + 4),
    "foreach": lambda p: torch._foreach_add_([p], 4),
    "foreach of views": lambda p: torch._foreach_mul_(p.unbind(), 9),
    "list of a custom operator": lambda p: add_four_to_each([p]),
    "out of a list": lambda p: torch.unbind_copy(p + 4, out=list(p.unbind())),
    "storage": lambda p: p.untyped_storage().fill_(9),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_branch_after_a_write_that_no_version_counter_shows(write):
    def fn(x, p):
        WRITES[write](p)
        return x * 2 if p.max() > 4 else x * 3

    compiled, x = torch.compile(fn, backend="glue", options={"compiler": "aot_eager"}), torch.ones(2)
    for numbers in ([0, 1], [1, 0], [0, -9]):
        assert torch.equal(compiled(x, torch.tensor(numbers)), fn(x, torch.tensor(numbers)))


def test_a_branch_after_a_write_to_other_memory_is_guarded():
    def fn(x, p):
        other = p.clone()
        other.data.add_(4)
        return x * 2 if p.max() > 4 else x * 3

    compiled = torch.compile(fn, backend="glue", options={"compiler": "aot_eager"}, fullgraph=True)
    x = torch.ones(2)
    for numbers in ([0, 1], [5, 0]):
        assert torch.equal(compiled(x, torch.tensor(numbers)), fn(x, torch.tensor(numbers)))


HELD = torch.zeros(2, dtype=torch.long)


@torch.library.custom_op("glue_tests::write_what_it_holds", mutates_args=())
def write_now() -> torch.Tensor:
    HELD.add_(4)
    return torch.ones(())


@write_now.register_fake
def _() -> torch.Tensor:
    return torch.ones(())


@torch.compiler.allow_in_graph
def write_what_it_holds():
    return write_now()


def switch_modes():
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        return torch.ones(())


@pytest.mark.parametrize("call", [write_what_it_holds, switch_modes])
def test_a_branch_after_a_call_without_tensors(call):
    """A function that glue cannot see into may write an input that it is not given; a switch of torch's does not."""

    def fn(x, p):
        scale = call()
        return x * 2 * scale if p.max() > 4 else x * 3 * scale

    run = compile_with_glue(fn, fullgraph=False)
    x = torch.ones(2)
    for numbers in ([0, 1], [1, 0], [0, -9]):
        HELD.copy_(torch.tensor(numbers))
        expected = fn(x, HELD)
        HELD.copy_(torch.tensor(numbers))
        assert torch.equal(run.call(x, HELD), expected)
    assert bool(count(run.graphs[0], operator.mul)) == (call is switch_modes)  # it goes on behind the branch


def test_conditions_on_two_sizes_of_an_input_are_two():
    def fn(x, p):
        if p.sum() > p.shape[0]:
            x = x * 2
        if p.sum() > p.shape[1]:
            x = x * 3
        return x

    compiled = torch.compile(fn, backend="glue", options={"compiler": "aot_eager"}, dynamic=True)
    x, p = torch.ones(2), torch.zeros(2, 9, dtype=torch.long)
    for number in (5, 0, 20):
        p[0, 0] = number
        assert torch.equal(compiled(x, p), fn(x, p))


def test_a_condition_of_floats_inside_of_autocast_is_not_guarded():
    def fn(x, p):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if p.float() @ p.float() > 67300:
                return x * 2
        return x * 3

    compiled, x = torch.compile(fn, backend="glue", options={"compiler": "aot_eager"}), torch.ones(2)
    for p in (torch.tensor([1]), torch.tensor([259]), torch.tensor([257])):
        assert torch.equal(compiled(x, p), fn(x, p))
