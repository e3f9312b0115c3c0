"""Whatever is kept, computed again or moved: outputs and gradients are bit by bit those of the step without a plan."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import linear, scaled_dot_product_attention, silu
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from glue_compiler.errors import GlueWarning
from glue_compiler.ops.device_rates import Rates
from glue_compiler.passes import plan_memory
from glue_compiler.passes.plan_memory import moves
from tests.captured import compile_with_glue
from tests.passes.overlap_offload.models import equal, gradients

WIDTH = 8
SHARES = (0.8, 0.6, 0.4, 0.0)
"""Of the peak of keeping all."""
SIZES = ((2, 12), (2, 12))


class Layer(nn.Module):
    """Attention and a gated product, with views and a norm between."""

    def __init__(self, adapter=False, dropout=0.0):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(dropout)
        self.adapter = nn.Sequential(nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH)) if adapter else None

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, WIDTH // 2)).transpose(-4, -2).unbind(-3)
        x = x + self.dropout(scaled_dot_product_attention(q, k, v).transpose(-3, -2).flatten(-2))
        gate, up = self.up(x).chunk(2, -1)
        if self.adapter is not None:
            up = up + self.adapter(x).repeat(1, 1, 2)
        return x + self.down(silu(gate) * up)


class Stack(nn.Module):
    def __init__(self, count=4, **how):
        super().__init__()
        self.layers = nn.ModuleList(Layer(**how) for _ in range(count))

    def layer(self, layer, x):
        return layer(x)

    def forward(self, x):
        for layer in self.layers:
            x = self.layer(layer, x)
        return x


class Checkpointed(Stack):
    def layer(self, layer, x):
        return checkpoint(layer, x, use_reentrant=False)


def save_some(context, operator, *args, **kwargs):
    if operator is torch.ops.aten.addmm.default:
        return CheckpointPolicy.MUST_SAVE
    return (
        CheckpointPolicy.MUST_RECOMPUTE
        if operator is torch.ops.aten.silu.default
        else CheckpointPolicy.PREFER_RECOMPUTE
    )


class Selective(Stack):
    def layer(self, layer, x):
        contexts = functools.partial(create_selective_checkpoint_contexts, save_some)
        return checkpoint(layer, x, use_reentrant=False, context_fn=contexts)


class FrozenBase(Stack):
    def __init__(self):
        super().__init__(adapter=True)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("adapter" in name)


class Tied(Stack):
    """One layer four times, and its weights once more in a head."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([self.layers[0]] * 4)

    def forward(self, x):
        return linear(super().forward(x), self.layers[0].down.weight.t())


class ManyReaders(Stack):
    """Values that all layers read, a view of one that is returned, and one that is read at the end again."""

    def forward(self, x):
        scale, first = torch.sigmoid(x.mean(-1, keepdim=True)), None
        for layer in self.layers:
            x = layer(x) * scale
            first = x if first is None else first
        return x + first.flip(-1), first[..., ::2]


class WritesABuffer(Stack):
    def __init__(self, count=4):
        super().__init__(count)
        self.register_buffer("mean", torch.full((1, 1, WIDTH), 0.5))

    def forward(self, x):
        x = super().forward(x * torch.sin(self.mean))
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        return x * torch.cos(self.mean)


MODELS = {
    "plain": Stack,
    "checkpointed": Checkpointed,
    "policy": Selective,
    "frozen base": FrozenBase,
    "dropout": functools.partial(Stack, dropout=0.3),
    "checkpointed dropout": functools.partial(Checkpointed, dropout=0.3),
    "tied": Tied,
    "many readers": ManyReaders,
    "writes a buffer": WritesABuffer,
}


@pytest.fixture(autouse=True)
def in_double_precision(monkeypatch):
    torch.set_default_dtype(torch.float64)
    # All that may move does where the plan is for it.
    monkeypatch.setattr(moves, "LEAST", 0.0)
    monkeypatch.setattr(plan_memory, "rates_of", lambda device: Rates(flops=1e9, memory=1e8, link=1e9))
    yield
    torch.set_default_dtype(torch.float32)


def two_steps(call, model, sizes=SIZES):
    """Outputs, gradients and buffers of two steps, from the same state of all."""
    torch.manual_seed(7)
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.fill_(0.5)
    found = []
    for size in sizes:
        model.zero_grad()
        x = torch.randn(*size, WIDTH, requires_grad=True)
        outputs = call(x)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        sum((out * torch.randn_like(out)).sum() for out in outputs).backward()
        found += [*(out.detach().clone() for out in outputs), x.grad, *gradients(model)]
    return [*found, *(buffer.clone() for buffer in model.buffers())]


def planned(model, budget, expected, sizes=SIZES, **how):
    """The report of plan_memory in a step that has the results ``expected``."""
    torch._dynamo.reset()
    run = compile_with_glue(model, memory_budget=budget, passes={"plan_memory": True}, **how)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "glue: the memory_budget of", GlueWarning)
        assert equal(two_steps(run.call, model, sizes), expected)
    return next(p for graph in run.session.graphs for p in graph.passes if p.name == "plan_memory")


def expected_of(model, kind, sizes=SIZES, **how):
    """The bits of the step without a plan, which are about those of eager."""
    eager = two_steps(model, model, sizes)
    if kind == "writes a buffer":  # torch's own partition computes again from the buffer that was written since
        return two_steps(torch.compile(model, backend="eager"), model, sizes)
    found = two_steps(compile_with_glue(model, passes={"plan_memory": False}, **how).call, model, sizes)
    for got, want in zip(found, eager, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
    return found


@pytest.mark.parametrize("kind", ["checkpointed dropout", "writes a buffer"])
def test_the_least_memory_has_the_bits_of_no_plan(kind):
    model = MODELS[kind](count=2)
    planned(model, 1, expected_of(model, kind))


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_at_every_budget_the_bits_are_those_without_a_plan(kind):
    model = MODELS[kind]()
    expected = expected_of(model, kind)
    largest = planned(model, 2**40, expected)
    found = [planned(model, max(1, int(share * largest.counts["peak"])), expected) for share in SHARES]
    assert len({report.counts["saved_bytes"] for report in found}) > 1


@pytest.mark.slow
def test_lengths_that_vary():
    model, sizes = Checkpointed(2), ((2, 12), (2, 9), (3, 14))
    expected = expected_of(model, "checkpointed", sizes, dynamic=True)
    for budget in (2**40, 1):
        planned(model, budget, expected, sizes, dynamic=True)
