"""The run-time memo: what is the same batch, what is not, and when a batch's results go."""

import gc
import threading
import weakref

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from glue_compiler.ops.batch_memo import MAX_BATCHES, BatchMemo, PrologueResults, memoized


def test_a_batch_is_computed_once(memoized_double):
    positions = torch.arange(5)
    first = memoized_double(positions)
    assert memoized_double(positions) is first
    assert memoized_double(positions.view(5)) is first
    assert memoized_double(positions.detach()) is first
    assert memoized_double.computed == 1


@pytest.mark.parametrize(
    "through", [lambda t: t, lambda t: t[2:], torch.Tensor.detach], ids=["itself", "view", "alias"]
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_in_place_change_is_seen(memoized_double, through, mode):
    positions = torch.arange(5)
    for _ in range(3):
        memoized_double(positions)
        with mode():
            through(positions).add_(1)
    assert memoized_double.computed == 3


def test_a_new_tensor_at_a_freed_address_is_another_batch(memoized_double):
    addresses = set()
    for i in range(200):
        positions = torch.full((1000,), i)
        addresses.add(positions.data_ptr())
        memoized_double(positions)
        del positions
    assert len(addresses) < 200
    assert memoized_double.computed == 200


def test_views_of_one_storage_are_told_apart(memoized_double):
    base = torch.arange(12)
    for view in (base[:6], base[6:], base[:6].view(2, 3), base[:6].view(3, 2).t()):
        memoized_double(view)
    assert memoized_double.computed == 4


def test_another_length_of_the_same_memory_is_another_batch(memoized_double):
    base = torch.arange(12)
    memoized_double(base[:6])
    memoized_double(base[:5])
    assert memoized_double.computed == 2


def test_another_dtype_of_the_same_memory_is_another_batch(memoized_double):
    base = torch.arange(6) + 2**32
    memoized_double(base[:3])
    memoized_double(base.view(torch.int32)[:3])
    assert memoized_double.computed == 2


def test_other_data_behind_the_same_tensor_is_another_batch(memoized_double):
    positions = torch.arange(5)
    memoized_double(positions)
    positions.data = torch.arange(5, 10)  # leaves the version counter alone
    memoized_double(positions)
    assert memoized_double.computed == 2


def test_storage_that_has_moved_is_another_batch(memoized_double):
    positions = torch.arange(5)
    memoized_double(positions)
    address, storage = positions.data_ptr(), positions.untyped_storage()
    storage.resize_(2**20)
    positions.data.fill_(7)
    assert positions.data_ptr() != address
    memoized_double(positions)
    assert memoized_double.computed == 2


@pytest.mark.slow
def test_memory_that_a_living_storage_has_given_up_is_another_batch(memoized_double):
    size = 64 * 2**20  # so large that the allocator gets it from the system, and again at the same place
    positions = torch.zeros(size, dtype=torch.int8)
    memoized_double(positions)
    address = positions.data_ptr()
    positions.untyped_storage().resize_(16)
    other = torch.ones(size, dtype=torch.int8)
    if other.data_ptr() != address:
        pytest.skip("the allocator did not hand out the address again")
    memoized_double(other)


def test_pooled_memory_that_is_filled_through_another_tensor_is_another_batch(memoized_double):
    pool = torch.empty(5, dtype=torch.int64)
    for i in range(3):
        torch.empty(0, dtype=pool.dtype).set_(pool).copy_(torch.arange(i, i + 5))
        memoized_double(torch.empty(0, dtype=pool.dtype).set_(pool))
    assert memoized_double.computed == 3


def test_a_buffer_that_is_filled_again_has_one_batch_at_a_time(memoized_double):
    buffer = torch.zeros(1, 8, dtype=torch.int64)
    for n in (8, 5, 7, 8, 3):
        buffer[:, :n] = torch.arange(n) + n
        memoized_double(buffer[:, :n])
        assert len(memoized_double.memo) == 1


def test_two_batches_of_one_buffer_are_both_kept(memoized_double):
    buffer = torch.arange(8)
    for view in (buffer[:4], buffer[4:]) * 2:
        memoized_double(view)
    assert len(memoized_double.memo) == memoized_double.computed == 2


def test_integers_are_part_of_the_batch():
    memo, computed = PrologueResults(), []
    call = memoized(lambda p, n, out: out, lambda p, n: computed.append(n) or (p * n,), (0, 1), memo)
    positions = torch.arange(3)
    for n in (2, 3, 2):
        assert torch.equal(call(positions, n), positions * n)
    assert computed == [2, 3]


class Tagged(torch.Tensor):
    """A subclass with a storage of its own."""


class Recorder(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_a_wrapper_subclass_is_computed_each_time(memoized_double):
    positions = TwoTensor(torch.arange(4), torch.arange(4))
    for _ in range(2):
        memoized_double.call(positions)
    assert memoized_double.computed == 2
    assert len(memoized_double.memo) == 0


def test_a_lazily_negated_tensor_is_not_the_one_behind_it(memoized_double):
    positions = torch.arange(4)
    for p in (positions, torch._neg_view(positions), positions):
        memoized_double(p)
    assert memoized_double.computed == 3


def test_a_subclass_is_not_known_by_its_storage():
    memo, positions = PrologueResults(), torch.arange(4).as_subclass(Tagged)
    memoized(lambda p, out: out, lambda p: (torch.ones(3),), (0,), memo)(positions)
    assert len(memo) == 0


def test_under_vmap_each_call_computes():
    memo = PrologueResults()
    call = memoized(lambda p, out: out, lambda p: (p * 2,), (0,), memo)
    positions = torch.arange(6).view(2, 3)
    for _ in range(2):
        assert torch.equal(torch.vmap(call)(positions), positions * 2)
    assert len(memo) == 0


def test_under_a_dispatch_mode_each_call_computes(memoized_double):
    """Selective checkpointing counts the operators of forward and recomputation: both must run the same ones."""
    positions = torch.arange(4)
    memoized_double(positions)
    with Recorder():
        memoized_double(positions)
    assert memoized_double.computed == 2


def test_results_that_are_no_plain_tensors_are_not_kept():
    memo = PrologueResults()
    call = memoized(lambda p, out: out, lambda p: (TwoTensor(p, p),), (0,), memo)
    call(torch.arange(3))
    assert len(memo) == 0


def test_results_of_an_inference_call_can_be_saved_for_backward():
    memo = PrologueResults()
    call = memoized(lambda x, p, mask: x * mask, lambda p: ((p > 1).double(),), (1,), memo)
    positions, x = torch.arange(4), torch.ones(4, dtype=torch.float64, requires_grad=True)
    with torch.inference_mode():
        call(x, positions)
    assert len(memo) == 1
    call(x, positions).sum().backward()
    assert torch.equal(x.grad, (positions > 1).double())


def test_a_batch_that_is_freed_takes_its_results_along():
    memo = PrologueResults()
    results = []

    def prologue(positions):
        results.append(weakref.ref(out := positions * 2))
        return (out,)

    call = memoized(lambda p, out: None, prologue, (0,), memo)
    base = torch.arange(5)
    call(base[1:])
    gc.collect()
    assert len(memo) == 1  # the view is gone, its memory is not
    gc.disable()
    try:
        del base
        assert len(memo) == 0
        assert results[0]() is None
    finally:
        gc.enable()


def test_an_exception_leaves_no_entry():
    memo, fail = PrologueResults(), [True]

    def prologue(positions):
        if fail:
            raise ValueError(fail.pop())
        return (positions * 2,)

    call = memoized(lambda p, out: out, prologue, (0,), memo)
    positions = torch.arange(3)
    with pytest.raises(ValueError, match="True"):
        call(positions)
    assert len(memo) == 0
    assert torch.equal(call(positions), positions * 2)


def test_two_batches_in_turn_are_both_kept_and_old_ones_go(memoized_double):
    batches = [torch.arange(n) for n in range(1, MAX_BATCHES + 2)]
    for batch in batches[:2] * 3:
        memoized_double(batch)
    assert memoized_double.computed == 2
    for batch in batches:
        memoized_double(batch)
    assert len(memoized_double.memo) == MAX_BATCHES


def test_threads_with_batches_of_their_own(memoized_double):
    failures = []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        positions = torch.randint(0, 100, (64,), generator=generator)
        try:
            for i in range(1000):
                memoized_double(positions)
                memoized_double(positions)
                if i % 3 == 0:
                    positions.add_(seed)
                elif i % 3 == 1:
                    positions = torch.randint(0, 100, (64,), generator=generator)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(memoized_double.memo) == 0


def test_equal_keys_share_and_unused_ones_go():
    memo = BatchMemo()
    first, other = memo.results_of(("a", 1)), memo.results_of(("a", 2))
    assert memo.results_of(("a", 1)) is first
    assert first is not other
    gone = weakref.ref(first)
    del first
    assert gone() is None
