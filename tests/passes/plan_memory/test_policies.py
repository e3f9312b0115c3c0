"""What a selective checkpoint says of single operators is kept to by a plan, whatever they return."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from glue_compiler.errors import GlueWarning
from tests.captured import compile_with_glue
from tests.slow import one_in

WIDTH = 8
aten = torch.ops.aten


def in_pieces(cut):
    def layer(x, up, down):
        one, other = cut(x @ up)
        return x + torch.sigmoid(one) * other

    return layer


def transposed(x, up, down):
    return x + (torch.tanh(x @ up).t() * 2).t() @ down


def highest(x, up, down):
    wide = x @ up
    values, places = torch.sin(wide).topk(WIDTH, -1)
    return x + values * wide.gather(-1, places)


def normed(x, up, down):
    return x + F.layer_norm(torch.tanh(x @ up), (2 * WIDTH,)) @ down


def scaled(x, up, down):
    variance, mean = torch.var_mean(torch.sin(x @ up), -1, keepdim=True)
    return x + ((x @ up - mean) * torch.rsqrt(variance + 1)) @ down


LAYERS = {
    "split": in_pieces(lambda wide: wide.split([WIDTH, WIDTH], -1)),
    "chunk": in_pieces(lambda wide: torch.tanh(wide).chunk(2, -1)),
    "unbind": in_pieces(lambda wide: wide.view(-1, 2, WIDTH).unbind(1)),
    "transpose": transposed,
    "topk": highest,
    "layer norm": normed,
    "var_mean": scaled,
}


def policy(products, others, context, operator, *args, **kwargs):
    is_product = operator is aten.mm.default
    return CheckpointPolicy[products if is_product else others]


def of_layers(layer, products, others):
    contexts = functools.partial(create_selective_checkpoint_contexts, functools.partial(policy, products, others))

    def step(x, up, down):
        for _ in range(3):
            x = checkpoint(layer, x, up, down, use_reentrant=False, context_fn=contexts)
        return x

    return step


def inputs():
    generator = torch.Generator().manual_seed(0)
    shapes = ((6, WIDTH), (WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH))
    return [torch.randn(shape, dtype=torch.float64, generator=generator).div(2).requires_grad_() for shape in shapes]


def results(call):
    given = inputs()
    out = call(*given)
    return [out, *torch.autograd.grad(out.sin().sum(), given, allow_unused=True)]


@pytest.mark.parametrize(
    ("products", "others", "budget"),
    [("PREFER_RECOMPUTE", "MUST_SAVE", 2**40), ("MUST_RECOMPUTE", "MUST_SAVE", 1), ("MUST_SAVE", "MUST_RECOMPUTE", 1)],
)
@pytest.mark.parametrize("layer", one_in(3, LAYERS))
def test_outputs_and_gradients_are_those_of_eager(layer, products, others, budget):
    step = of_layers(LAYERS[layer], products, others)
    run = compile_with_glue(step, memory_budget=budget)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "glue: the memory_budget of", GlueWarning)
        found = results(run.call)
    torch.testing.assert_close(found, results(step), rtol=1e-9, atol=1e-11)
    plans = [report.changed for report in run.report.passes if report.name == "plan_memory"]
    assert plans
    assert budget == 1 or all(plans)


@pytest.mark.parametrize("products", ["PREFER_RECOMPUTE", "MUST_RECOMPUTE"])
@pytest.mark.parametrize("others", ["MUST_SAVE", "PREFER_RECOMPUTE", "MUST_RECOMPUTE"])
def test_a_view_that_must_be_saved_keeps_its_memory_and_any_other_does_not(products, others, steps_read):
    run = compile_with_glue(of_layers(LAYERS["split"], products, others), memory_budget=2**40)
    results(run.call)
    step, nodes = steps_read[0]
    kept = others == "MUST_SAVE"
    made = [p for p, node in enumerate(nodes) if node.target is aten.mm.default and not step.values[p].is_backward]
    assert len(made) == 3
    for place in made:
        value = step.values[place]
        assert (value.may_recompute, value.must_recompute) == (not kept, not kept and products == "MUST_RECOMPUTE")
    views = [p for p in step.needed if step.values[p].root in made]
    assert len(views) == 3
    assert all(step.values[p].may_recompute for p in views)
