"""Weights of 4 bits are dequantised as bitsandbytes does, and in a graph for a GPU the compiler launches the kernel."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from glue_compiler.ops import nf4

BLOCK = 64


def quantized(shape, nested):
    """Packed numbers, and scales as the operator takes them: alone, or of 8 bits."""
    functional = pytest.importorskip("bitsandbytes").functional
    packed, state = functional.quantize_4bit(torch.randn(shape), quant_type="nf4", compress_statistics=nested)
    if not nested:
        return packed, (state.absmax,), (), state
    return packed, (state.state2.absmax,), (state.absmax, state.state2.code, state.offset), state


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (96, 128), (512, 256)], ids=str)
def test_it_is_what_bitsandbytes_computes(shape, dtype, nested):
    packed, scales, codes, state = quantized(shape, nested)
    state.dtype = dtype
    found = nf4.dequantize_nf4(packed, *scales, BLOCK, list(shape), dtype, *codes)
    expected = pytest.importorskip("bitsandbytes").functional.dequantize_4bit(packed, state)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


@pytest.mark.parametrize("nested", [False, True])
def test_it_is_registered_as_it_behaves(nested):
    packed, scales, codes, _ = quantized((96, 128), nested)
    given = (packed, *scales, BLOCK, [96, 128], torch.float32, *codes)
    torch.library.opcheck(nf4.dequantize_nf4, given, test_utils=("test_schema", "test_faketensor"))


def graph_on(*devices):
    """A graph of one dequantisation on each device."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    graph, made = fx.Graph(), []
    for device in devices:
        with mode:
            values = [
                torch.empty(48 * 128, 1, dtype=torch.uint8, device=device),
                torch.empty(3, device=device),
                torch.empty(192, dtype=torch.uint8, device=device),
                torch.empty(256, device=device),
                torch.empty((), device=device),
            ]
            result = torch.empty(96, 128, dtype=torch.bfloat16, device=device)
        places = []
        for value in values:
            places.append(graph.placeholder("given"))
            places[-1].meta["val"] = value
        given = (*places[:2], BLOCK, [96, 128], torch.bfloat16, *places[2:])
        made.append(graph.call_function(torch.ops.glue.dequantize_nf4.default, given))
        made[-1].meta["val"] = result
    graph.output(tuple(made))
    return graph


@pytest.mark.parametrize(("devices", "tables"), [(("cuda:0", "cuda:0"), 1), (("cuda:0", "cuda:1"), 2)])
def test_on_a_gpu_the_compiler_launches_the_kernel(devices, tables):
    pytest.importorskip("triton")
    graph = graph_on(*devices)
    nf4.launch_in_graph(graph)
    graph.lint()
    targets = [str(node.target) for node in graph.nodes]
    assert "glue.dequantize_nf4.default" not in targets
    assert targets.count("prims.iota.default") == tables  # of a device, which all of its weights read
    calls = [node for node in graph.nodes if "triton_kernel_wrapper_functional" in str(node.target)]
    assert len(calls) == 2
    for call, result in zip(calls, graph.output_node().args[0], strict=True):
        assert len({tensor.meta["val"].device for tensor in call.kwargs["kwargs"].values()}) == 1
        assert result.meta["val"].shape == (96, 128)
        assert result.meta["val"].dtype == torch.bfloat16


def test_the_table_in_a_graph_is_nf4s():
    from glue_compiler.fx.modes import Mode
    from glue_compiler.fx.node_maker import NodeMaker

    graph = fx.Graph()
    end = graph.output(None)
    mode = FakeTensorMode()
    nodes = NodeMaker(mode, key="val")
    with nodes.before(end, Mode()):
        end.args = (nf4._table_in_graph(nodes, torch.device("cpu")),)
    assert fx.GraphModule({}, graph)().tolist() == torch.tensor(nf4.NF4).tolist()


def test_a_cpu_calls_the_operator():
    graph = graph_on("cpu", "cpu")
    nf4.launch_in_graph(graph)
    targets = [str(node.target) for node in graph.nodes]
    assert targets.count("glue.dequantize_nf4.default") == 2
