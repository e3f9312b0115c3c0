"""The wheel: what is in it, and that importing torch beside it costs next to nothing."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("glue_compiler", "passes", "setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("release")
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    # As users build: pip fetches the setuptools that pyproject.toml asks for.
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", "dist", "."]
    subprocess.run(command, cwd=folder, check=True, timeout=500)
    (built,) = (folder / "dist").glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        yield archive


@pytest.mark.slow
def test_the_wheel_holds_the_package_alone(wheel):
    names = wheel.namelist()
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"glue_compiler"}
    assert "glue_compiler/py.typed" in names
    modules = {str(path.relative_to(ROOT / "glue_compiler")) for path in (ROOT / "glue_compiler").rglob("*.py")}
    modules |= {str(Path("passes") / path.relative_to(ROOT / "passes")) for path in (ROOT / "passes").rglob("*.py")}
    packed = {name.removeprefix("glue_compiler/") for name in names if name.endswith(".py")}
    assert packed == modules
    assert any(name.startswith("glue_compiler/report/page/") for name in names)


@pytest.mark.slow
def test_the_wheel_has_the_entry_points(wheel):
    (text,) = (wheel.read(name).decode() for name in wheel.namelist() if name.endswith("entry_points.txt"))
    for group in ("console_scripts", "torch_dynamo_backends", "torch.backends", "pytest11"):
        assert f"[{group}]" in text


def test_what_runs_when_torch_is_imported_is_small():
    script = (
        "import time, sys, importlib.abc, importlib.machinery, typing\n"
        "begin = time.process_time()\n"
        "from glue_compiler.integrations.accelerate import install; install()\n"
        "print((time.process_time() - begin) * 1e3)\n"
        "assert 'torch' not in sys.modules\n"
        "assert not [name for name in sys.modules if name.startswith('glue_compiler.') and name.split('.')[1] not in "
        "('errors', 'integrations')]"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert float(run.stdout) >= 0  # no time is judged: what is not loaded is what keeps it below 50 ms
