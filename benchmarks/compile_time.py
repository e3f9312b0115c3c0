"""Where the time of a first training step goes, with cold and with warm caches.

    python -m benchmarks.compile_time [--rows qwen3,llama-lora] [--variants inductor,glue,glue-unshared] [--layers 8]
    python -m benchmarks.compile_time --curve 8,16,32,64 --svg curve.svg

Each row and variant runs twice, each time in a process of its own: first with empty caches of Inductor's and Triton's,
then with what the first has left there. ``glue-unshared`` is glue without the rewrite ``share_layers``,
``glue-regions`` compiles each kind of layer once. ``--curve`` measures one row with so many layers instead, caches
empty, and draws the seconds of the first steps.

Columns: ``first s``, seconds of the first step (forward, backward, all compiles in them), which is the sum of

- ``dynamo s``: Dynamo's tracing and guards;
- ``glue s``: glue's passes with all around them (checks, cache keys);
- ``aot s``: AOTAutograd: tracing, joint passes and partitioning, without the compiles that it starts;
- ``inductor s``: Inductor: lowering, code, kernels;
- ``load s``: what comes out of a cache instead;
- ``rest s``: inside of the compile, and under none of these names: the cache's key, decisions of the hand-off;
- ``run s``: outside of all compiles: the step itself, and what kernels do when they first run.

Then milliseconds of a later step, the median, and the most memory of those steps.

On a CPU sizes are tiny, to test the code and to see how times grow: ``--device cpu --layers 16``.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.compile_time_rows import ROWS, build
from benchmarks.curves_svg import Curve, Panel, draw
from benchmarks.fresh_process import run_module
from glue_compiler.backend import GlueBackend
from glue_compiler.handoff.hand_off import hand_off
from glue_compiler.pipeline import registry
from glue_compiler.pipeline.graph_pass import PairPass

VARIANTS: Mapping[str, dict[str, Any] | None] = {
    "inductor": None,
    "glue": {"regions": "whole"},
    "glue-unshared": {"regions": "whole", "passes": {"share_layers": False}},
    "glue-regions": {},
}
PARTS = ("dynamo s", "glue s", "aot s", "inductor s", "load s", "rest s", "run s")
COLUMNS = ("first s", *PARTS, "step ms", "peak GiB", "loss")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="qwen3")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--layers", type=int)
    parser.add_argument("--curve", help="numbers of layers, such as 8,16,32")
    parser.add_argument("--svg", help="the file that the curve is drawn into")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)  # one measurement, in this process
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given)))
    elif given.curve:
        draw_curve(given)
    else:
        print_table(given)


def print_table(given: argparse.Namespace) -> None:
    """Each row and variant, with cold and with warm caches."""
    _print_head("caches")
    for row in given.rows.split(","):
        for variant in given.variants.split(","):
            with tempfile.TemporaryDirectory() as folder:
                for caches in ("cold", "warm"):
                    _print_row(row, variant, caches, _run(given, row, variant, given.layers, folder))


def draw_curve(given: argparse.Namespace) -> None:
    """One row with more and more layers, cold caches: a table, and the seconds of first steps as a drawing."""
    counts = [int(text) for text in given.curve.split(",")]
    curves: dict[str, list[float]] = {variant: [] for variant in given.variants.split(",")}
    _print_head("layers")
    for layers in counts:
        for variant, seconds in curves.items():
            with tempfile.TemporaryDirectory() as folder:
                found = _run(given, given.rows, variant, layers, folder)
            _print_row(given.rows, variant, str(layers), found)
            seconds.append(math.nan if isinstance(found, str) else found["first s"])
    if given.svg:
        panel = Panel("seconds of a first step, cold caches", [Curve(*each) for each in curves.items()], least=0.0)
        title = f"{given.rows} on {given.device}, torch {torch.__version__}"
        Path(given.svg).write_text(draw(title, "layers", [panel], places=counts))


def _print_head(third: str) -> None:
    print(f"| row | variant | {third} |", " | ".join(COLUMNS), "|")
    print("|---" * (3 + len(COLUMNS)) + "|")


def _print_row(row: str, variant: str, third: str, found: dict[str, float] | str) -> None:
    cells = [found] if isinstance(found, str) else [f"{found[column]:.2f}" for column in COLUMNS]
    cells += [""] * (len(COLUMNS) - len(cells))
    print(f"| {row} | {variant} | {third} |", " | ".join(cells), "|", flush=True)


def _run(given: argparse.Namespace, row: str, variant: str, layers: int | None, folder: str) -> dict[str, float] | str:
    """What :func:`measure` finds in a process of its own, with the caches of ``folder``; or the error."""
    passed = {"rows": row, "variants": variant, "device": given.device, "steps": given.steps}
    passed |= {"layers": layers, "tokens": given.tokens, "one": True}
    done = run_module("benchmarks.compile_time", passed, folder, captures_errors=True)
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["failed"])[-1]
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def measure(given: argparse.Namespace) -> dict[str, float]:
    """One row, one variant, with the caches as they are."""
    row, options = ROWS[given.rows], VARIANTS[given.variants]
    workload, batch = build(given.rows, given.layers, given.tokens, given.device)
    handed_off = 0.0

    def timed_hand_off(*args: Any) -> Any:
        nonlocal handed_off
        start = time.perf_counter()
        call = hand_off(*args)
        handed_off += time.perf_counter() - start
        return call

    if options is None:
        model = torch.compile(workload.model, backend="inductor")
    else:
        model = torch.compile(workload.model, backend=GlueBackend(timed_hand_off), options={**row.options, **options})

    def step(between: Callable[[], None] = lambda: None) -> tuple[float, float]:
        start = time.perf_counter()
        with workload.around():
            loss = model(**batch).loss
        between()
        loss.backward()
        workload.model.zero_grad()
        found = float(loss.detach())  # waits for the device
        if given.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start, found

    forward: dict[str, float] = {}
    first, _ = step(lambda: forward.update(_counted()))
    parts = _parts(first, forward, _counted(), handed_off if options is not None else None)
    step()
    if given.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    later = [step() for _ in range(given.steps)]
    peak = torch.cuda.max_memory_allocated() / 2**30 if given.device == "cuda" else 0.0
    times = {"first s": first, "step ms": statistics.median(seconds for seconds, _ in later) * 1000}
    return {**times, **parts, "peak GiB": peak, "loss": later[-1][1]}


def _counted() -> dict[str, float]:
    """Seconds by name, as torch has counted them of itself (``torch._dynamo.utils.compile_times``)."""
    from torch._dynamo.utils import compilation_time_metrics

    return {name: sum(times) for name, times in compilation_time_metrics.items()}


def _parts(
    first: float, forward: Mapping[str, float], both: Mapping[str, float], glue: float | None
) -> dict[str, float]:
    """The columns that ``first`` is the sum of.

    Args:
        forward: what torch had counted when the forward was over.
        both: what it had counted at the end.
        glue: seconds of what glue hands off to; None for a compile without glue.
    """

    def inside(name: str) -> float:
        return forward.get(name, 0.0)

    def behind(name: str) -> float:
        return both.get(name, 0.0) - inside(name)

    compiled, called = inside("_compile.compile_inner"), inside("OutputGraph.call_user_compiler")
    inductor, load, aot = "compile_fx_inner", "AOTAutogradCache.inductor_load", "create_aot_dispatcher_function"
    handed_off = called if glue is None else glue
    pairs = sum(inside(f"pass.glue.{p.name}") for p in registry.all_passes() if isinstance(p, PairPass))
    return {
        "dynamo s": compiled - called,
        "glue s": called - handed_off + pairs,
        "aot s": inside(aot) - pairs - inside(inductor),
        "inductor s": inside(inductor) + behind(inductor),
        "load s": inside(load) + behind(load),
        "rest s": handed_off - inside(aot) - inside(load),
        "run s": first - compiled - behind(inductor) - behind(load),
    }


if __name__ == "__main__":
    main()
