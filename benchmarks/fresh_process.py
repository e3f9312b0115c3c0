"""Runs a benchmark's module in a process of its own, with the compilers' caches in a folder."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping


def run_module(
    module: str, options: Mapping[str, object], caches: str, *, captures_errors: bool
) -> subprocess.CompletedProcess[str]:
    """Its standard output is captured; its standard error too, or shown.

    Args:
        options: True is a flag, None is left out.
    """
    given = {name: value for name, value in options.items() if value is not None}
    passed = [f"--{name}" if value is True else f"--{name}={value}" for name, value in given.items()]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": caches, "TRITON_CACHE_DIR": os.path.join(caches, "triton")}
    command = [sys.executable, "-m", module, *passed]
    errors = subprocess.PIPE if captures_errors else None
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, check=False)
