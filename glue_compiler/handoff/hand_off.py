"""From the rewritten graph to a compiled callable."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from glue_compiler.compat import checkpoint_tags, graph_cache, graph_inputs, inductor, partition
from glue_compiler.fx.bodies import graph_modules
from glue_compiler.ops import nf4
from glue_compiler.ops.batch_memo import BatchMemo, memoized
from glue_compiler.ops.opaque import call_directly
from glue_compiler.options import GlueOptions
from glue_compiler.pipeline.results import Prologue

HandOff = Callable[..., Callable[..., Any]]
"""Called as :func:`hand_off` is; with an ``edit_pair`` only when a pass asks for both graphs of a training step."""

_batch_memo = BatchMemo()


@checkpoint_tags.autograd_functions_tagged()
def hand_off(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    options: GlueOptions,
    passes_uuid: bytes | None,
    edit_pair: partition.Edit | None = None,
) -> Callable[..., Any]:
    """Compile ``gm`` with the compiler that ``options`` names. Takes ownership of ``gm``.

    ``edit_pair`` marks and changes the graphs of a training step; ``passes_uuid`` stands for it too;
    without one, nothing comes from Inductor's caches and nothing goes there.
    """
    with checkpoint_tags.kept_in_forward(graph_modules(gm)), partition.trace_of_its_own():
        return _compiled(gm, inputs, options, passes_uuid, edit_pair)


def _compiled(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    options: GlueOptions,
    passes_uuid: bytes | None,
    edit_pair: partition.Edit | None,
) -> Callable[..., Any]:
    if options.compiler == "aot_eager":
        return partition.compile_with_aot_eager(gm, inputs, edit_pair)
    if not inductor.HAND_OFF.is_available():
        return inductor.compile_as_torch_does(gm, inputs)

    # config_patches, and not a context manager around the call: the backward is compiled after it has returned.
    patches = {
        **options.inductor,
        **inductor.post_grad_patch(passes_uuid, _call_kernels, options.inductor),
        **graph_cache.cacheable_patch(list(graph_modules(gm)), options.inductor),
    }
    if edit_pair is not None:
        patches |= partition.partition_patch(passes_uuid, edit_pair, options.inductor)
    return inductor.compile_with_inductor(gm, inputs, patches)


def _call_kernels(graph: fx.Graph) -> None:
    nf4.launch_in_graph(graph)
    call_directly(graph)


def hand_off_in_parts(
    hand_off: HandOff,
    prologues: Sequence[Prologue],
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    options: GlueOptions,
    passes_uuid: bytes | None,
    edit_pair: partition.Edit | None = None,
) -> Callable[..., Any]:
    """Compile ``gm`` and the prologues that were split off it, and join them through the process's batch memo.

    ``gm`` takes ``inputs``, then the results of each prologue in turn; the callable that is returned takes ``inputs``.
    """
    # Memory of a captured CUDA graph is overwritten by its next replay, and the memo keeps results for longer.
    quiet = dataclasses.replace(options, inductor={**options.inductor, "triton.cudagraphs": False})
    runs = [hand_off(p.graph, [inputs[i] for i in p.inputs], quiet, passes_uuid) for p in prologues]
    results = [graph_inputs.example_input(value) for p in prologues for value in p.results]
    editing = () if edit_pair is None else (edit_pair,)
    call = hand_off(gm, [*inputs, *results], options, passes_uuid, *editing)
    for prologue, run in reversed(list(zip(prologues, runs, strict=True))):
        # Another compiler, or another of its options, may round differently.
        key = (prologue.key, options.compiler, repr(sorted(options.inductor.items())))
        call = memoized(call, run, prologue.inputs, _batch_memo.results_of(key))
    return call
