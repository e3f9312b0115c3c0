"""Packages with kernels that may be installed, and must be as glue knows them."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Mapping, Set

import torch
from torch.torch_version import TorchVersion


def installed_version(package: str) -> str | None:
    """None: it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def why_absent(package: str, least: str) -> str | None:
    """Why a package for CUDA is not there; None: it is. Imports nothing.

    Args:
        least: the first version that serves all cards that glue takes it for.
    """
    version = installed_version(package)
    if version is None:
        return f"{package} is not installed"
    if TorchVersion(version) < least:
        return f"{package} {version} is older than {least}"
    return f"{package} is for CUDA alone" if torch.version.hip is not None else None


def why_unusable(package: str, least: str, module: str, parameters: Mapping[str, Set[str]]) -> str | None:
    """Why a package for CUDA cannot be used; None: it can. Imports it, which takes seconds, if it is installed.

    Args:
        least: as in :func:`why_absent`.
        parameters: of each function of ``module`` that is called, what it must take.
    """
    if absent := why_absent(package, least):
        return absent
    version = installed_version(package)
    try:
        imported = importlib.import_module(module)
        taken = {name: set(inspect.signature(getattr(imported, name)).parameters) for name in parameters}
    except Exception as error:  # whatever its import meets, models compile without it
        return f"{package} {version} cannot be imported: {type(error).__name__}: {error}"
    for name, wanted in parameters.items():
        if missing := wanted - taken[name]:
            return f"{name} of {package} {version} takes no {', '.join(sorted(missing))}; a newer glue may know it"
    return None
