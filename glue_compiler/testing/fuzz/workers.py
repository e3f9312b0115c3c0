"""Runs a level in one process, or in several, each with a seed of its own."""

from __future__ import annotations

import dataclasses
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

from glue_compiler.testing.fuzz.campaign import run_programs
from glue_compiler.testing.fuzz.graph_campaign import run_graphs
from glue_compiler.testing.fuzz.tally import Reporter, Settings, Tally

LEVELS = {"graphs": run_graphs, "programs": run_programs}
_SEEDS_APART = 1_000_003


def run(level: str, settings: Settings) -> Tally:
    return LEVELS[level](settings, Reporter(lambda text: print(text, flush=True), settings.keep))


def run_in(workers: int, level: str, settings: Settings) -> Tally:
    """``settings.count`` is shared among the workers."""
    if workers == 1:
        return run(level, settings)
    each = [dataclasses.replace(settings, seed=settings.seed + _SEEDS_APART * n) for n in range(workers)]
    if settings.count is not None:
        each = [dataclasses.replace(own, count=-(-settings.count // workers)) for own in each]
    total = Tally(level)
    # A new process imports this module by its name; it would not find what is in __main__.
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for tally in pool.map(run, [level] * workers, each):
            total.add(tally)
    return total
