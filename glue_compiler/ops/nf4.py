"""Weights of 4 bits (NF4), as numbers of 16 or 32 bits again.

NF4 is of QLoRA (arXiv:2305.14314, appendix E); its layout in memory and its scales of 8 bits are bitsandbytes'.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from glue_compiler.compat import triton_calls
from glue_compiler.fx.modes import Mode
from glue_compiler.fx.node_maker import NodeMaker
from glue_compiler.fx.values import value_of
from glue_compiler.ops.kernel_support import runs_triton
from glue_compiler.ops.opaque import opaque

NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The numbers that four bits stand for: quantiles of a normal distribution."""

SCALE_BLOCK = 256
"""Scales of 8 bits that share a scale."""


@opaque("dequantize_nf4")
def dequantize_nf4(
    packed: Tensor,
    scales: Tensor,
    block: int,
    shape: list[int],
    dtype: torch.dtype,
    scale_codes: Tensor | None = None,
    scale_table: Tensor | None = None,
    scale_offset: Tensor | None = None,
) -> Tensor:
    """``bitsandbytes::dequantize_4bit`` of type nf4, and the dequantisation of its scales.

    Args:
        packed: uint8, contiguous; each byte is two numbers, the first in its upper half.
        scales: float32 ``[blocks]``, one for each ``block`` numbers; with ``scale_codes`` one for each 256 of those.
        shape: of the result, ``2 * packed.numel()`` numbers, a multiple of ``block``.
        dtype: of the result, floating; products are in float32.
        scale_codes: uint8 ``[blocks]``, places in ``scale_table``, float32 ``[256]``: a scale is the number there times
            its own scale, plus ``scale_offset``, float32 of one element.

    Returns:
        ``[*shape]``, contiguous.
    """
    if runs_triton(packed):
        from glue_compiler.ops import nf4_triton  # Windows has no Triton

        table, out = torch.tensor(NF4, device=packed.device), packed.new_empty(shape, dtype=dtype)
        nf4_triton.launch(packed, scales, table, out, block, SCALE_BLOCK, scale_codes, scale_table, scale_offset)
        return out
    if scale_codes is not None:
        assert scale_table is not None
        assert scale_offset is not None
        own = scales.repeat_interleave(SCALE_BLOCK)[: scale_codes.numel()]
        scales = scale_table[scale_codes.long()] * own + scale_offset
    table = torch.tensor(NF4, device=packed.device)
    halves = torch.stack([packed.flatten() >> 4, packed.flatten() & 15], 1).flatten()
    numbers = table[halves.long()].view(-1, block) * scales[:, None]
    return numbers.view(shape).to(dtype)


@dequantize_nf4.register_fake
def _(
    packed: Tensor,
    scales: Tensor,
    block: int,
    shape: list[int],
    dtype: torch.dtype,
    scale_codes: Tensor | None = None,
    scale_table: Tensor | None = None,
    scale_offset: Tensor | None = None,
) -> Tensor:
    return packed.new_empty(shape, dtype=dtype)


def launch_in_graph(graph: fx.Graph) -> None:
    """Has the compiler launch the kernel of each ``dequantize_nf4`` on a GPU: an operator's own launch takes ten times
    as long on the host.

    Args:
        graph: of ATen operators, as Inductor gets it. Changed in place.
    """
    calls = graph.find_nodes(op="call_function", target=torch.ops.glue.dequantize_nf4.default)
    calls = [call for call in calls if value_of(call).is_cuda]
    if not calls:
        return
    from glue_compiler.ops import nf4_triton

    nodes, tables = NodeMaker(value_of(calls[0]).fake_mode, key="val"), dict[torch.device, fx.Node]()
    for call in calls:
        packed, scales, block, shape, dtype, *nested = call.args
        device, numbers = value_of(call).device, value_of(call).numel()
        with nodes.before(call, Mode(), call):
            if device not in tables:  # in a body, too: its constants would have to be passed to it
                tables[device] = _table_in_graph(nodes, device)
            out = nodes.call(torch.ops.aten.empty.memory_format, shape, dtype=dtype, device=device)
            given = (packed, scales, tables[device], out, block, SCALE_BLOCK, *nested)
            tensors, constants = nf4_triton.arguments(numbers, *given)
            grid = nf4_triton.programs(numbers), 1, 1
            written = triton_calls.call_in_graph(nodes.call, nf4_triton.dequantize, grid, tensors, constants, "out")
        call.replace_all_uses_with(written)
        graph.erase_node(call)


def _table_in_graph(nodes: NodeMaker, device: torch.device) -> fx.Node:
    aten, floats = torch.ops.aten, {"dtype": torch.float32, "device": device}
    integers = {"dtype": torch.int32, "device": device, "requires_grad": False}
    places = nodes.call(torch.ops.prims.iota.default, len(NF4), start=0, step=1, **integers)
    table = nodes.call(aten.full.default, [len(NF4)], NF4[-1], **floats)
    for place, number in enumerate(NF4[:-1]):
        one = nodes.call(aten.full.default, [], number, **floats)
        table = nodes.call(aten.where.self, nodes.call(aten.eq.Scalar, places, place), one, table)
    return table
