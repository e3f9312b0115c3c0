"""Runs programs eagerly and with glue, and says what is wrong."""

from __future__ import annotations

import contextlib
import gc
import linecache
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from tools.compiled import Run, compile_and_keep
from tools.fuzz import harness
from tools.fuzz.process_state import ProcessState
from tools.fuzz.programs import Program
from tools.fuzz.small_steps import small_steps_count

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
        warm: graphs that a second compile took from the caches on disk.
        unread: values that a caller came too late for, as is documented.
    """

    wrong: list[str]
    fired: dict[str, int] = field(default_factory=dict)
    skipped: set[str] = field(default_factory=set)
    warm: int = 0
    unread: int = 0


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
    errors = [value for label, value in seen.items() if harness.is_error(label)]
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
    kept: list[Run] = []

    def wrap(function: Callable[..., Any]) -> Any:
        options: dict[str, Any] = {"strict": False, **dict(program.options)}
        options["passes"] = {**options.get("passes", {}), **dict.fromkeys(off, False)}
        kept.append(compile_and_keep(function, fullgraph=False, dynamic=program.dynamic, **options))
        return kept[-1].call

    found = Verdict([])
    with small_steps_count(), own_caches(program):
        for suffix in ("", " (with warm caches)")[: 1 + program.twice]:
            module, hits = module_of(program), _hits()
            state = ProcessState.now()
            with clean_dynamo():
                actual = harness.observe(module, wrap)
                different = harness.differences(module, dict(expected), actual) + state.differences()
                found.wrong += [f"{each}{suffix}" for each in different]
                found.unread += sum(isinstance(value, harness.Written) for value in actual.values())
                found.warm += _hits() - hits if suffix else 0
    graphs = [graph for run in kept for graph in run.session.graphs]
    events = {
        "regions": sum(graph.region is not None for graph in graphs),
    }
    found.fired |= {name: count for name, count in events.items() if count}
    for report in (p for graph in graphs for p in graph.passes):
        if report.changed:
            found.fired[report.name] = found.fired.get(report.name, 0) + max(1, len(report.rewrites))
        elif report.skips:
            found.skipped.add(report.name)
    return found


def _hits() -> int:
    return int(counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"])


def own_caches(program: Program) -> contextlib.AbstractContextManager[Any]:
    """What programs before have left on disk is in nobody's way."""
    return fresh_cache() if program.compiler == "inductor" else contextlib.nullcontext()


def is_torchs_own(program: Program, expected: Mapping[str, Any]) -> bool:
    """Is the compiler without glue as wrong? For regions, also where layers are compiled one by one."""

    def compiled(function: Any) -> Any:
        return torch.compile(function, backend=program.compiler, dynamic=program.dynamic)

    def by_layers(function: Any) -> Any:
        for layer in module["MODEL"]:
            layer.forward = compiled(layer.forward)
        return function

    has_layers = any(statement.text.startswith("MODEL =") for statement in program.prelude)
    has_layers = has_layers and dict(program.options).get("regions") != "whole"
    with own_caches(program):
        for wrap in (compiled, by_layers) if has_layers else (compiled,):
            for _ in range(1 + program.twice):
                with clean_dynamo():
                    module = module_of(program)
                    if harness.differences(module, dict(expected), harness.observe(module, wrap)):
                        return True
    return False


@contextlib.contextmanager
def clean_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    try:
        yield
    finally:
        torch._dynamo.reset()
        linecache.cache.pop(FILE, None)


def quiet_and_frozen() -> None:
    """Set up a process: calls that fail on fake tensors are no news, and collections skip what is imported."""
    for name in ("_subclasses.fake_tensor", "fx.experimental.sym_node", "fx.experimental.symbolic_shapes"):
        logging.getLogger(f"torch.{name}").setLevel(logging.CRITICAL)
    if torch.cuda.is_available():
        # Dynamo does in its first compile, for any backend; a checkpoint whose forward is that one refuses to run.
        torch.cuda.init()
    gc.collect()
    gc.freeze()
