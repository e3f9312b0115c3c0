"""In Inductor's code for a forward with moves, nothing reads or writes a host tensor while it is being filled.

On a device the copy that fills it runs beside the host: what the wrapper does with it on the host would see half of it.
"""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

from glue_compiler.ops.device_rates import Rates
from glue_compiler.passes import plan_memory
from glue_compiler.passes.plan_memory import moves
from tests.captured import compile_with_glue
from tests.passes.overlap_offload.models import Block, step

NAME = r"[a-zA-Z_]\w*"
# Each reads sizes, strides or an address, or gives the same memory another name.
HARMLESS = (
    rf"{NAME} = {NAME}",
    rf"{NAME} = {NAME}; del {NAME}  # reuse",
    rf"del {NAME}",
    rf"assert_size_stride\({NAME}, .*\)",
    rf"assert_alignment\({NAME}, .*\)",
    r"return \(.*\)",
)


def touched(code):
    """The lines of a forward's ``call`` that may read or write what an ``offload_start`` returned."""
    lines = [line.strip() for line in code[code.index("def call(") :].splitlines()]
    hosts, found = set(), []
    for line in lines:
        start = re.fullmatch(rf"({NAME}) = torch\.ops\.glue\.offload_start\.default\(({NAME}), (.*)\)", line)
        wait = re.fullmatch(rf"({NAME}) = torch\.ops\.glue\.offload_wait\.default\(({NAME}), (.*)\)", line)
        named = hosts & set(re.findall(NAME, line))
        if start:
            hosts.add(start[1])
            found += [line] if start[2] in hosts else []  # what it comes after, it does not read
        elif wait and wait[2] in hosts:
            hosts.add(wait[1])
        elif renamed := re.fullmatch(rf"({NAME}) = ({NAME})(; del {NAME}  # reuse)?", line):
            hosts |= {renamed[1]} if renamed[2] in hosts else set()
            hosts -= set() if renamed[2] in hosts else {renamed[1]}
        elif named and not line.startswith("#") and not any(re.fullmatch(each, line) for each in HARMLESS):
            found.append(line)
    return found, hosts


class Turned(nn.Module):
    """Saves values of four dimensions, with sizes of one, transposed and in pieces."""

    def __init__(self):
        super().__init__()
        self.products = nn.ModuleList(nn.Linear(12, 12) for _ in range(6))

    def forward(self, x):
        for number, product in enumerate(self.products):
            wide = product(x).tanh().unflatten(-1, (3, 4))
            turned = wide.transpose(-1, -2) if number % 2 else wide.unsqueeze(0).sin()
            x = x + torch.sigmoid(turned.reshape(*x.shape)) * wide.flatten(-2)
        return x


class Images(nn.Module):
    """Convolutions, whose layout Inductor chooses."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x.relu()).tanh()
        return x


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(17) for _ in range(6))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


CASES = {
    "odd sizes": (Blocks, (67, 17)),
    "turned": (Turned, (1, 33, 12)),
    "images": (Images, (2, 8, 6, 6)),
}


def forward_code(kind, **how):
    """Inductor's code of a forward in which something moves."""
    make, sizes = CASES[kind]
    model, x = make(), torch.randn(*sizes)
    run = compile_with_glue(
        model,
        memory_budget=1,
        passes={"plan_memory": True},
        compiler="inductor",
        fx_graph_cache=False,
        **how,
    )
    _, sources = run_and_get_code(lambda: step(run.call, model, x))
    (code,) = [source for source in sources if "offload_start" in source]
    return code


@pytest.fixture(autouse=True)
def all_of_it_moves(monkeypatch):
    """Computing again takes for ever, and copying no time."""
    monkeypatch.setattr(moves, "LEAST", 0.0)
    monkeypatch.setattr(plan_memory, "rates_of", lambda device: Rates(flops=1e6, memory=1e8, link=1e12))
    monkeypatch.setattr(plan_memory.PlanMemory, "excess", lambda self, pair, context: 0)
    own = plan_memory.plan_memory

    def keep_and_move(step, rates, budget, may_move, *, fuses, **_):
        peak = own(step, rates, 2**60, frozenset(), fuses=fuses).peak
        plans = (own(step, rates, int(share * peak), may_move, fuses=fuses) for share in (0.9, 0.8, 0.7, 0.6, 0.5))
        return max(plans, key=lambda plan: len(plan.moved))

    monkeypatch.setattr(plan_memory, "plan_memory", keep_and_move)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:glue. the memory_budget of")
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("kind", CASES)
def test_nothing_touches_a_host_tensor(kind, dynamic, padded):
    with config.patch(pad_outputs=padded, comprehensive_padding=padded, padding_stride_threshold=0):
        found, hosts = touched(forward_code(kind, dynamic=dynamic))
    assert len(hosts) >= 4
    assert found == []


def test_a_kernel_or_a_copy_on_the_way_is_seen():
    code = """def call(self, args):
        buf1 = torch.ops.glue.offload_start.default(buf0, None, -1)
        buf2 = buf1
        del buf1
        assert_size_stride(buf2, (8, 4), (4, 1), 'torch.ops.glue.offload_start.default')
        buf3 = torch.ops.glue.offload_wait.default(buf2, buf0, buf9)
        buf4 = buf3
        {}
        return (buf8, primals_1, buf4, )
    """
    assert touched(code.format("cpp_fused_add_0(buf9, buf8)"))[0] == []
    for line in ("cpp_fused_clone_0(buf4, buf5)", "buf5.copy_(buf2)", "buf5 = torch.ops.aten.clone.default(buf4)"):
        assert touched(code.format(line))[0] == [line]
