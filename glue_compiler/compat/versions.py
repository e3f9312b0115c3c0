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


@functools.cache
def warn_if_untested() -> None:
    """Say once when this torch is outside of what glue is tested with; the compile goes on."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if not OLDEST_TORCH <= version <= NEWEST_TORCH:
        warnings.warn(
            f"glue is tested with torch {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} to {NEWEST_TORCH[0]}.{NEWEST_TORCH[1]}, "
            f"this is {torch.__version__}. A rewrite that fails leaves the graph to the compiler as it is.",
            GlueWarning,
            stacklevel=2,
        )


def version_at_least(major: int, minor: int) -> bool:
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (major, minor)


def hash_of_files(paths: Iterable[pathlib.Path]) -> bytes:
    """Hash of the files' contents and of torch's version."""
    digest = hashlib.sha256(torch.__version__.encode())
    for path in sorted(paths):
        digest.update(path.read_bytes())
    return digest.digest()
