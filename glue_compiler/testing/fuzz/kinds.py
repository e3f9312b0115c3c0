"""The kinds of programs, and what is drawn around each: precision, twists, how often and how it is called."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from glue_compiler.testing.fuzz.attention import draw_attention
from glue_compiler.testing.fuzz.draw import Draw, Drawn
from glue_compiler.testing.fuzz.experts import draw_experts
from glue_compiler.testing.fuzz.metadata import draw_metadata
from glue_compiler.testing.fuzz.programs import Call, Program, Statement
from glue_compiler.testing.fuzz.twists import twist

KINDS: dict[str, Callable[[Draw], Drawn]] = {
    "attention": draw_attention,
    "experts": draw_experts,
    "metadata": draw_metadata,
}


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
    drawn = KINDS[kind](draw)
    context = "contextlib.nullcontext()"
    float_type = "torch.float64"
    if draw.chance(0.06) and not plain:
        float_type, draw.precision = "torch.float32", "bfloat16"
        context = f"torch.autocast({device!r}, dtype=torch.bfloat16)"
    elif draw.chance(0.05) and not plain:
        float_type, draw.precision = "torch.float32", "float32"
    calls = [Call("fresh", 1, context), Call("fresh", 2, context)]
    if draw.chance(0.6):
        calls.append(Call("refill", 3, context))
    if draw.chance(0.08):
        calls.append(Call("again", 0, "torch.no_grad()"))
    prelude = (Statement(f"FLOAT = {float_type}"), *draw.prelude.values())
    return Program(
        kind=kind,
        prelude=prelude,
        make=drawn.make,
        inputs=drawn.inputs,
        compiled=drawn.compiled,
        zero_for_none=drawn.zero_for_none,
        body=draw.statements(),
        outputs=tuple(draw.outputs),
        calls=tuple(calls),
        precision=draw.precision,
        dynamic=False if plain else draw.mostly(None, True, False, share=0.9),
    )
