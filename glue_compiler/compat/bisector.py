"""Torch's compiler bisector, which knows backends and in each of them parts that it can leave out (2.11 to 2.15)."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from glue_compiler.compat.parts import Feature, Uses

BACKEND = "glue"
PASSES, REWRITES = "passes", "rewrites"


BISECTOR = Feature(
    "part in torch's compiler bisector",
    {
        f"torch._inductor.compiler_bisector:CompilerBisector.{name}": Uses(arguments)
        for name, arguments in (
            ("disable_subsystem", ("backend", "subsystem")),
            ("do_bisect", ("fn",)),
            ("get_bisect_range", ("backend_name", "subsystem_name")),
            ("get_run_state", ("backend_name", "subsystem_name")),
            ("get_subsystem", ()),
            ("update_bisect_range", ("backend_name", "subsystem_name", "low", "high")),
        )
    },
)


def disables(part: str, what: str) -> bool:
    """Does the bisector ask for this pass, or this single rewrite, to be left out? It counts each question.

    While it runs, ``torch.compile`` takes the backend that it is searching in, whatever the program asks for. So this
    says yes only for ``TORCH_BISECT_BACKEND=glue TORCH_BISECT_SUBSYSTEM=rewrites TORCH_BISECT_MAX=n`` (after the first
    n + 1, as it counts), and inside of :func:`registered`.
    """
    if not BISECTOR.is_available():
        return False
    from torch._inductor.compiler_bisector import CompilerBisector

    return CompilerBisector.disable_subsystem(BACKEND, part, lambda: what)


@contextlib.contextmanager
def registered(first: bool = False) -> Iterator[Any]:
    """Lets the bisector search in glue too, after its own backends or before them; yields the bisector."""
    from torch._inductor.compiler_bisector import BACKENDS, BisectSubsystem, CompilerBisector

    before: dict[str, Any] = dict(BACKENDS)
    ours: dict[str, Any] = {BACKEND: [BisectSubsystem(REWRITES), BisectSubsystem(PASSES)]}
    BACKENDS.clear()
    BACKENDS.update({**ours, **before} if first else {**before, **ours})
    try:
        yield CompilerBisector
    finally:
        BACKENDS.clear()
        BACKENDS.update(before)


def search(works: Callable[[str, int], bool], totals: Mapping[str, int]) -> tuple[str, int] | None:
    """Lets the bisector search in glue alone, for a program that fails with all of it and runs in other processes.

    Args:
        works: does the program work with so many of this part, the first ones, and all of the other part?
        totals: how many there are of each part.

    Returns:
        The part, and the number, from 1, of the first one with which the program fails. None: it fails with none too.
    """
    shown = sys.stdout

    def step() -> bool:
        part = torchs.get_subsystem()
        if part is None:
            return False
        state = torchs.get_run_state(BACKEND, part)
        if state == "find_max_bounds":  # it would count in this process
            torchs.update_bisect_range(BACKEND, part, 0, max(0, totals[part] - 1))
            return False
        number = 0 if state == "test_disable" else sum(torchs.get_bisect_range(BACKEND, part)) // 2 + 1
        with contextlib.redirect_stdout(shown):
            return (number == 0 or number < totals[part]) and works(part, number)

    # It prints each of its steps, and so does the caller.
    with registered(first=True) as torchs, contextlib.redirect_stdout(io.StringIO()):
        found = torchs.do_bisect(step)
    return None if found is None or found.subsystem is None else (found.subsystem, found.bisect_number + 1)
