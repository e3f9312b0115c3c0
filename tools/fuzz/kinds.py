"""The kinds of programs, and what is drawn around each: precision, twists, how often and how it is called."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from random import Random

from tools.fuzz.attention import draw_attention
from tools.fuzz.callers import BETWEEN, BETWEEN_FOR_INPUTS, draw_refill, draw_step
from tools.fuzz.draw import Draw, Drawn
from tools.fuzz.experts import draw_experts
from tools.fuzz.layers import draw_layers, draw_regions
from tools.fuzz.loops import draw_loops
from tools.fuzz.losses import draw_losses
from tools.fuzz.metadata import draw_metadata
from tools.fuzz.padding import draw_padding
from tools.fuzz.programs import Call, Program, Statement, Step
from tools.fuzz.settings import draw_settings
from tools.fuzz.steps import draw_steps
from tools.fuzz.twists import twist

KINDS: dict[str, Callable[[Draw], Drawn]] = {
    "attention": draw_attention,
    "experts": draw_experts,
    "layers": draw_layers,
    "loops": draw_loops,
    "losses": draw_losses,
    "metadata": draw_metadata,
    "padding": draw_padding,
    "regions": draw_regions,
    "steps": draw_steps,
}


def draw_program(
    random: Random,
    kind: str,
    device: str = "cpu",
    *,
    twists: float | None = None,
    plain: bool = False,
    compiler: str = "aot_eager",
    twice: bool = False,
) -> Program:
    """A program of ``kind``; it may be wrong as Python or as torch (see :func:`campaign.repaired`).

    Args:
        twists: how likely one follows a statement; by default, that is drawn too.
        plain: in fp64, of fixed sizes, called once.
        compiler: as glue's option; of Inductor, whose compiles take long, programs get one kind of calls.
        twice: see :class:`programs.Program`.
    """
    draw = Draw(random, device, twists=random.choice((0.0, 0.03, 0.08, 0.15)) if twists is None else twists)
    draw.oddness = random.choice((0.05, 0.15, 0.35))
    draw.twist = twist
    draw.one_graph = plain
    draw.small = compiler != "aot_eager"
    draw.grows = not plain and not draw.small and draw.chance(0.1)
    drawn = KINDS[kind](draw)
    context = "contextlib.nullcontext()"
    float_type = "torch.float64"
    if draw.chance(0.06) and not plain:
        float_type, draw.precision = "torch.float32", "bfloat16"
        context = f"torch.autocast({device!r}, dtype=torch.bfloat16)"
    elif draw.chance(0.05) and not plain:
        float_type, draw.precision = "torch.float32", "float32"
    calls = [Call("fresh", 1, context), Call("fresh", 2, context)]
    step = Step() if plain else draw_step(draw)
    if step.update != "pass" and draw.chance(0.5):
        calls.append(Call("again", 0, context))  # with the weights that were updated
    if draw.grows:
        calls += [Call("fresh", 3, context)] * draw.pick(0, 1)
    elif step.late or draw.chance(0.6):
        calls.append(Call("refill", 3, context))
    if draw.chance(0.08) and not draw.small:
        calls.append(Call("again", 0, draw.pick("torch.no_grad()", "torch.no_grad()", "torch.inference_mode()")))
    body, outputs, compiled = draw.statements(), tuple(draw.outputs), drawn.compiled
    if draw.chance(0.1):
        body, outputs = _checkpointed(draw, drawn.inputs, body, outputs), ("*results",)
        if compiled == ("f",) and draw.chance(0.4) and not plain:
            compiled = ("region",)  # as layers are that are compiled one by one
    options = drawn.options
    # Regions have no offload: all layers are one graph with it.
    in_regions = kind == "regions" or dict(options).keys() & {"regions", "memory_budget"}
    if kind == "steps" or (draw.chance(0.1) and not draw.small and not in_regions):
        options = (*options, ("offload", "checkpoints"))
    # A layer that keeps may keep an output that eager does not (docs/memory_budget.md).
    is_planned = "memory_budget" in dict(options)
    if is_planned and draw.chance(0.4):  # whose kernels write over what is saved
        compiler = "inductor"
    draw_settings(draw, compiler)
    prelude = (Statement(f"FLOAT = {float_type}"), *draw.prelude.values())
    between = "pass" if plain or is_planned else draw.mostly("pass", *BETWEEN, share=0.9)
    # Nor may a caller write the mask of a padded batch: one that hides all is an error.
    may_write = between == "pass" and not plain and not is_planned and "padding" not in dict(options)
    written = draw.integer(0, len(drawn.inputs) - 1) if may_write and draw.chance(0.08) else None
    if written is not None:
        between = draw.pick(*BETWEEN_FOR_INPUTS)
    refill = draw_refill(draw)
    dynamic = False if plain or draw.small else draw.mostly(None, True, False, share=0.9)
    made, nan_may_vanish = drawn.make, draw.nan_may_vanish
    if draw.spoils and draw.chance(0.12):
        line, vanishing = draw.pick(*draw.spoils)
        made, nan_may_vanish = (*made, line), (*nan_may_vanish, *vanishing)
    if nan_may_vanish:
        step = dataclasses.replace(step, update="pass")  # what differs would be in all that follows
    if compiler == "inductor":
        options = (*options, ("compiler", compiler))
    return Program(
        kind=kind,
        prelude=prelude,
        make=made,
        inputs=drawn.inputs,
        compiled=compiled,
        zero_for_none=drawn.zero_for_none,
        body=body,
        outputs=outputs,
        calls=tuple(calls),
        refill=refill,
        between=between,
        written=written,
        options=options,
        precision=draw.precision,
        dynamic=dynamic,
        step=step,
        settings=tuple(draw.settings),
        nan_may_vanish=nan_may_vanish,
        twice=twice,
    )


def _checkpointed(
    draw: Draw, inputs: tuple[str, ...], body: tuple[Statement, ...], outputs: tuple[str, ...]
) -> tuple[Statement, ...]:
    """The whole program as the body of a checkpoint."""
    end = Statement(f"return ({''.join(name + ', ' for name in outputs)})")
    draw.prelude["region"] = Statement(f"def region({', '.join(inputs)}):", (*body, end))
    return (Statement(f"results = checkpoint(region, {', '.join(inputs)}, use_reentrant=False)"),)
