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
    "four sizes": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "five sizes": lambda: torch.randn(1, 2, 3, 4, 5),
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


def test_a_round_trip_brings_every_bit_back_in_the_order_of_the_sizes(tensor):
    host = ops.offload_wait(ops.offload_start(tensor, None, -1), tensor, None)
    expected = tensor.clone()
    tensor.zero_() if tensor.is_contiguous() else None
    back = ops.reload_wait(ops.reload_start(host, None, CPU), None)
    assert torch.equal(back, expected)
    assert back.dtype == tensor.dtype
    assert host.is_contiguous()
    assert host.dim() != 4  # Inductor would make another layout of it near a convolution
    assert back.is_contiguous()
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
@pytest.mark.parametrize("own_stream", [False, True])
def test_copies_are_on_the_tensors_device_whichever_device_and_stream_are_current(own_stream):
    """With two devices, the tensor's is not the current one."""
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    if torch.cuda.device_count() > 1:
        assert device.index != torch.cuda.current_device()
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream) if own_stream else contextlib.nullcontext():
        if own_stream:
            torch.cuda.set_device(0)  # the stream of one device is current, and another device
        for _ in range(20):
            x = torch.randn(2048, 2048, device=device)
            x = x @ x
            expected = x.clone()
            host = ops.offload_wait(ops.offload_start(x, None, -1), x, None)
            assert host.is_pinned()
            del x
            torch.full((2048, 2048), 7.0, device=device)  # takes the memory that was freed
            back = ops.reload_wait(ops.reload_start(host, None, device), None)
            assert back.device == device
            assert torch.equal(back, expected)
    torch.cuda.synchronize(device)


@pytest.mark.gpu
@pytest.mark.parametrize("index", [0, 1])
def test_each_of_two_devices_has_streams_of_its_own(index):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    device = torch.device("cuda", index)
    x = torch.randn(5, device=device)
    ops.offload_wait(ops.offload_start(x, None, -1), x, None)
    streams = engine._streams[device]
    assert streams.device_to_host.device == streams.host_to_device.device == device


@pytest.mark.gpu
def test_hooks_on_saved_tensors_read_host_tensors_that_have_arrived():
    x = torch.randn(64, 2**20, device="cuda")
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        host = ops.offload_wait(ops.offload_start(x, None, -1), x, None)
        assert torch.equal(host, x.cpu())


@pytest.mark.gpu
def test_a_capture_into_a_cuda_graph_is_refused():
    x = torch.randn(5, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="cannot be captured"), torch.cuda.graph(graph):
        ops.offload_start(x, None, -1)
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_memory_that_was_released_is_not_written_any_more():
    x = torch.randn(64, 2**20, device="cuda")
    host = ops.offload_wait(ops.offload_start(x, None, -1), x, None)
    engine.release()
    assert torch.equal(host, x.cpu())
