"""Loops over pieces of rows that are sorted by expert, as models write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.captured import Run, count
from tests.passes.group_experts.loops import EXPERTS, INNER, TOP_K, WIDTH

glue = torch.ops.glue
READS = ("item", "tolist")
SPLITS = ("split", torch.split, torch.functional.split)


def router_inputs(tokens=11, experts=EXPERTS, dtype=torch.float64, favourite=None):
    """[x, router logits, gate_up, down], all needing gradients; ``favourite``: an expert that gets every first slot."""
    logits = torch.randn(tokens, experts, dtype=dtype)
    if favourite is not None:
        logits[:, favourite] += 100
    tensors = [
        torch.randn(tokens, WIDTH, dtype=dtype),
        logits,
        torch.randn(experts, 2 * INNER, WIDTH, dtype=dtype),
        torch.randn(experts, WIDTH, INNER, dtype=dtype),
    ]
    return [tensor.requires_grad_() for tensor in tensors]


def routed(logits, top_k=TOP_K):
    """(weights, selected experts, slots in the order of their experts)."""
    weights, selected = torch.topk(F.softmax(logits, dim=-1), min(top_k, logits.shape[1]), dim=-1)
    return weights, selected, selected.flatten().argsort(stable=True)


def combine(x, weights, selected, order, rows):
    """Weighted sum of each token's rows."""
    rows = rows * weights.flatten()[order, None]
    return torch.zeros_like(x).index_add(0, order // selected.shape[1], rows)


def parallel(rows, sizes, weight):
    """The linear layers of all experts, as jetmoe and the granitemoe of transformers 4 have them."""
    pieces = rows.split(sizes, dim=0)
    return torch.cat([F.linear(pieces[i], weight[i]) for i in range(weight.shape[0])], dim=0)


def loop_split(x, logits, gate_up, down):
    weights, selected, order = routed(logits)
    gates = torch.zeros_like(logits).scatter(1, selected, 1)
    sizes = gates.long().sum(0).tolist()
    gate, up = parallel(x[order // selected.shape[1]], sizes, gate_up).chunk(2, dim=-1)
    return combine(x, weights, selected, order, parallel(F.silu(gate) * up, sizes, down))


def sliced(rows, counts, weight):
    """The products of all experts, as aria of transformers 4 has them. ``weight[e]`` is ``[K, N]``."""
    out = torch.zeros(rows.shape[0], weight.shape[-1], dtype=rows.dtype, device=rows.device)
    ends = torch.cumsum(counts, dim=0)
    ends = torch.cat((torch.zeros(1, dtype=torch.long, device=counts.device), ends))
    for expert in range(weight.shape[0]):
        start, end = ends[expert], ends[expert + 1]
        out[start:end] = torch.matmul(rows[start:end], weight[expert])
    return out


def loop_slice(x, logits, gate_up, down):
    weights, selected, order = routed(logits)
    experts = gate_up.shape[0]
    counts = torch.histc(selected.flatten().to(torch.float32), bins=experts, min=0, max=experts - 1).to(torch.long)
    gate, up = sliced(x.index_select(0, order // selected.shape[1]), counts, gate_up.mT).chunk(2, dim=-1)
    return combine(x, weights, selected, order, sliced(F.silu(gate) * up, counts, down.mT))


def in_pieces(rows, counts, gate_up, down):
    """The experts of the published DeepSeek code, without its test for an expert without rows."""
    outputs, start = [], 0
    for expert, n in enumerate(counts):
        end = start + n
        gate, up = F.linear(rows[start:end], gate_up[expert]).chunk(2, dim=-1)
        outputs.append(F.linear(F.silu(gate) * up, down[expert]))
        start = end
    return torch.cat(outputs, dim=0)


def written_slice_by_slice(out, rows, counts, weight):
    """``out``, with the products of all experts written to its slices. ``weight[e]`` is ``[N, K]``."""
    start = 0
    for expert, n in enumerate(counts):
        out[start : start + n] = F.linear(rows[start : start + n], weight[expert])
        start = start + n
    return out


def scattered_counts(selected, experts):
    counts = selected.new_zeros((selected.shape[0], experts))
    counts.scatter_(1, selected, 1)
    return counts.sum(dim=0)


def _deepseek(read):
    def loop(x, logits, gate_up, down):
        weights, selected, order = routed(logits)
        counts = read(scattered_counts(selected, logits.shape[1]))
        rows = in_pieces(x[order // selected.shape[1]], counts, gate_up, down)
        unsorted = torch.empty_like(rows)
        unsorted[order] = rows
        return (unsorted.view(*selected.shape, -1) * weights.unsqueeze(dim=-1)).sum(dim=1)

    return loop


loop_tensor = _deepseek(lambda counts: counts)
loop_list = _deepseek(lambda counts: counts.tolist())
loop_numpy = _deepseek(lambda counts: counts.cpu().numpy())

SPELLINGS = {
    "split": (loop_split, 2),
    "slice": (loop_slice, 2),
    "pieces, counts in a tensor": (loop_tensor, 1),
    "pieces, counts in a list": (loop_list, 1),
    "pieces, counts in numpy": (loop_numpy, 1),
}
"""Name → the loop, and how many loops over experts it has."""


def assert_grouped(run: Run, loops: int):
    """No piece is left, and no number is read from the counts."""
    assert run.graphs
    for graph, report in zip(run.graphs, run.session.graphs, strict=True):
        found = report.passes[0]
        assert found.counts.get("loops_grouped") == loops, found.skips
        assert count(graph, *READS, *SPLITS) == 0
        assert not [node for node in graph.graph.nodes if "wrapped_item" in str(node.target)]
        assert count(graph, torch.ops.aten._assert_scalar.default, torch.ops.aten._assert_async.msg) == 0
