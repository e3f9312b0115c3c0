"""What compiles the rows of benchmarks.end_to_end: glue, whole or rewrite by rewrite, and what there is beside it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, nn

from benchmarks import peer_torchtitan, peer_torchtune, peer_unsloth
from benchmarks.end_to_end_rows import ROWS, Size, Workload
from benchmarks.peers import Outcome, base_of
from glue_compiler.pipeline import registry


@dataclass(frozen=True)
class Variant:
    """What compiles a row, and what it compiles.

    Attributes:
        compiler: "glue", "inductor" or, for eager, None.
        attention: transformers' name for it.
        by_layers: each decoder layer by itself; what is around the layers stays eager.
        by_regions: what a user can write by hand: each decoder layer with its checkpoint inside, and head and loss.
        options: glue's, or Inductor's.
        is_patched: by Liger.
        recomputes: backward computes again all that is fused and no product (torch's aggressive_recomputation).
        peer: of another library, (row, size, device, what compiles) → what is trained, compiled.
        compiles_update: clipping and the optimizer's step too, by the same compiler.
        keeps: what a row checkpoints is kept.
    """

    compiler: str | None
    attention: str = "sdpa"
    by_layers: bool = False
    by_regions: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    is_patched: bool = False
    recomputes: bool = False
    peer: Callable[[str, Size, str, str], Workload] | None = None
    compiles_update: bool = False
    keeps: bool = False

    @property
    def is_compiled(self) -> bool:
        """Is there something that a cache may hold? Peers compile for themselves."""
        return self.compiler is not None or self.peer is not None

    def workload(self, row: str, size: Size, device: str, compiler: str) -> Workload:
        """What is trained; a peer has compiled it with ``compiler``."""
        if self.peer is not None:
            return self.peer(row, size, device, compiler)
        workload = ROWS[row].build(size, device, self.attention)
        if self.keeps:
            base_of(workload).gradient_checkpointing_disable()
        return workload

    def compiled(self, workload: Workload, compiler: str) -> Any:
        """What is called in a step; ``compiler`` is what stands behind glue, or is compared with it."""
        if self.is_patched:
            _patch_by_liger(base_of(workload))
        torch._functorch.config.aggressive_recomputation = self.recomputes
        if self.compiler is None:
            return workload.model
        how = self._how(compiler)
        if self.by_regions:
            return Regions(workload, how)
        if not self.by_layers:
            return torch.compile(workload.model, **how)
        for layer in workload.layers:
            layer.compile(**how)
        return workload.model

    def optimizer(self, weights: Sequence[Tensor], compiler: str) -> tuple[torch.optim.Optimizer, Callable[[], None]]:
        """AdamW of ``weights``, and what updates them: clips their gradients and makes its step."""
        settings: dict[str, Any] = {"lr": 1e-5, "fused": True}
        if self.compiles_update:  # as torch's tutorials have it: a rate that is a number is compiled into the code
            settings = {"lr": torch.tensor(1e-5), "capturable": True} if weights[0].is_cuda else {"lr": 1e-5}
        optimizer = torch.optim.AdamW(weights, **settings)

        def update() -> None:
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()

        return optimizer, torch.compile(update, **self._how(compiler)) if self.compiles_update else update

    def _how(self, compiler: str) -> dict[str, Any]:
        if self.compiler == "glue":
            return {"backend": "glue", "options": {"compiler": compiler, **dict(self.options)}}
        return {"backend": compiler, **({"options": dict(self.options)} if self.options else {})}


class _Checkpointed(nn.Module):
    """A decoder layer whose checkpoint, which transformers has in the layer's own call, is compiled with it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer(*args, **kwargs)


class Regions:
    """A model of transformers whose layers are compiled one by one with their checkpoints, and its head with the loss;
    embedding, masks and rotary tables are eager."""

    def __init__(self, workload: Workload, how: dict[str, Any]) -> None:
        base = base_of(workload)
        self._body = base.model
        for place, layer in enumerate(workload.layers):
            workload.layers[place] = region = _Checkpointed(layer)
            region.compile(**how)

        def loss_of(hidden: Tensor, labels: Tensor) -> Tensor:
            loss: Tensor = base.loss_function(
                logits=base.lm_head(hidden), labels=labels, vocab_size=base.config.vocab_size
            )
            return loss

        self._loss_of = torch.compile(loss_of, **how)

    def __call__(self, labels: Tensor, **inputs: Tensor) -> Outcome:
        hidden = self._body(**inputs).last_hidden_state
        return Outcome(self._loss_of(hidden, labels))


def _patch_by_liger(model: Any) -> None:
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model)


WHOLE = (("regions", "whole"),)


def _glue_with(*names: str) -> Variant:
    """glue with these passes alone."""
    return Variant(
        "glue",
        options=(
            *WHOLE,
            ("passes", {each.name: each.name in names for each in registry.all_passes()}),
        ),
    )


CUDA_GRAPHS = (("triton.cudagraphs", True),)
"""What ``mode="reduce-overhead"`` stands for."""

DROPPED = (("padding", "drop"),)

VARIANTS = {
    "glue": Variant("glue", options=WHOLE),
    "inductor": Variant("inductor"),
    "flex": Variant("inductor", "flex_attention"),
    "eager": Variant(None),
    "liger": Variant(None, is_patched=True),
    "torchtune": Variant(None, peer=peer_torchtune.build),
    "torchtitan": Variant(None, peer=peer_torchtitan.build),
    "torchtitan-varlen": Variant(None, peer=partial(peer_torchtitan.build, attention="varlen")),
    "unsloth": Variant(None, peer=peer_unsloth.build),
    "fa2": Variant("inductor", "flash_attention_2"),
    "fa4": Variant("inductor", "flash_attention_4"),
    "glue-torch": Variant("glue", options=(*WHOLE, ("kernels", "torch"))),
    "glue-recompute": Variant("glue", options=WHOLE, recomputes=True),
    "inductor-recompute": Variant("inductor", recomputes=True),
    "glue-unshared": Variant("glue", options=(*WHOLE, ("passes", {"share_layers": False}))),
    "glue-packed-weights": Variant("glue", options=(*WHOLE, ("passes", {"fuse_dequantization": False}))),
    "glue-offload": Variant("glue", options=(("offload", "checkpoints"),)),
    "glue-dropped": Variant("glue", options=(*WHOLE, *DROPPED)),
    "glue-shared": Variant("glue", options=(*DROPPED, ("prefix", "share"))),
    "glue-regions-dropped": Variant("glue", options=DROPPED),
    "glue-ranks-agree": Variant("glue", options=(("assume", {"ranks_agree": True}),)),
    "glue-layers": Variant("glue", by_layers=True),
    "glue-regions": Variant("glue"),
    "flex-regions": Variant("inductor", "flex_attention", by_regions=True),
    "glue-cudagraphs": Variant("glue", options=(*WHOLE, *CUDA_GRAPHS)),
    "glue-regions-cudagraphs": Variant("glue", options=CUDA_GRAPHS),
    "flex-cudagraphs": Variant("inductor", "flex_attention", options=CUDA_GRAPHS),
    "glue-update": Variant("glue", options=WHOLE, compiles_update=True),
    "flex-update": Variant("inductor", "flex_attention", compiles_update=True),
    "inductor-layers": Variant("inductor", by_layers=True),
    "flex-layers": Variant("inductor", "flex_attention", by_layers=True),
    "flex-kept-layers": Variant("inductor", "flex_attention", by_layers=True, keeps=True),
    "glue-none": _glue_with(),
    "glue-metadata": _glue_with("hoist_metadata", "memoize_metadata"),
    "glue-attention": _glue_with("specialize_attention"),
    "glue-experts": _glue_with("group_experts"),
    "glue-loss": _glue_with("chunk_loss"),
}


def variant_of(name: str) -> Variant:
    """One of ``VARIANTS``, or ``plan-B-regions`` and ``plan-B-regions-dropped``: glue within ``memory_budget=B``.

    Raises:
        ValueError: there is no such variant; the message names the nearest.
    """
    kind, _, budget = name.partition("-")
    budget, _, where = budget.partition("-")
    if kind == "plan" and where in ("regions", "regions-dropped"):
        dropped = DROPPED if where.endswith("dropped") else ()
        return Variant("glue", options=(("memory_budget", budget), *dropped))
    if name not in VARIANTS:
        near = difflib.get_close_matches(name, VARIANTS, 1)
        raise ValueError(f"there is no variant '{name}'" + (f"; did you mean '{near[0]}'?" if near else ""))
    return VARIANTS[name]
