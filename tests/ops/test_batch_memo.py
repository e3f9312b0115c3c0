"""The run-time memo: what is the same batch, what is not, and when a batch's results go."""

import copy
import ctypes
import gc
import threading
import weakref

import numpy
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from glue_compiler.ops.batch_memo import MAX_BATCHES, BatchMemo, PrologueResults, memoized


class Memoized:
    """A memoized function of one integer tensor: its values doubled, their sum, and how often that was computed."""

    def __init__(self):
        self.memo, self.computed = PrologueResults(), 0
        self.call = memoized(lambda positions, doubled, total: (doubled, total), self.prologue, (0,), self.memo)

    def prologue(self, positions):
        self.computed += 1
        return positions * 2, int(positions.sum())

    def __call__(self, positions):
        doubled, total = self.call(positions)
        assert torch.equal(doubled, positions * 2)
        assert total == int(positions.sum())
        return doubled


@pytest.fixture
def memoized_double():
    return Memoized()


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


def filled(positions):
    """A buffer that a deep copy took along with its view: their memory is one, their version counters are two."""
    module = torch.nn.Module()
    module.buffer = positions.clone()
    module.view = module.buffer[:]
    module = copy.deepcopy(module)
    return module.view, lambda: module.buffer.add_(1)


def writing(positions, alias):
    return positions, lambda: alias.__setitem__(0, 7)


def memory_of_python(_):
    memory = bytearray(40)
    return torch.frombuffer(memory, dtype=torch.int64), lambda: memory.__setitem__(slice(0, 8), b"\1" * 8)


def memory_of_numpy(_):
    array = numpy.arange(5)
    return torch.from_numpy(array), lambda: array.__setitem__(1, 7)


def in_inference_mode(positions):
    with torch.inference_mode():
        positions = positions.clone()

    def write():
        with torch.inference_mode():
            positions.add_(1)

    return positions, write


def swapped(positions):
    return positions, lambda: torch.utils.swap_tensors(positions, positions + 1)


def shrunk_and_grown(positions):
    return positions, lambda: (positions.resize_(0), positions.resize_(5), positions.data.fill_(3))


def by_a_custom_operator(positions):
    @torch.library.custom_op("glue_memo_test::fill", mutates_args=())  # it says that it writes nothing
    def fill(x: torch.Tensor) -> torch.Tensor:
        x.data.fill_(9)
        return x.clone()

    return positions, lambda: fill(positions)


WRITES = {
    "in place": lambda p: (p, lambda: p.add_(1)),
    "through .data": lambda p: (p, lambda: p.data.add_(1)),
    "through a parameter's .data": lambda p: (q := torch.nn.Parameter(p, False), lambda: q.data.add_(1)),
    "through its storage": lambda p: (p, lambda: p.untyped_storage().fill_(1)),
    "a copy into its storage": lambda p: (p, lambda: p.untyped_storage().copy_((p + 1).untyped_storage())),
    "through another tensor over its storage": lambda p: writing(p, torch.empty(0, dtype=p.dtype).set_(p)),
    "through a tensor made from its storage": lambda p: (
        p,
        lambda: torch.tensor([], dtype=p.dtype).set_(p.untyped_storage()).add_(1),
    ),
    "through a buffer that was copied along": filled,
    "through DLPack": lambda p: writing(p, torch.from_dlpack(p)),
    "of memory from DLPack": lambda p: (torch.from_dlpack(p), lambda: p.add_(1)),
    "through numpy": lambda p: writing(p, p.numpy()),
    "of memory of numpy": memory_of_numpy,
    "of memory of Python": memory_of_python,
    "of memory of other processes": lambda p: (p.share_memory_(), lambda: p.data.add_(1)),
    "of other data behind the tensor": lambda p: (p, lambda: setattr(p, "data", p + 1)),
    "of other memory behind the tensor": lambda p: (p, lambda: p.set_(p + 1)),
    "by swapping": swapped,
    "of an inference tensor": in_inference_mode,
    "of memory that was given up": shrunk_and_grown,
    "by a custom operator": by_a_custom_operator,
    "by a kernel": lambda p: (p, lambda: ctypes.memset(p.data_ptr(), 1, 8)),
}


@pytest.mark.parametrize("case", WRITES.values(), ids=WRITES)
def test_every_write_is_seen(memoized_double, case):
    positions, write = case(torch.arange(5))
    for _ in range(2):
        memoized_double(positions)
    assert memoized_double.computed == 1, "and without one, what was computed is found"
    before = positions.clone()
    write()
    assert not torch.equal(positions, before)
    memoized_double(positions)
    assert memoized_double.computed == 2


def test_a_write_to_a_view_with_gaps_is_seen(memoized_double):
    positions = torch.arange(20).view(4, 5)[:, :3]
    for _ in range(2):
        memoized_double(positions)
    positions.data[3, 2] = 1
    memoized_double(positions)
    assert memoized_double.computed == 2


def test_a_write_beside_a_view_is_none(memoized_double):
    positions = torch.arange(20).view(4, 5)
    memoized_double(positions[:, :3])
    positions[:, 3:] = 0
    memoized_double(positions[:, :3])
    assert memoized_double.computed == 1


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


class OnDevice:
    """Memory that the host cannot read, so that no copy can be compared: two layers, and how often one computed."""

    def __init__(self):
        self.computed = 0
        self.layers = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
        self.positions = torch.arange(5, device="meta")
        self.call = memoized(lambda weight, positions, doubled: doubled, self.prologue, (1,), PrologueResults())

    def prologue(self, positions):
        self.computed += 1
        return (positions * 2,)

    def forward(self):
        for layer in self.layers:
            self.call(layer, self.positions)

    def backward(self, *layers):
        """One backward that recomputes the layers."""

        class Recompute(torch.autograd.Function):
            @staticmethod
            def forward(context, x):
                return x.clone()

            @staticmethod
            def backward(context, gradient):
                for layer in layers:
                    self.call(layer, self.positions)
                return gradient

        Recompute.apply(torch.ones(1, requires_grad=True)).backward()


def test_on_a_device_one_forward_and_its_backward_share():
    device = OnDevice()
    device.forward()
    device.backward(*reversed(device.layers))
    assert device.computed == 1


def test_on_a_device_the_next_forward_computes_again():
    device = OnDevice()
    for step in range(3):
        device.forward()
        device.backward(*device.layers)
        assert device.computed == step + 1


def test_on_a_device_the_next_backward_computes_again():
    device = OnDevice()
    device.forward()
    device.backward(device.layers[1])
    device.backward(device.layers[0])
    assert device.computed == 2


def test_on_a_device_what_one_backward_computed_is_not_for_another():
    device = OnDevice()
    for layer in device.layers:
        device.backward(layer)
    assert device.computed == 2


def test_on_a_device_a_layer_that_comes_twice_in_a_backward_computes_again():
    device = OnDevice()
    device.forward()
    device.backward(device.layers[0], device.layers[0])
    assert device.computed == 2


def test_on_a_device_a_forward_without_gradients_is_a_pass_of_its_own():
    device = OnDevice()
    with torch.no_grad():
        device.call(device.layers[0], device.positions)
    device.call(device.layers[1], device.positions)
    assert device.computed == 2


def test_on_a_device_code_without_parameters_is_one_caller():
    """The same function, compiled again for another kind of input, could not be told from another layer."""
    device, memo = OnDevice(), PrologueResults()
    for _ in range(2):
        memoized(lambda positions, doubled: doubled, device.prologue, (0,), memo)(device.positions)
    assert device.computed == 2


@pytest.mark.parametrize("write", [torch.Tensor.zero_, lambda p: p[2:].zero_(), lambda p: p.set_(p + 1)])
def test_on_a_device_a_write_that_torch_counts_is_seen_within_a_pass(write):
    device = OnDevice()
    device.call(device.layers[0], device.positions)
    write(device.positions)
    device.call(device.layers[1], device.positions)
    assert device.computed == 2


def test_on_a_device_a_lazily_negated_tensor_is_not_the_one_behind_it():
    device = OnDevice()
    device.call(device.layers[0], device.positions)
    device.call(device.layers[1], torch._neg_view(device.positions))
    assert device.computed == 2


def inference_tensor():
    with torch.inference_mode():
        return torch.arange(4, device="meta")


def test_on_a_device_what_has_no_version_counter_is_computed_each_time():
    device = OnDevice()
    device.positions = inference_tensor()
    device.forward()
    assert device.computed == 2


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


def test_threads_with_batches_of_their_own():
    memoized_double, failures = Memoized(), []

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


@pytest.mark.gpu
def test_another_stream_waits_for_the_one_that_computed():
    side = torch.cuda.Stream()
    rounds = 50
    call = memoized(lambda w, p, out: out, slow_copy, (1,), PrologueResults())
    first, second = two_layers()
    for i in range(rounds):
        positions = torch.full((1 << 20,), i, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            computed = call(first, positions)
        got = call(second, positions)
        assert got is computed
        got = got + 0  # on the default stream, while the side stream still computes
        assert int((got != i).sum()) == 0


def two_layers():
    return [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]


def slow_copy(positions):
    torch.cuda._sleep(20_000_000)
    return (positions.clone(),)


@pytest.mark.gpu
def test_results_freed_while_another_stream_reads_them():
    side = torch.cuda.Stream()
    call = memoized(lambda w, p, out: out, lambda p: (p.clone(),), (1,), PrologueResults())
    first, second = two_layers()
    for i in range(50):
        positions = torch.full((1 << 20,), i, device="cuda")
        computed = id(call(first, positions))
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            got = call(second, positions)
            assert id(got) == computed
            got = got + 0
        del positions  # with it the results, which the side stream has not read yet
        torch.full((1 << 20,), -1, device="cuda")
        torch.full((1 << 20,), -1, device="cuda")
        torch.cuda.synchronize()
        assert int((got != i).sum()) == 0


@pytest.mark.gpu
def test_a_freed_batch_gives_back_its_bytes():
    call = memoized(lambda p, out: None, lambda p: (p.repeat(1000),), (0,), PrologueResults())
    positions = torch.arange(1024, device="cuda")
    before = torch.cuda.memory_allocated()
    call(positions)
    assert torch.cuda.memory_allocated() - before >= 1000 * 1024 * 8
    del positions
    assert torch.cuda.memory_allocated() < before


@pytest.mark.gpu
def test_a_captured_graph_computes_again():
    call = memoized(lambda w, p, out: out, lambda p: (p * 2,), (1,), PrologueResults())
    positions = torch.arange(4, device="cuda")
    first, second = two_layers()
    call(first, positions)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(second, positions)
    positions.fill_(7)
    graph.replay()
    torch.cuda.synchronize()
    assert out.tolist() == [14] * 4


@pytest.mark.gpu
@pytest.mark.parametrize("make", [torch.from_dlpack, torch.clone])
def test_device_memory_that_came_through_dlpack_is_computed_each_time(make):
    """Its writes advance the counter of the tensor that it came from."""
    origin = torch.arange(4, device="cuda")
    positions = make(origin)
    call = memoized(lambda w, p, out: out, lambda p: (p * 2,), (1,), PrologueResults())
    first, second = two_layers()
    computed = call(first, positions)
    origin.add_(1)
    assert (call(second, positions) is computed) == (make is torch.clone)
    assert torch.equal(call(second, positions), positions * 2)


@pytest.mark.gpu
def test_device_memory_that_is_filled_past_the_counter_is_seen_in_the_next_pass():
    positions = torch.arange(4, device="cuda")
    call = memoized(lambda w, p, out: out, lambda p: (p * 2,), (1,), PrologueResults())
    layers = two_layers()
    for _ in range(3):
        results = [call(layer, positions) for layer in layers]
        assert results[0] is results[1]
        assert torch.equal(results[0], positions * 2)
        positions.data.add_(1)


@pytest.mark.gpu
def test_two_devices():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    call = memoized(lambda p, out: out, lambda p: (p * 2,), (0,), PrologueResults())
    batches = [torch.arange(4, device=f"cuda:{i}") + i for i in range(2)]
    for batch in batches * 2:
        assert torch.equal(call(batch), batch * 2)
        assert call(batch).device == batch.device
