"""Every way to write a batch in place: the run-time memo must not give back what it computed before."""

import copy
import ctypes

import numpy
import pytest
import torch


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
