"""Mixed precision as users have it: the rewrites fire, and the error against fp64 is that of eager."""

import contextlib
import copy
import warnings

import pytest
import torch

from glue_compiler.errors import GlueWarning
from tests.captured import compile_with_glue
from tests.models.training import packed, padded, tiny, with_lora
from tests.slow import one_in, slow_but

PACKED = packed((7, 9, 5, 1, 12))
PADDED = padded((7, 11, 3))


class Autocast(torch.nn.Module):
    """As accelerate's wrapper: autocast inside of what is compiled, and outputs that are brought back to fp32."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = self.model(**batch)
        out["logits"] = out["logits"].float()
        return out


def around(dtype):
    return lambda: torch.autocast("cpu", dtype=dtype)


@contextlib.contextmanager
def tf32():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def gradients(model, call, batch, context, scaler=None):
    """Gradients of one step, in fp64, unscaled."""
    for parameter in model.parameters():
        parameter.grad = None
    with context():
        loss = call(**batch).loss
    (loss if scaler is None else scaler.scale(loss)).backward()
    scale = 1.0 if scaler is None else scaler.get_scale()
    found = {name: p.grad.double() / scale for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach().double(), **found}


def error(found, exact):
    """Of all gradients together, relative; every one of them is there."""
    assert found.keys() == exact.keys()
    assert all(torch.isfinite(each).all() for each in found.values())
    difference = torch.cat([(found[name] - exact[name]).flatten() for name in exact])
    return difference.norm() / torch.cat([each.flatten() for each in exact.values()]).norm()


CASES = {
    "weights in bf16": (torch.bfloat16, False, contextlib.nullcontext, None, False),
    "autocast around": (torch.float32, False, around(torch.bfloat16), None, False),
    "autocast inside": (torch.float32, True, contextlib.nullcontext, None, False),
    "fp16 with a GradScaler": (torch.float32, False, around(torch.float16), 2.0**10, False),
    "fp32 with tf32": (torch.float32, False, tf32, None, False),
    "LoRA in fp32 on bf16": (torch.bfloat16, False, contextlib.nullcontext, None, True),
    "LoRA in fp32 on bf16, autocast around": (torch.bfloat16, False, around(torch.bfloat16), None, True),
}
FAST = {"autocast inside"}


@pytest.mark.parametrize("batch", one_in(2, [PACKED, PADDED]), ids=["packed", "padded"])
@pytest.mark.parametrize("case", slow_but(FAST, CASES))
def test_rewrites_fire_and_the_error_is_that_of_eager(case, batch):
    dtype, is_inside, context, scale, has_adapters = CASES[case]
    model = tiny("qwen3", dtype)
    model = with_lora(model) if has_adapters else model
    exact = copy.deepcopy(model).double()
    scaler = torch.amp.GradScaler("cpu", init_scale=scale) if scale else None
    outer = Autocast(model) if is_inside else model
    with warnings.catch_warnings():
        warnings.simplefilter("error", GlueWarning)
        run = compile_with_glue(outer, fullgraph=False, passes={"specialize_attention": True})
        actual = gradients(model, run.call, batch, context, scaler)
    assert run.report.passes[0].name == "specialize_attention"
    assert run.report.passes[0].counts["packed"] == 2
    assert {p.name: p.counts.get("merged", 0) >= 2 for p in run.report.passes}["hoist_metadata"]
    expected = gradients(model, outer, batch, context, scaler)
    reference = gradients(exact, exact, batch, contextlib.nullcontext)
    assert error(actual, reference) <= 1.2 * error(expected, reference)
    assert error(expected, reference) > 0
