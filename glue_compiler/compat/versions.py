"""Which torch this is, and whether glue knows it."""

from __future__ import annotations

import functools
import hashlib
import pathlib
import warnings
from collections.abc import Iterable

import torch

from glue_compiler.errors import GlueWarning

OLDEST_TORCH = (2, 11)
NEWEST_TORCH = (2, 15)


def torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def is_tested() -> bool:
    """Is this torch one of those that glue is tested with?"""
    return OLDEST_TORCH <= torch_version() <= NEWEST_TORCH


@functools.cache
def warn_if_untested() -> None:
    """Say once when this torch is outside of what glue is tested with; the compile goes on."""
    if not is_tested():
        warnings.warn(
            f"glue is tested with torch {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} to {NEWEST_TORCH[0]}.{NEWEST_TORCH[1]}, "
            f"this is {torch.__version__}. A rewrite that fails leaves the graph to the compiler as it is.",
            GlueWarning,
            stacklevel=2,
        )


def hash_of_files(paths: Iterable[pathlib.Path]) -> bytes:
    """Hash of the files' contents and of torch's version."""
    digest = hashlib.sha256(torch.__version__.encode())
    for path in sorted(paths):
        digest.update(path.read_bytes())
    return digest.digest()
