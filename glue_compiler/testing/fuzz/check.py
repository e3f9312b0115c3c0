"""Runs programs eagerly and with glue, and says what is wrong."""

from __future__ import annotations

import contextlib
import gc
import itertools
import linecache
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any
from unittest import mock

import torch

from glue_compiler import backend
from glue_compiler.compat.symbols import size_when_traced
from glue_compiler.ops import embedding
from glue_compiler.ops.device_rates import Rates
from glue_compiler.passes import plan_memory, tile_rows
from glue_compiler.passes.group_experts import permuted_rows
from glue_compiler.passes.specialize_attention import rewrite
from glue_compiler.replan import replanner
from glue_compiler.replan.device_steps import Held
from glue_compiler.replan.replanner import Replanner
from glue_compiler.testing.captures import Capture, compile_and_keep
from glue_compiler.testing.fuzz import harness
from glue_compiler.testing.fuzz.process_state import ProcessState
from glue_compiler.testing.fuzz.programs import Program

FILE = "fuzzed_program.py"


class NotAProgram(Exception):
    """It fails eagerly too."""


@dataclass
class Verdict:
    """What one program showed.

    Attributes:
        wrong: differences from eager, in words; empty if there are none.
        fired: pass → single rewrites, of those that rewrote something.
        skipped: passes that looked at something and left it alone.
    """

    wrong: list[str]
    fired: dict[str, int] = field(default_factory=dict)
    skipped: set[str] = field(default_factory=set)


def module_of(program: Program) -> dict[str, Any]:
    """The program as a module of its own."""
    source = program.source()
    # Dynamo reads source lines for its messages.
    linecache.cache[FILE] = (len(source), None, source.splitlines(keepends=True), FILE)
    module: dict[str, Any] = {"__name__": "fuzzed_program"}
    exec(compile(source, FILE, "exec"), module)
    return module


def eager_results(program: Program) -> dict[str, Any]:
    """
    Raises:
        NotAProgram: if a call raises, or a checkpoint's body computes something else when backward calls it again.
    """
    try:
        seen = harness.observe(module_of(program))
    except Exception as error:
        raise NotAProgram(str(error)) from error
    errors = [value for label, value in seen.items() if label.endswith(": error")]
    if errors and not program.raises:
        raise NotAProgram(errors[0])
    if "checkpoint(" in program.source() and not _is_reproducible(program, seen):
        raise NotAProgram("a checkpoint's body computes something else when backward calls it again")
    return seen


def _is_reproducible(program: Program, seen: Mapping[str, Any]) -> bool:
    """Are the gradients those of the program without checkpoints? Which they are is not specified else."""

    def called_once(function: Callable[..., Any], *args: Any, **_: Any) -> Any:
        return function(*args)

    module = module_of(program)
    module["checkpoint"] = called_once
    once = harness.observe(module)
    pairs = [(value, once.get(label)) for label, value in seen.items() if "gradient of" in label]
    return not any(
        isinstance(a, torch.Tensor)
        and isinstance(b, torch.Tensor)
        and harness.tensors_differ(a, b, harness.TOLERANCE[program.precision])
        for a, b in pairs
    )


def runs_eagerly(program: Program) -> bool:
    """Is there anything to compare with?"""
    try:
        eager_results(program)
    except NotAProgram:
        return False
    return True


def verdict(program: Program, expected: Mapping[str, Any] | None = None, off: tuple[str, ...] = ()) -> Verdict:
    """Compile ``program`` with glue, without the passes ``off``, and compare it with eager."""
    expected = eager_results(program) if expected is None else expected
    kept: list[Capture] = []

    def wrap(function: Callable[..., Any]) -> Any:
        options: dict[str, Any] = {"strict": False, **dict(program.options)}
        options["passes"] = {**options.get("passes", {}), **dict.fromkeys(off, False)}
        kept.append(compile_and_keep(function, fullgraph=False, dynamic=program.dynamic, **options))
        return kept[-1].call

    module = module_of(program)
    state = ProcessState.now()
    with clean_dynamo(), small_steps_count():
        actual = harness.observe(module, wrap)
        found = Verdict(harness.differences(module, dict(expected), actual) + state.differences())
        graphs = [graph for run in kept for graph in run.session.graphs]
        found.fired |= {"replan": count} if (count := sum(graph.replan is not None for graph in graphs)) else {}
        for report in (p for graph in graphs for p in graph.passes):
            if report.changed:
                found.fired[report.name] = found.fired.get(report.name, 0) + max(1, len(report.rewrites))
            elif report.skips:
                found.skipped.add(report.name)
    return found


def is_torchs_own(program: Program, expected: Mapping[str, Any]) -> bool:
    """Is plain ``aot_eager`` as wrong?"""
    with clean_dynamo():
        module = module_of(program)
        actual = harness.observe(module, lambda f: torch.compile(f, backend="aot_eager", dynamic=program.dynamic))
        found = harness.differences(module, dict(expected), actual)
    return bool(found)


@contextlib.contextmanager
def clean_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    try:
        yield
    finally:
        torch._dynamo.reset()
        linecache.cache.pop(FILE, None)


@contextlib.contextmanager
def small_steps_count() -> Iterator[None]:
    """Small tensors move too, for compute counts as so slow that it hides any copy, few rows go into tiles, and steps
    take more memory each time, so that plans are made again; the gradients of all tables are worth a kernel, and masks
    of an odd number of queries are copied to whole blocks."""
    slow = Rates(flops=1e3, memory=1e3, link=1e4)
    marks = itertools.count()

    def held(_: torch.device) -> Held:
        return Held(0, int(1.7 ** next(marks)), 0)

    def is_odd(queries: int | torch.SymInt, keys: int | torch.SymInt, device: torch.device) -> bool:
        return (size_when_traced(queries) or 0) % 2 == 1

    def follow(codes: Iterable[CodeType]) -> Replanner:
        return Replanner(codes, held, kinds=("cpu", "cuda"))

    with (
        mock.patch.object(plan_memory, "rates_of", return_value=slow),
        mock.patch.multiple(tile_rows, LEAST_ROWS=1, GRAIN=1),
        mock.patch.object(embedding, "pays", return_value=True),
        mock.patch.object(permuted_rows, "pays", return_value=True),
        mock.patch.object(rewrite, "whole_blocks_pay", is_odd),
        mock.patch.object(backend, "Replanner", follow),
        mock.patch.object(replanner, "FIRST", 1),
    ):
        yield


def quiet_and_frozen() -> None:
    """Set up a process: calls that fail on fake tensors are no news, and collections skip what is imported."""
    for name in ("_subclasses.fake_tensor", "fx.experimental.sym_node", "fx.experimental.symbolic_shapes"):
        logging.getLogger(f"torch.{name}").setLevel(logging.CRITICAL)
    if torch.cuda.is_available():
        # Dynamo does in its first compile, for any backend; a checkpoint whose forward is that one refuses to run.
        torch.cuda.init()
        # Else a write to one place twice leaves one of the two there, another each time.
        torch.use_deterministic_algorithms(True, warn_only=True)
    gc.collect()
    gc.freeze()
