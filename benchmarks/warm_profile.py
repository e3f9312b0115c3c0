"""What a second process does until its first step is over, with the caches that a first one has left.

    python -m benchmarks.warm_profile [--row qwen3] [--variants glue,inductor] [--layers 8]

Three processes each: one fills the caches, one is measured, one runs under Python's profiler. Of the second: seconds of
the first step by the clock and of the process's CPU time. Of the third, whose seconds are up to twice as many: what is
spent in each of the parts below, those that it contains included, and the functions that take longest (``--top``).
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from benchmarks.fresh_process import run_module

PARTS: Mapping[str, tuple[str, str]] = {
    "imports": ("importlib._bootstrap>", "_find_and_load"),
    "Dynamo": ("convert_frame.py", "_compile"),
    "glue, before a frame": ("glue_compiler/backend.py", "begin_frame"),
    "glue, passes": ("glue_compiler/pipeline/run.py", "run"),
    "glue, key": ("glue_compiler/pipeline/run.py", "uuid"),
    "hash of torch": ("_inductor/codecache.py", "torch_key"),
    "hash of Triton": ("triton/runtime/cache.py", "triton_key"),
    "key of the graph": ("autograd_cache.py", "autograd_cache_key"),
    "load of code": ("_inductor/codecache.py", "load_by_key_path"),
    "load of kernels": ("_inductor/runtime/triton_heuristics.py", "precompile"),
    "load of kernels, Triton's own": ("triton/compiler/compiler.py", "_init_handles"),
    "first calls of Triton's kernels": ("triton/runtime/jit.py", "_do_compile"),
    "autotuning": ("_inductor/runtime/triton_heuristics.py", "autotune_to_one_config"),
    "calls of compiled code": ("_inductor/output_code.py", "__call__"),
    "backward": ("torch/_tensor.py", "backward"),
}
"""Part → the end of a file's name, and a function in it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", default="qwen3")
    parser.add_argument("--variants", default="glue,inductor")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--top", type=int, default=25)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # one step in this process, its profile to this file
    given = parser.parse_args()
    if given.one is not None:
        print(json.dumps(_first_step(given)))
        return
    for variant in given.variants.split(","):
        with tempfile.TemporaryDirectory() as folder:
            profile = os.path.join(folder, "profile")
            _process(given, variant, folder, "")
            measured = _process(given, variant, folder, "")
            _process(given, variant, folder, profile)
            print(f"\n{given.row}, {variant}: {measured['wall']:.1f} s, CPU {measured['cpu']:.1f} s; profiled:")
            for name, seconds in sorted(parts_of(pstats.Stats(profile)), key=lambda part: -part[1]):
                print(f"{seconds:8.2f}  {name}")
            pstats.Stats(profile).sort_stats("tottime").print_stats(given.top)


def _process(given: Namespace, variant: str, folder: str, profile: str) -> dict[str, float]:
    passed = {"row": given.row, "variants": variant, "device": given.device, "one": profile}
    passed |= {"layers": given.layers, "tokens": given.tokens}
    done = run_module("benchmarks.warm_profile", passed, folder, captures_errors=False)
    done.check_returncode()
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def _first_step(given: Namespace) -> dict[str, float]:
    from benchmarks.compile_time import VARIANTS
    from benchmarks.compile_time_rows import ROWS, build

    row, options = ROWS[given.row], VARIANTS[given.variants]
    workload, batch = build(given.row, given.layers, given.tokens, given.device)
    profiler = cProfile.Profile()
    start, cpu = time.perf_counter(), time.process_time()
    if given.one:
        profiler.enable()
    backend: dict[str, Any] = {"backend": "inductor"}
    if options is not None:
        backend = {"backend": "glue", "options": {**row.options, **options}}
    model = torch.compile(workload.model, **backend)
    with workload.around():
        loss = model(**batch).loss
    loss.backward()
    loss.item()  # waits for the device
    if given.one:
        profiler.disable()
        profiler.dump_stats(given.one)
    return {"wall": time.perf_counter() - start, "cpu": time.process_time() - cpu}


def parts_of(stats: Any) -> Iterator[tuple[str, float]]:
    """(part, seconds in it and in all that it calls)."""
    for name, (file, function) in PARTS.items():
        found = [times[3] for key, times in stats.stats.items() if key[0].endswith(file) and key[2] == function]
        if found:
            yield name, sum(found)


if __name__ == "__main__":
    main()
