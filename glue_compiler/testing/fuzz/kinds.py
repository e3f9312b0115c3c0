"""The kinds of programs, and what is drawn around each: precision, twists, how often and how it is called."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from glue_compiler.testing.fuzz.attention import draw_attention
from glue_compiler.testing.fuzz.draw import Draw, Drawn
from glue_compiler.testing.fuzz.experts import draw_experts
from glue_compiler.testing.fuzz.layers import draw_layers
from glue_compiler.testing.fuzz.losses import draw_losses
from glue_compiler.testing.fuzz.metadata import draw_metadata
from glue_compiler.testing.fuzz.programs import Call, Program, Statement
from glue_compiler.testing.fuzz.steps import draw_steps
from glue_compiler.testing.fuzz.twists import twist

KINDS: dict[str, Callable[[Draw], Drawn]] = {
    "attention": draw_attention,
    "experts": draw_experts,
    "layers": draw_layers,
    "losses": draw_losses,
    "metadata": draw_metadata,
    "steps": draw_steps,
}


REFILLS = (
    "old.detach().copy_(new)",
    "old.data.copy_(new)",
    "old.detach().view(-1)[:] = new.reshape(-1)",
    "old.untyped_storage().copy_(new.clone().untyped_storage())",
    "old.data = new.detach().clone()",
    "old.detach().set_(new.detach().clone())",
    "old.detach().zero_().add_(new)",
)
"""How the inputs of a call are written for the next."""
BETWEEN = ("out += 1", "out.detach().add_(1)", "out.mul_(2)", "out.view_as(out).neg_()")
"""How a caller writes an output before backward, in sight of autograd: sdpa reads what ``.data`` has written."""

BETWEEN_FOR_INPUTS = ("out.detach().zero_()", "out.detach().copy_(out.flip(0))")
"""Likewise for one input, of any dtype; eager raises if it has saved that."""


def draw_program(
    random: Random, kind: str, device: str = "cpu", *, twists: float | None = None, plain: bool = False
) -> Program:
    """A program of ``kind``; it may be wrong as Python or as torch (see :func:`campaign.repaired`).

    Args:
        twists: how likely one follows a statement; by default, that is drawn too.
        plain: in fp64, of fixed sizes, called once.
    """
    draw = Draw(random, device, twists=random.choice((0.0, 0.03, 0.08, 0.15)) if twists is None else twists)
    draw.oddness = random.choice((0.05, 0.15, 0.35))
    draw.twist = twist
    draw.one_graph = plain
    draw.grows = not plain and draw.chance(0.1)
    drawn = KINDS[kind](draw)
    context = "contextlib.nullcontext()"
    float_type = "torch.float64"
    if draw.chance(0.06) and not plain:
        float_type, draw.precision = "torch.float32", "bfloat16"
        context = f"torch.autocast({device!r}, dtype=torch.bfloat16)"
    elif draw.chance(0.05) and not plain:
        float_type, draw.precision = "torch.float32", "float32"
    calls = [Call("fresh", 1, context), Call("fresh", 2, context)]
    if draw.grows:
        calls += [Call("fresh", 3, context)] * draw.pick(0, 1)
    elif draw.chance(0.6):
        calls.append(Call("refill", 3, context))
    if draw.chance(0.08):
        calls.append(Call("again", 0, draw.pick("torch.no_grad()", "torch.no_grad()", "torch.inference_mode()")))
    body, outputs, compiled = draw.statements(), tuple(draw.outputs), drawn.compiled
    if draw.chance(0.1):
        body, outputs = _checkpointed(draw, drawn.inputs, body, outputs), ("*results",)
        if compiled == ("f",) and draw.chance(0.4) and not plain:
            compiled = ("region",)  # as layers are that are compiled one by one
    passes: dict[str, bool] = {}
    options: tuple[tuple[str, object], ...] = ()
    if kind == "steps" or draw.chance(0.1):
        budget = int(10 ** draw.random.uniform(1.5, 5))
        passes["plan_memory"] = True
        options = (("memory_budget", budget),)
        calls.append(Call("fresh", 4, context))  # a plan may be made again behind the first ones
    prelude = (Statement(f"FLOAT = {float_type}"), *draw.prelude.values())
    # A plan may keep an output for backward that eager does not (docs/plan_memory.md).
    between = "pass" if plain or options else draw.mostly("pass", *BETWEEN, share=0.9)
    may_write = between == "pass" and not plain and not draw.fixed_inputs
    written = draw.integer(0, len(drawn.inputs) - 1) if may_write and draw.chance(0.08) else None
    if written is not None:
        between = draw.pick(*BETWEEN_FOR_INPUTS)
    refill, dynamic = draw.mostly(*REFILLS), False if plain else draw.mostly(None, True, False, share=0.9)
    if draw.chance(0.3):
        passes["tile_rows"] = True
    return Program(
        kind=kind,
        prelude=prelude,
        make=drawn.make,
        inputs=drawn.inputs,
        compiled=compiled,
        zero_for_none=drawn.zero_for_none,
        body=body,
        outputs=outputs,
        calls=tuple(calls),
        refill=refill,
        between=between,
        written=written,
        options=(*options, ("passes", passes)) if passes else options,
        precision=draw.precision,
        dynamic=dynamic,
    )


def _checkpointed(
    draw: Draw, inputs: tuple[str, ...], body: tuple[Statement, ...], outputs: tuple[str, ...]
) -> tuple[Statement, ...]:
    """The whole program as the body of a checkpoint."""
    end = Statement(f"return ({''.join(name + ', ' for name in outputs)})")
    draw.prelude["region"] = Statement(f"def region({', '.join(inputs)}):", (*body, end))
    return (Statement(f"results = checkpoint(region, {', '.join(inputs)}, use_reentrant=False)"),)
