"""The offload operators: schemas, fakes, copies on the CPU, and races on a GPU."""

from __future__ import annotations

import contextlib

import pytest
import torch

from glue_compiler.ops import offload
from glue_compiler.ops.copy_engine import engine

ops = torch.ops.glue
CPU = torch.device("cpu")
# What AOTAutograd's functionalisation refuses for any custom operator that returns an operand; these two are inserted
# behind it.
WITHOUT_FUNCTIONALISATION = ("test_schema", "test_autograd_registration", "test_faketensor")

TENSORS = {
    "contiguous": lambda: torch.randn(3, 4),
    "transposed": lambda: torch.randn(3, 4).t(),
    "every second column": lambda: torch.randn(3, 8)[:, ::2],
    "expanded": lambda: torch.randn(3, 1).expand(3, 4),
    "bfloat16": lambda: torch.randn(3, 4).bfloat16(),
    "int64": lambda: torch.arange(12).view(3, 4),
    "empty": lambda: torch.randn(0, 4),
    "0-dim": lambda: torch.randn(()),
}


@pytest.fixture(params=TENSORS.values(), ids=TENSORS.keys())
def tensor(request):
    return request.param()


def test_starts_pass_opcheck(tensor):
    torch.library.opcheck(ops.offload_start.default, (tensor, None, -1))
    torch.library.opcheck(ops.reload_start.default, (tensor, tensor, CPU))


def test_waits_pass_opcheck(tensor):
    torch.library.opcheck(ops.offload_wait.default, (tensor, tensor, None), test_utils=WITHOUT_FUNCTIONALISATION)
    torch.library.opcheck(ops.reload_wait.default, (tensor, tensor), test_utils=WITHOUT_FUNCTIONALISATION)


def test_schemas_say_that_waits_alias_and_starts_do_not():
    for name, aliases in (("offload_start", 0), ("offload_wait", 1), ("reload_start", 0), ("reload_wait", 1)):
        assert hasattr(offload, name)
        schema = getattr(ops, name).default._schema
        assert sum(ret.alias_info is not None for ret in schema.returns) == aliases
        assert not any(argument.is_write for argument in schema.arguments)


def test_a_round_trip_brings_every_bit_and_dense_strides_back(tensor):
    host = ops.offload_wait(ops.offload_start(tensor, None, -1), tensor, None)
    expected = tensor.clone()
    tensor.zero_() if tensor.is_contiguous() else None
    back = ops.reload_wait(ops.reload_start(host, None, CPU), None)
    assert torch.equal(back, expected)
    assert back.dtype == tensor.dtype
    assert back.stride() == torch.empty_like(tensor).stride()
    assert engine.in_flight() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("own_stream", [False, True])
def test_copies_beside_compute_are_those_of_synchronised_copies(own_stream):
    """Sources and buffers come from memory that is freed and reused all the time: a missing wait shows."""
    device = torch.device("cuda", torch.cuda.current_device())
    weight = torch.randn(1024, 1024, device=device)

    def run():
        x = torch.ones(1024, 1024, device=device)
        hosts = []
        for number in range(6):
            x = (x @ weight).tanh() + number
            if len(hosts) >= 2:
                host, source = hosts[-2]
                hosts[-2] = (ops.offload_wait(host, source, None), None)
                del source
            hosts.append((ops.offload_start(x, None, -1), x))
        hosts = [ops.offload_wait(h, s, None) if s is not None else h for h, s in hosts]
        total = torch.zeros_like(x)
        buffer = ops.reload_start(hosts[-1], None, device)
        for number in range(5, -1, -1):
            ready = ops.reload_wait(buffer, None)
            buffer = ops.reload_start(hosts[number - 1], None, device) if number else None
            total = (total + ready) @ weight * 1e-2
            del ready
        return total

    with torch.cuda.stream(torch.cuda.Stream()) if own_stream else contextlib.nullcontext():
        with engine.synchronised():
            expected = run()
        assert all(torch.equal(run(), expected) for _ in range(50))
    torch.cuda.synchronize()
    assert engine.in_flight() == 0


@pytest.mark.gpu
def test_streams_and_buffers_are_on_the_tensors_device():
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    x = torch.randn(5, device=device)
    host = ops.offload_wait(ops.offload_start(x, None, -1), x, None)
    assert host.is_pinned()
    back = ops.reload_wait(ops.reload_start(host, None, device), None)
    assert back.device == device
    assert torch.equal(back, x)
