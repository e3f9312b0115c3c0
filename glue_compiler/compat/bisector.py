"""Torch's compiler bisector, which knows backends and in each of them parts that it can leave out (2.11 to 2.15)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from glue_compiler.compat.parts import Feature, Uses

BACKEND = "glue"
PASSES, REWRITES = "passes", "rewrites"


BISECTOR = Feature(
    "part in torch's compiler bisector",
    {"torch._inductor.compiler_bisector:CompilerBisector.disable_subsystem": Uses(("backend", "subsystem"))},
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
def registered() -> Iterator[Any]:
    """Lets the bisector search in glue too, after its own backends; yields the bisector."""
    from torch._inductor.compiler_bisector import BACKENDS, BisectSubsystem, CompilerBisector

    BACKENDS[BACKEND] = [BisectSubsystem(REWRITES), BisectSubsystem(PASSES)]
    try:
        yield CompilerBisector
    finally:
        del BACKENDS[BACKEND]
