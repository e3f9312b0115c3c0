"""Names of parameters that Dynamo writes down for exported programs, and that nobody reads where a backend compiles."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from glue_compiler.compat.parts import Feature, Uses
from glue_compiler.compat.thread_flag import ThreadFlag

NAMES = Feature(
    "shorter tracing of models with many parameters",
    {
        "torch._dynamo.output_graph:OutputGraph.add_fqn_info_for_inlined_modules": Uses(
            ("self", "inlined_module", "source")
        )
    },
)
"""Without it, each module that a frame touches costs a walk over all modules in it."""

_leaves_out = ThreadFlag()


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    if NAMES.is_available():
        _install()
    with _leaves_out.on():
        yield


@functools.cache
def _install() -> None:
    from torch._dynamo.output_graph import OutputGraph

    traced: Any = OutputGraph
    original = traced.add_fqn_info_for_inlined_modules

    def add_fqn_info_for_inlined_modules(self: Any, inlined_module: Any, source: Any) -> None:
        if not _leaves_out.is_on:
            original(self, inlined_module, source)

    traced.add_fqn_info_for_inlined_modules = add_fqn_info_for_inlined_modules
