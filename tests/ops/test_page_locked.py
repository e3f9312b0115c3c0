"""Page-locked memory: how much, how long, and what happens where the system refuses."""

from __future__ import annotations

import multiprocessing
import os
import pathlib
import subprocess
import sys

import pytest
import torch

from glue_compiler.ops import page_locked as module
from glue_compiler.ops.page_locked import page_locked


@pytest.fixture
def locked(monkeypatch):
    """Stands for the driver: bytes locked by address."""
    held = {}

    def lock(address, nbytes):
        held[address] = nbytes
        return lambda: held.pop(address)

    monkeypatch.setattr(module, "lock_pages", lock)
    return held


@pytest.mark.parametrize("nbytes", [1, 5000, 3 * 2**20 + 1])
def test_exactly_so_many_bytes_are_locked_until_the_last_tensor_goes(locked, nbytes):
    memory = page_locked(nbytes)
    memory.fill_(7)
    assert (memory.dtype, memory.numel(), memory.storage_offset()) == (torch.uint8, nbytes, 0)
    assert locked == {memory.data_ptr(): nbytes}
    part = memory[:1]
    del memory
    assert len(locked) == 1
    assert part.item() == 7
    del part
    assert locked == {}


def test_memory_that_cannot_be_locked_goes_at_once(monkeypatch):
    def refuse(address, nbytes):
        raise RuntimeError("the driver cannot lock 8 bytes")

    monkeypatch.setattr(module, "lock_pages", refuse)
    with pytest.raises(RuntimeError, match="cannot lock 8 bytes"):
        page_locked(8)


def test_a_forked_child_does_not_unlock(locked, monkeypatch):
    memory = page_locked(8)
    monkeypatch.setattr(module._Mapping, "_process", staticmethod(lambda: os.getpid() + 1))
    del memory
    assert len(locked) == 1


def exit_with_1_where_mapped(address):
    ranges = [line.split()[0].split("-") for line in pathlib.Path("/proc/self/maps").read_text().splitlines()]
    sys.exit(any(int(start, 16) <= address < int(end, 16) for start, end in ranges))


@pytest.mark.skipif(not pathlib.Path("/proc/self/maps").exists(), reason="needs Linux")
def test_a_forked_child_does_not_share_the_pages(locked):
    memory, ordinary = page_locked(4096), torch.empty(4096)
    for tensor, expected in ((memory, 0), (ordinary, 1)):
        child = multiprocessing.get_context("fork").Process(target=exit_with_1_where_mapped, args=(tensor.data_ptr(),))
        child.start()
        child.join()
        assert child.exitcode == expected


@pytest.mark.gpu
def test_the_device_copies_from_and_to_it():
    x = torch.randint(0, 255, (3 * 2**20 + 1,), dtype=torch.uint8, device="cuda")
    before = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    memory = page_locked(x.numel())
    assert memory.is_pinned()
    assert torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) == before
    memory.copy_(x, non_blocking=True)
    back = torch.empty_like(x).copy_(memory, non_blocking=True)
    assert torch.equal(back, x)
    assert torch.equal(memory, x.cpu())


@pytest.mark.gpu
def test_a_refusal_is_not_the_error_of_the_next_kernel():
    memory = page_locked(4096)
    with pytest.raises(RuntimeError, match="cannot lock 4.00 KiB"):
        module.lock_pages(memory.data_ptr(), 4096)  # it is locked already
    assert torch.ones(3, device="cuda").sum().item() == 3


@pytest.mark.gpu
def test_a_program_ends_while_the_pool_holds_memory():
    program = """
import torch
from glue_compiler.ops import offload
x = torch.randn(1000, device="cuda")
host = torch.ops.glue.offload_wait(torch.ops.glue.offload_start(x, None, -1), x, None)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_copy_is_the_tensor_itself_where_the_system_refuses(monkeypatch):
    """WSL refuses to pin much."""
    host = torch.arange(4)

    def refuse(tensor):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)
    assert module.locked_copy(host) is host
