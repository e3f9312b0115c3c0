"""Packages whose kernels models use for recurrent layers where they are installed, and loops of torch where not."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

KERNELS = {
    "flash-linear-attention": ("fla", "gated delta rules and linear attention"),
    "causal-conv1d": ("causal_conv1d", "short causal convolutions"),
    "mamba-ssm": ("mamba_ssm", "state space layers"),
}
"""Package → the module that it is imported as, and what its kernels are for."""


def missing(packages: Iterable[str] = KERNELS) -> list[str]:
    """Those of ``packages`` that are not installed."""
    return [package for package in packages if importlib.util.find_spec(KERNELS[package][0]) is None]


def advice(packages: Iterable[str] = KERNELS) -> str:
    """``flash-linear-attention (gated delta rules and linear attention), ...`` of what is missing; ``""``: nothing."""
    return ", ".join(f"{package} ({KERNELS[package][1]})" for package in missing(packages))
