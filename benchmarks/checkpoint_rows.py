"""The ways to train with checkpoints that benchmarks compare, each a row: what is compiled, and what a step is."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.checkpoint_decoder import Decoder, Shape, batch_of
from benchmarks.checkpoint_transformers import LanguageModel, tokens_of

GRAPH_ROWS = ("none", "no-reorder", "serial", "glue")
LAYER_ROWS = ("layers-none", "save_on_cpu", "trl", "layers-glue")
REGION_ROWS = ("regions-none", "own", "regions-own")
ROWS = (*GRAPH_ROWS, "glue-none", *LAYER_ROWS, *REGION_ROWS)

Context = Callable[[], AbstractContextManager[Any]]


def model_of(name: str, shape: Shape, device: torch.device) -> Decoder | LanguageModel:
    return Decoder(shape, device) if name == "decoder" else LanguageModel(name, shape, device)


def batch_for(name: str, shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    """What a model is called with."""
    return batch_of(shape, device) if name == "decoder" else tokens_of(shape, device)


def prepare(
    row: str, model: Decoder | LanguageModel, dynamic: bool | None = None
) -> tuple[Callable[..., Tensor], Context]:
    """The callable to step with, and the context of a step. ``dynamic``: as for ``torch.compile``.

    Raises:
        ImportError: the row needs a package that is not there.
    """
    one_graph = isinstance(model, Decoder)  # peft's hook on the embedding breaks the graph behind it
    compiled = functools.partial(torch.compile, model, fullgraph=one_graph, dynamic=dynamic)
    if row in ("none", "serial"):
        return compiled(), nullcontext
    if row == "no-reorder":
        return compiled(options={"reorder_for_peak_memory": False}), nullcontext
    if row.endswith("own"):
        assert isinstance(model, LanguageModel), "offload=True is transformers'"
        model.offload()
    if row == "own":
        return compiled(), nullcontext
    options: dict[str, dict[str, Any]] = {"glue": {"offload": "checkpoints"}, "glue-none": {"regions": "whole"}}
    if row in options or row in REGION_ROWS:
        return compiled(backend="glue", options=options.get(row)), nullcontext
    for layer in model.layers:
        layer.compile(fullgraph=True, dynamic=dynamic)
    if row == "save_on_cpu":
        return model, lambda: torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available())
    if row == "trl":
        from trl.models.activation_offloading import OffloadActivations

        return model, OffloadActivations
    if row == "layers-glue":
        import glue_compiler

        return model, glue_compiler.offload_checkpoints
    return model, nullcontext


class MarkSavedInputs:
    """A joint-graph pass that marks the layers' inputs for torch's own offload (nothing in torch does)."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def __call__(self, gm: torch.fx.GraphModule, joint_inputs: Any) -> torch.fx.GraphModule:
        regions = [node.meta["ac_graph_id"] for node in gm.graph.nodes if "ac_graph_id" in node.meta]
        for node in gm.graph.nodes:
            value = node.meta.get("val")
            readers = {user.meta["ac_graph_id"] for user in node.users if "ac_graph_id" in user.meta}
            starts = readers - {node.meta.get("ac_graph_id"), max(regions)}
            if node.op == "call_function" and starts and isinstance(value, Tensor):
                node.meta["should_offload"] = value.numel() * value.element_size() == self.nbytes
        return gm


def serial_offload(shape: Shape) -> AbstractContextManager[Any]:
    return torch._functorch.config.patch(
        enable_activation_offloading=True,
        activation_offload_separate_stream=False,
        joint_custom_pass=MarkSavedInputs(shape.input_bytes),
    )


def stepper(
    step_model: Callable[..., Tensor], context: Context, model: nn.Module, batch: tuple[Tensor, Tensor]
) -> Callable[[], float]:
    """A training step without an optimiser, on an idle device; returns its milliseconds."""

    def step() -> float:
        start = time.perf_counter()
        with context():
            step_model(*batch).backward()
        for tensor in (*model.parameters(), *batch):
            tensor.grad = None
        if batch[0].is_cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1000

    return step


def clean_up(device: torch.device) -> None:
    """Nothing of a row may count for the next one."""
    from glue_compiler.ops.copy_engine import engine

    engine.release()
    engine.pool.pinning_seconds = 0.0
    torch._dynamo.reset()
    gc.collect()  # a compiled layer refers to itself
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()  # or the next row finds memory that is page-locked already
