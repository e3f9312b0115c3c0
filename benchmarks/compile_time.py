"""Where the time of a first training step goes, with cold and with warm caches.

    python -m benchmarks.compile_time [--rows qwen3,llama-lora] [--variants inductor,glue,glue+share] [--layers 8]

Each row and variant runs twice, each time in a process of its own: first with empty caches of Inductor's and Triton's,
then with what the first has left there. ``glue+share`` is glue with the rewrite ``share_layers``.

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
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.compile_time_rows import ROWS
from benchmarks.end_to_end_rows import Size
from glue_compiler import registry
from glue_compiler.backend import GlueBackend
from glue_compiler.graph_pass import PairPass
from glue_compiler.handoff import hand_off

VARIANTS: Mapping[str, dict[str, Any] | None] = {
    "inductor": None,
    "glue": {"passes": {"share_layers": False}},
    "glue+share": {"passes": {"share_layers": True}},
}
PARTS = ("dynamo s", "glue s", "aot s", "inductor s", "load s", "rest s", "run s")
COLUMNS = ("first s", *PARTS, "step ms", "peak GiB", "loss")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="qwen3")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)  # one measurement, in this process
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given)))
        return
    print("| row | variant | caches |", " | ".join(COLUMNS), "|")
    print("|---" * (3 + len(COLUMNS)) + "|")
    for row in given.rows.split(","):
        for variant in given.variants.split(","):
            with tempfile.TemporaryDirectory() as folder:
                for caches in ("cold", "warm"):
                    print(f"| {row} | {variant} | {caches} |", " | ".join(_cells(given, row, variant, folder)), "|")
                    sys.stdout.flush()


def _cells(given: argparse.Namespace, row: str, variant: str, folder: str) -> list[str]:
    passed = {"rows": row, "variants": variant, "device": given.device, "steps": given.steps}
    passed |= {name: value for name in ("layers", "tokens") if (value := getattr(given, name)) is not None}
    arguments = [text for name, value in passed.items() for text in (f"--{name}", str(value))]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": os.path.join(folder, "triton")}
    command = [sys.executable, "-m", "benchmarks.compile_time", "--one", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return [(done.stderr.strip().splitlines() or ["failed"])[-1], *[""] * (len(COLUMNS) - 1)]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return [f"{found[column]:.2f}" for column in COLUMNS]


def measure(given: argparse.Namespace) -> dict[str, float]:
    """One row, one variant, with the caches as they are."""
    row, options = ROWS[given.rows], VARIANTS[given.variants]
    is_tiny = given.device == "cpu"
    tokens = given.tokens or (128 if is_tiny else 8192)
    torch.manual_seed(0)
    workload = row.build(Size(tokens, tokens, given.layers, is_tiny), given.device, "sdpa")
    batch = workload.batch(tokens, torch.Generator().manual_seed(0))
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
