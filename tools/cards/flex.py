"""The kernels that Inductor makes of glue's attention operators on a card that is not here.

A graph is traced for a CPU, where autograd runs, and lowered as one of the card's.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._functorch.config
import triton
from torch._guards import TracingContext, tracing
from torch._inductor.codecache import PyCodeCache
from torch._inductor.compile_fx import compile_fx
from torch._inductor.graph import GraphLowering
from torch._inductor.kernel.flex import flex_attention as templates
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_map
from triton.compiler import ASTSource

import glue_compiler  # noqa: F401  defines the operators
from glue_compiler.compat.attention import FlexBackward, FlexForward, flex_kernels
from glue_compiler.ops import flex_tiles
from glue_compiler.ops.cards import Card
from tools.cards.compiling import Compiled, compiling_for, described, target_of

ROWS, HEADS, KEY_HEADS = 1, 4, 2


@dataclass(frozen=True)
class Attention:
    """An attention that glue writes: ``documents`` without a mask, or a mask that is read, of booleans or numbers.

    ``mask``: None for documents, else the mask's dtype. ``learned``: numbers with a gradient.
    """

    dtype: torch.dtype
    head_size: int
    mask: torch.dtype | None = None
    learned: bool = False
    length: int = 2048

    def __str__(self) -> str:
        kind = "documents" if self.mask is None else f"{'learned ' * self.learned}mask of {name_of(self.mask)}"
        return f"attention, {name_of(self.dtype)}, heads of {self.head_size}, {kind}"


def name_of(dtype: torch.dtype) -> str:
    """``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


ATTENTIONS = (
    Attention(torch.bfloat16, 256),
    Attention(torch.bfloat16, 128, torch.bool),
    Attention(torch.bfloat16, 64, torch.float32),
    Attention(torch.float16, 192, torch.float32, learned=True),
    Attention(torch.float32, 128, torch.bfloat16),
    Attention(torch.float32, 256),
)
"""Documents, masks of 1, 2 and 4 bytes, and one with a gradient; heads that are tuned, padded, and the largest."""


def compiled_attention(attention: Attention, card: Card, *, assembles: bool = True) -> list[Compiled]:
    """The forward's kernel and the backward's, as Inductor makes them without tuning."""
    with compiling_for(target_of(card.capability), assembles=assembles):
        return [_compiled(kernel, card) for kernel in _lowered(attention, card)]


def estimated_attention(attention: Attention, card: Card) -> tuple[int, int, bool]:
    """Bytes of shared memory of forward and backward, without a compiler; and whether Inductor's would not fit."""
    score_bytes = 0 if attention.mask is None else attention.mask.itemsize
    call = attention.head_size, attention.dtype, score_bytes
    with mock.patch("torch.cuda.get_device_capability", return_value=card.capability):
        chosen = flex_kernels(attention.head_size, attention.dtype)
    given = flex_tiles.options(card, *call, chosen)
    reads_shared = card.copies_tiles
    forward, backward = chosen.forward[0], chosen.backward[0]
    if of_given := [value for name, value in given.items() if name.startswith("fwd_")]:
        forward = FlexForward(*of_given)
    if of_backward := [value for name, value in given.items() if name.startswith("bwd_")]:
        backward = FlexBackward(*of_backward)
    taken_forward = flex_tiles.forward_bytes(forward, *call, reads_shared)
    taken = taken_forward, flex_tiles.backward_bytes(backward, *call, reads_shared)
    return *taken, bool(given)


def _compiled(choice: Any, card: Card) -> Compiled:
    module = PyCodeCache.load_by_key_path(choice.bmreq.module_cache_key, choice.bmreq.module_path)
    tuner = getattr(module, choice.bmreq.kernel_name)
    (config,) = tuner.configs
    meta, names = tuner.triton_meta, tuner.fn.arg_names
    constants = {(names.index(name),): value for name, value in meta["constants"].items()}
    source = ASTSource(tuner.fn, meta["signature"], constants, meta["configs"][0])
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return described(triton.compile(source, target=target_of(card.capability), options=options))


def _lowered(attention: Attention, card: Card) -> list[Any]:
    """The one choice that Inductor has for each kernel."""
    chosen: list[Any] = []
    real = templates.autotune_select_algorithm

    def select(name: str, choices: list[Any], *args: Any, **kwargs: Any) -> Any:
        chosen.extend(choices)
        return real(name, choices, *args, **kwargs)

    def lower(graph: torch.fx.GraphModule, inputs: list[Any], **given: Any) -> Any:
        with _seen_as(card):
            moved = _moved(graph)
            on_card = [_on_card(value) for value in inputs]
            lowering = GraphLowering(moved, example_inputs=on_card, is_backward=given.get("is_backward", False))
            with V.set_graph_handler(lowering), V.set_fake_mode(torch._guards.detect_fake_mode(inputs)):
                lowering.run(*on_card)

        def run(args: list[Any]) -> Any:
            return graph(*args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    with (
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
        tracing(TracingContext(mode)),
        torch._functorch.config.patch(force_non_lazy_backward_lowering=True),
        mock.patch.object(templates, "autotune_select_algorithm", select),
        # As on a card: there scores are of the operands' dtype, and a learned mask has no other kernel.
        mock.patch.object(torch, "promote_types", lambda one, other: one),
        mock.patch("glue_compiler.ops.masked_attention._is_dense", return_value=False),
        mock.patch("glue_compiler.ops.cards.of_device", return_value=card),
        mock.patch("torch.cuda.get_device_capability", return_value=card.capability),
    ):
        graph, inputs = _graph(attention)
        compile_fx(graph, inputs, inner_compile=lower)
    return chosen


def _graph(attention: Attention) -> tuple[torch.fx.GraphModule, list[torch.Tensor]]:
    """Of the operator alone, which is given its lists of blocks: all else runs on any card."""
    sizes = (ROWS, HEADS, attention.length, attention.head_size)
    query = torch.empty(sizes, dtype=attention.dtype, requires_grad=True)
    key, value = (torch.empty(ROWS, KEY_HEADS, *sizes[2:], dtype=attention.dtype, requires_grad=True) for _ in range(2))
    operators = torch.ops.glue
    settings: tuple[Any, ...]
    if attention.mask is None:
        read = torch.empty(9, dtype=torch.int32)
        lists = operators.document_blocks(read, ROWS, attention.length, True, -1)
        operator, settings = operators.packed_attention.default, (attention.length, True, -1, None)
    else:
        kind = "shows" if attention.mask == torch.bool else "added"
        read = torch.empty(1, 1, attention.length, attention.length, dtype=attention.mask)
        lists = operators.mask_blocks(read, attention.length, attention.length, kind, "zeros")
        read.requires_grad_(attention.learned)
        operator, settings = operators.masked_attention.default, (kind, "zeros")
    inputs = [query, key, value, read, *lists]
    graph = torch.fx.Graph()
    given = [graph.placeholder(f"given_{index}") for index in range(len(inputs))]
    for node, tensor in zip(given, inputs, strict=True):
        node.meta["example_value"] = tensor
    arguments = (*given[:4], *settings, given[4:]) if attention.mask is None else (*given[:4], given[4:], *settings)
    graph.output((graph.call_function(operator, arguments),))
    return torch.fx.GraphModule(torch.nn.Module(), graph), inputs


def _on_card(value: Any) -> Any:
    if isinstance(value, FakeTensor):
        with value.fake_mode:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda:0")
    return torch.device("cuda:0") if isinstance(value, torch.device) else value


def _moved(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A copy, all of whose tensors are on the card."""
    moved = copy.deepcopy(graph)
    for module in moved.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                node.args, node.kwargs = map_aggregate(node.args, _on_card), map_aggregate(node.kwargs, _on_card)
                for name in ("val", "example_value"):
                    if name in node.meta:
                        node.meta[name] = tree_map(_on_card, node.meta[name])
            module.recompile()
    moved.graph.output_node().meta.pop("user_visible_output_idxs", None)
    return moved


@contextlib.contextmanager
def _seen_as(card: Card) -> Iterator[None]:
    """torch sees this one card, as far as Inductor asks to make a kernel."""
    major, minor = card.capability
    properties = SimpleNamespace(
        name=card.name, major=major, minor=minor, multi_processor_count=100, total_memory=24 << 30, warp_size=32,
        regs_per_multiprocessor=65536, max_threads_per_multi_processor=1536, max_threads_per_block=1024,
        L2_cache_size=1 << 22, shared_memory_per_block=49152, shared_memory_per_block_optin=card.shared, gcnArchName="",
    )  # fmt: skip
    answers: dict[str, Any] = {
        "get_device_capability": card.capability, "get_device_properties": properties, "is_available": True,
        "_get_device_properties": properties, "current_device": 0, "device_count": 1, "_lazy_init": None,
        "get_device_name": card.name, "synchronize": None, "is_bf16_supported": card.multiplies,
    }  # fmt: skip
    with contextlib.ExitStack() as patches:
        for name, answer in answers.items():
            patches.enter_context(
                mock.patch.object(torch.cuda, name, lambda *given, answer=answer, **more: answer, create=True)
            )
        yield
