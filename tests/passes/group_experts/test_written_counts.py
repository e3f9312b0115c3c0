"""What a loop over hit experts or sorted rows counts with, written after it was made; each beside what is grouped."""

import pytest
import torch
import torch.nn.functional as F

from tests.passes.group_experts.loops import EXPERTS, WIDTH, inputs_for, routings
from tests.passes.group_experts.piece_loops import combine, in_pieces, routed, router_inputs
from tests.passes.group_experts.test_twists import _grouped, check, rewrites
from tests.slow import one_in


def _hit_loop(what=None, dtype=torch.int64):
    def loop(x, selected, weights, gate_up, down):
        out = torch.zeros_like(x)
        mask = F.one_hot(selected, num_classes=EXPERTS).permute(2, 1, 0)
        if what == "mask":
            mask[3] = 0
        counts = mask.to(dtype).sum(dim=(-1, -2))
        if what == "counts":
            counts[3] = 0
        greater = counts > 0
        if what == "greater":
            greater[3] = False
        hit = greater.nonzero()
        if what == "hits":
            hit.clamp_(max=2)
        for expert in hit:
            slot, token = torch.where(mask[expert[0]])
            rows = F.linear(x[token], gate_up[expert[0]])[:, :WIDTH]
            out.index_add_(0, token, rows * weights[token, slot, None])
        return out

    return loop


def _guarded_loop(written):
    """``if n == 0: continue``, of a number of rows."""

    def loop(x, selected, weights, gate_up, down):
        out = torch.zeros_like(x)
        for expert in range(EXPERTS):
            mask = selected == expert
            number = mask.sum()
            if written and expert == 2:
                number.zero_()
            if number == 0:
                continue
            token, slot = torch.where(mask)
            out.index_add_(0, token, F.linear(x[token], gate_up[expert])[:, :WIDTH] * weights[token, slot, None])
        return out

    return loop


def _pieces(counted):
    def loop(x, logits, gate_up, down):
        weights, selected, order = routed(logits)
        counts = counted(selected)
        rows = in_pieces(x[order // selected.shape[1]], counts.tolist(), gate_up, down)
        return combine(x, weights, selected, order, rows)

    return loop


def _ones(written, by=torch.Tensor.fill_):
    def counted(selected):
        ones = torch.ones_like(selected.flatten())
        if written:
            by(ones, 1)
        return torch.zeros(EXPERTS, dtype=torch.int64).scatter_add(0, selected.flatten(), ones)

    return counted


def _scattered(write):
    def counted(selected):
        gates = selected.new_zeros((selected.shape[0], EXPERTS))
        gates.scatter_(1, selected, 1)
        write(gates)
        return gates.sum(axis=0)

    return counted


def _moves_a_row(gates):
    gates[:, 0] += gates[:, 1]
    gates[:, 1] = 0


HIT = {
    "nothing written": (_hit_loop(), True),
    "mask": (_hit_loop("mask"), False),
    "counts": (_hit_loop("counts"), False),
    "greater": (_hit_loop("greater"), False),
    "hits": (_hit_loop("hits"), False),
    "counted in bf16": (_hit_loop(dtype=torch.bfloat16), False),
    "counted in fp32": (_hit_loop(dtype=torch.float32), True),
    "guarded": (_guarded_loop(False), True),
    "guarded by a number that is written": (_guarded_loop(True), False),
}
"""Name → the loop, and whether it is proved; if not, the frame is converted again as Dynamo does."""
SORTED = {
    "ones": (_pieces(_ones(False)), 1),
    "ones that are filled in": (_pieces(_ones(True)), 1),
    "ones that are written": (_pieces(_ones(True, torch.Tensor.mul_)), 0),
    "ones that a barrier may write": (_pieces(_ones(True, rewrites)), 0),
    "scattered": (_pieces(_scattered(lambda gates: None)), 1),
    "scattered and written": (_pieces(_scattered(_moves_a_row)), 0),
}


@pytest.mark.parametrize("name", one_in(3, HIT))
def test_hit_experts(name):
    torch.manual_seed(0)
    loop, grouped = HIT[name]
    selected = routings()["spread"]
    run = check(loop, selected, inputs_for(selected))
    assert bool(run.session.capture_events) != grouped
    assert not grouped or _grouped(run) == 1


@pytest.mark.parametrize("name", one_in(2, SORTED))
def test_sorted_rows(name):
    torch.manual_seed(0)
    loop, grouped = SORTED[name]
    x, *rest = router_inputs()
    run = check(lambda x, _, *others: loop(x, *others), torch.zeros(1), [x, *rest])
    assert _grouped(run) == grouped
