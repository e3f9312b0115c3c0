"""What Windows lacks is not needed to import glue, to set its options, or to reserve memory for the host.

A stand-in for a Windows that no test runs on: the modules and functions of POSIX alone are taken away after torch and
typer, which have ways of their own, were imported.
"""

import subprocess
import sys

import pytest

SCRIPT = """
import importlib, mmap, os, pkgutil, sys

import rich.live
import torch
import torch._inductor.compile_fx
import typer

for name in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[name] = None
for name in ("fork", "killpg", "register_at_fork"):
    delattr(os, name)
for name in ("MAP_PRIVATE", "MAP_ANONYMOUS"):
    delattr(mmap, name)
sys.platform = "win32"

import glue_compiler

for module in pkgutil.walk_packages(glue_compiler.__path__, "glue_compiler."):
    if not module.name.endswith(("_triton", "_tile_walk", "pytest_plugin")):
        importlib.import_module(module.name)

from glue_compiler.ops.page_locked import _Mapping
from glue_compiler.options import parse_options
from glue_compiler.pipeline import registry

options = parse_options({"offload": "checkpoints"}, None, registry.pass_names(), {})
assert options.offload == "checkpoints"
assert len(_Mapping.of(4096)) == 4096
"""


@pytest.mark.slow
def test_what_windows_lacks_is_not_needed():
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr
