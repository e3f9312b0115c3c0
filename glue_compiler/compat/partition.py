"""AOTAutograd's partitioner, as the place where glue sees the forward and the backward graph of a training step."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from glue_compiler.compat import checkpoint_tags, dynamo
from glue_compiler.compat.inductor import uuid_beside
from glue_compiler.compat.nested_graphs import inline_bodies
from glue_compiler.compat.offload_policies import save_what_is_to_be_offloaded

Graphs = tuple[fx.GraphModule, fx.GraphModule]
"""A forward and a backward graph."""


@contextlib.contextmanager
def trace_of_its_own() -> Iterator[None]:
    """Several graphs may be compiled in here one after the other, in one trace of Dynamo's.

    AOTAutograd notes on the trace what it knows of a graph, such as which saved tensors backward may write over, and
    compiles the backward later, by the note that is there then: it has to be that of the backward's own forward.
    """
    context = torch._guards.TracingContext.try_get()
    if context is None or dynamo.is_piece_for_ddp():  # of whose pieces torch keeps the notes by itself
        yield
        return
    with torch._guards.tracing(copy.copy(context)) as own:
        yield
    vars(context).update(vars(own))  # torch reads there what it knows of the graph that was compiled last


@dataclass(frozen=True)
class Edit:
    """What happens around the partitioner.

    Attributes:
        pair: changes a forward and a backward graph in place; the int is the number of the forward's outputs that are
            not saved.
        keeps_all: products, attention and operators that the partitioner does not know are kept for backward, also
            inside checkpoints, and all else is computed again: what is fused with them costs memory, and little time.
    """

    pair: Callable[[fx.GraphModule, fx.GraphModule, int], None]
    keeps_all: bool = False


_custom_passes = getattr(torch._inductor, "custom_graph_pass", None)
_CustomPartitionerFn: Any = getattr(_custom_passes, "CustomPartitionerFn", object)


class EditedPartition(_CustomPartitionerFn):
    """Partitions a joint graph as the user's partitioner does, or torch's min-cut one, with ``edit`` around it.

    The cache keys know it by ``key``, which must stand for all that ``edit`` does. Pickled, it is ``key`` alone:
    a cache hit brings graphs that were edited already.
    """

    def __init__(self, key: bytes | None, edit: Edit | None = None, inner: Any = None) -> None:
        self.key = key
        self.edit = edit
        self.inner = inner

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Graphs:
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        if self.edit is None:
            raise RuntimeError("a partitioner that came out of a cache key partitions nothing")
        partition: Callable[..., Graphs] = self.inner or min_cut_rematerialization_partition
        with contextlib.ExitStack() as settings:
            if self.edit.keeps_all:
                checkpoint_tags.forget_preferences(gm.graph)
                settings.enter_context(_recomputing_what_is_fused())
            save_what_is_to_be_offloaded(gm)
            forward, backward = partition(gm, joint_inputs, **kwargs)
        self.edit.pair(forward, backward, kwargs["num_fwd_outputs"])
        return forward, backward

    def uuid(self) -> Any | None:
        return uuid_beside(self.key, self.inner)

    def __getstate__(self) -> dict[str, Any]:
        return {"key": self.key, "edit": None, "inner": None}


def _recomputing_what_is_fused() -> contextlib.AbstractContextManager[Any]:
    """The min-cut partitioner recomputes all that its allow list has and that is no reduction, whatever that costs;
    products, attention and operators that it does not know are kept."""
    from torch._functorch import config

    found: contextlib.AbstractContextManager[Any] = config.patch(
        ban_recompute_used_far_apart=False,
        ban_recompute_long_fusible_chains=False,
        ban_recompute_materialized_backward=False,
    )
    return found


def partition_patch(key: bytes | None, edit: Edit, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Inductor options that run ``edit`` around the partitioner in ``options`` or Inductor's config."""
    from torch._inductor import config

    inner = options.get("custom_partitioner_fn", config.custom_partitioner_fn)
    return {"custom_partitioner_fn": EditedPartition(key, edit, inner)}


def compile_with_aot_eager(gm: fx.GraphModule, inputs: Sequence[Any], edit: Edit | None = None) -> Callable[..., Any]:
    """``backend="aot_eager"`` with ``edit`` between partitioning and running the graphs' operators one by one."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def run(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        inline_bodies(gm)
        _view_any_strides(gm)
        made: Callable[..., Any] = boxed_nop(gm, list(inputs))
        return made

    compiler = aot_autograd(
        fw_compiler=run,
        bw_compiler=run,
        partition_fn=min_cut_rematerialization_partition if edit is None else EditedPartition(b"", edit),
        keep_inference_input_mutations=True,
    )
    compiled: Callable[..., Any] = compiler(gm, list(inputs))
    return compiled


def _view_any_strides(gm: fx.GraphModule) -> None:
    """Tracing has made views for the strides that it computed, and operators that run may have others.

    Up to 2.13 at least, ``softplus_backward`` is traced with the strides of its input, and has those of the gradient.
    """
    aten = torch.ops.aten
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.find_nodes(op="call_function", target=aten.view.default):
                node.target = aten.reshape.default
            # What this gives is no view to autograd: as a result of a graph, callers may write to it.
            for node in module.graph.find_nodes(op="call_function", target=aten._unsafe_view.default):
                with module.graph.inserting_before(node):
                    node.update_arg(0, module.graph.call_function(aten.reshape.default, node.args))
            module.recompile()
