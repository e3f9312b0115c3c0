"""What this process runs on, and which rewrites are on in it and why: the facts behind ``glue doctor``."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass

import torch

import glue_compiler
from glue_compiler.byte_sizes import with_unit
from glue_compiler.compat import inductor
from glue_compiler.compat.versions import NEWEST_TORCH, OLDEST_TORCH
from glue_compiler.ops import cards, flash_attn4, quack_products
from glue_compiler.options import GlueOptions
from glue_compiler.pipeline import registry
from glue_compiler.pipeline.graph_pass import GraphPass, PairPass
from glue_compiler.report import recurrent_kernels

PACKAGES = ("triton", "transformers", "peft", "trl", "accelerate", "flash-attn")


@dataclass(frozen=True)
class PassState:
    """Whether a pass runs in a compile that sets no options of its own, and why."""

    name: str
    stage: str
    numerics: str
    runs: bool
    reason: str


def environment_lines() -> Iterator[tuple[str, str]]:
    """(name, text) of versions, devices and glue's variables."""
    yield "glue", glue_compiler.__version__
    yield "torch", f"{torch.__version__} (glue is tested with {tested_range()})"
    yield "python", f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    installed = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions() if d.metadata["Name"]}
    for name in PACKAGES:
        if name in installed:
            yield name, installed[name]
    if "triton" not in installed:
        yield "triton", "not installed: glue's kernels run as plain torch"
    if kernels := recurrent_kernels.advice():
        yield "recurrent layers", f"run as loops of plain torch without {kernels}"
    yield from device_lines()
    for name in sorted(os.environ):
        if name.startswith("GLUE_"):
            yield name, os.environ[name]


def device_lines() -> Iterator[tuple[str, str]]:
    """(name, text) of each device, and which of glue's kernels it runs."""
    if not torch.cuda.is_available():
        yield "device", "CPU alone: glue's kernels run as plain torch, and offload has nothing to free"
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = (properties.major, properties.minor)
        yield (
            f"cuda:{index}",
            f"{properties.name}, capability {capability[0]}.{capability[1]}, {with_unit(properties.total_memory)}",
        )
        if torch.version.hip is not None:
            yield "", "AMD: kernels of other packages, cuDNN and glue's sizes for NVIDIA's shared memory are off"
            continue
        card = cards.of_capability(capability)
        if card.flash4_head:
            yield (
                flash_attn4.PACKAGE,
                _package_text(
                    flash_attn4.unusable(),
                    "attention within documents",
                    "takes 0.5 to 0.9 of the time: glue-compiler[flash]",
                ),
            )
        if card.has_wgmma:
            yield (
                quack_products.PACKAGE,
                _package_text(
                    quack_products.unusable(), "grouped products of experts", "are faster: glue-compiler[experts]"
                ),
            )
        if not card.multiplies:
            yield "", "below 8.0: no kernels for packed attention or grouped products, which stay with torch's own"
    yield "", "what serves which part of a step, here or on another card: glue doctor --card sm_89"


def _package_text(reason: str | None, serves: str, gain: str) -> str:
    return f"serves {serves}" if reason is None else f"not used: {reason}. With it {serves} {gain}"


def pass_states(options: GlueOptions) -> list[PassState]:
    """Each pass, the user's own after glue's."""
    passes = registry.with_extra(registry.all_passes(), options.extra_passes)
    return [_state(graph_pass, options) for graph_pass in passes]


def _state(graph_pass: GraphPass, options: GlueOptions) -> PassState:
    runs = options.is_enabled(graph_pass.name, graph_pass.default)
    if graph_pass.name in options.passes:
        reason = "GLUE_DISABLE"
    elif not runs:
        reason = "off by default; options={'passes': {name: True}}"
    else:
        reason = "on by default"
    if runs and inductor.switched_off_by_torch(graph_pass.name):
        runs, reason = False, "torch._inductor.config.disabled_passes"
    if runs and isinstance(graph_pass, PairPass) and not graph_pass.is_asked_for(options):
        runs, reason = False, "no option asks for it; a graph that it applies to still may"
    return PassState(graph_pass.name, graph_pass.stage.value, graph_pass.numerics.value, runs, reason)


def tested_range() -> str:
    """The torch releases that glue is tested with, for people."""
    return f"{OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} to {NEWEST_TORCH[0]}.{NEWEST_TORCH[1]}"
