"""Inductor's kernels write results over inputs that end in them: each over one, where torch has one in a kernel do so.

A backward of a gated MLP with adapters reads six values of the MLP's width in one kernel, and writes three to five:
while it runs, all of them are there, and that is the peak of a checkpointed step.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from glue_compiler.compat.parts import ANY, Feature, Uses
from glue_compiler.compat.thread_flag import ThreadFlag

REUSE = Feature(
    "reuse of memory within kernels",
    {
        "torch._inductor.scheduler:BaseSchedulerNode.decide_inplace_update": Uses(
            ("self",), ("completed_operations", "can_reuse", "inplace_update_buffers")
        ),
        "torch._inductor.codegen.wrapper:PythonWrapperCodegen.can_reuse": Uses(
            ("self", "input_buffer"), ("never_reuse_buffers",)
        ),
        "torch._inductor.scheduler:Scheduler.get_fused_node": Uses(("self", "node")),
        "torch._inductor.scheduler:FusedSchedulerNode": ANY,
        "torch._inductor.virtualized:V": ANY,
    },
)
"""Without it, peaks are as torch has them."""

_reuses = ThreadFlag()


@contextlib.contextmanager
def reused() -> Iterator[None]:
    """In here, a kernel without reductions writes as many results as it can over inputs that nobody reads behind it."""
    if REUSE.is_available():
        _install()
    with _reuses.on():
        yield


@functools.cache
def _install() -> None:
    from torch._inductor.scheduler import BaseSchedulerNode

    scheduled: Any = BaseSchedulerNode
    original = scheduled.decide_inplace_update

    def decide_inplace_update(node: Any) -> None:
        if _reuses.is_on:
            _decide(node, original)
        else:
            original(node)

    scheduled.decide_inplace_update = decide_inplace_update


def _decide(node: Any, decide: Callable[[Any], None]) -> None:
    """Torch counts what else reads an input in the same kernel, though all of a kernel's reads of a place come before
    its writes, unless it has loops over a reduction. It checks that all are of one place."""
    from torch._inductor.virtualized import V

    decided = getattr(V.kernel, "inplace_update_buffers", {})
    kept = V.graph.never_reuse_buffers
    with _added(kept, set(decided.values())):
        decide(node)
    together = _in_one_kernel(node)
    if len(together) == 1 or any(result.get_name() in decided for result in node.get_outputs()):
        return
    own = {result.get_name() for each in together for result in each.get_outputs()}
    others = {each.get_name() for each in together if each is not node}
    with _added(node.scheduler.completed_operations, others), _added(kept, own | set(decided.values())):
        decide(node)


def _in_one_kernel(node: Any) -> Sequence[Any]:
    """All that is computed beside ``node``, or itself where that has loops over a reduction."""
    from torch._inductor.scheduler import FusedSchedulerNode

    scheduler = node.scheduler
    if node.get_first_name() not in scheduler.name_to_fused_node:
        return [node]
    fused = scheduler.get_fused_node(node)
    # Other groups have kernels beside each other, as those of foreach operators.
    together = fused.get_nodes() if type(fused) is FusedSchedulerNode else [node]
    return [node] if any(each.is_reduction() or each.is_template() for each in together) else together


@contextlib.contextmanager
def _added(names: Any, more: set[str]) -> Iterator[None]:
    added = more - set(names)
    names.update(added)
    try:
        yield
    finally:
        names.difference_update(added)
