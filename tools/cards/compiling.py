"""Triton kernels compiled for a card that is not here, by Triton's own compiler and assembler, which run on a CPU."""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.runtime.jit import JITFunction

AMD = GPUTarget("hip", "gfx942", 64)


def target_of(capability: tuple[int, int]) -> GPUTarget:
    """Triton's name of CUDA cards of a compute capability."""
    return GPUTarget("cuda", 10 * capability[0] + capability[1], 32)


@dataclass(frozen=True)
class Compiled:
    """Bytes of shared memory of a block of threads; registers of a thread and bytes it spills, where that is known."""

    kernel: str
    shared: int
    registers: int
    spills: int


def described(kernel: Any) -> Compiled:
    """Of what Triton compiled inside of :func:`compiling_for`."""
    metadata = kernel.metadata
    return Compiled(metadata.name, metadata.shared, getattr(metadata, "registers", 0), getattr(metadata, "spills", 0))


@contextlib.contextmanager
def compiling_for(target: GPUTarget, *, assembles: bool = True) -> Iterator[list[Compiled]]:
    """Kernels that are launched inside, on tensors of any device, are compiled for ``target`` and listed instead.

    ``assembles``: down to the instructions, which says what registers they take; else to where shared memory is known.
    """
    found: list[Compiled] = []
    real: Callable[..., Any] = JITFunction.run

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled = real(kernel, *args, grid=grid, warmup=True, **kwargs)
        found.append(described(compiled))
        return compiled

    # No lookup of a real driver, which would ask for a library of CUDA's.
    active = mock.patch.object(triton.runtime.driver, "_active", _Driver(target, assembles))
    hook = _with_resources if assembles else _without_instructions
    measured = mock.patch.object(knobs.runtime, "add_stages_inspection_hook", hook)
    with active, measured, mock.patch.object(JITFunction, "run", run):
        yield found


class _Driver:
    """What Triton asks of a device before it compiles."""

    def __init__(self, target: GPUTarget, assembles: bool) -> None:
        self.target, self.assembles = target, assembles

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> str:
        """Kernels are kept by device: each target is one of its own."""
        return f"{self.target.backend} {self.target.arch} {self.assembles}"

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_benchmarker(self) -> None:
        return None


def _with_resources(backend: Any = None, stages: Any = None, options: Any = None, *_: Any) -> Any:
    """A hook of Triton's: the assembler's report becomes part of what is known of a kernel."""
    if backend is None:
        return "resources", "resources"
    if backend.target.backend == "cuda":
        stages["cubin"] = lambda ptx, metadata: _assembled(ptx, metadata, options, backend.target.arch)
    return None


def _without_instructions(backend: Any = None, stages: Any = None, options: Any = None, *_: Any) -> Any:
    if backend is None:
        return "no instructions", "no instructions"
    *_, before, last = stages

    def name_alone(source: Any, metadata: dict[str, Any]) -> str:
        metadata["name"] = "not assembled"
        return ""

    stages[before], stages[last] = name_alone, lambda source, metadata: b""
    return None


def _assembled(ptx: str, metadata: dict[str, Any], options: Any, arch: int) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        fused = [] if options.enable_fp_fusion else ["--fmad=false"]
        command = [get_ptxas(arch).path, "-v", *fused, f"--gpu-name={sm_arch_from_capability(arch)}"]
        run = subprocess.run([*command, str(source), "-o", str(binary)], capture_output=True, text=True)
        if run.returncode:
            raise RuntimeError(f"{metadata['name']} is not assembled for sm_{arch}: {run.stderr}")
        metadata["registers"] = max(map(int, re.findall(r"Used (\d+) registers", run.stderr)), default=0)
        metadata["spills"] = sum(map(int, re.findall(r"(\d+) bytes spill", run.stderr)))
        return binary.read_bytes()
