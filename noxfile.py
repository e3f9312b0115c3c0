"""The fast tests and the training stacks on every torch and transformers that are supported, on a CPU.

``nox`` runs all; ``nox -s "suite(torch='2.11', transformers='newest')"`` one; what stands behind ``--`` goes to pytest
instead. Each run leaves a report, and docs/versions.md says what the reports say. Options of pip for torch alone, like
``--index-url`` for a CPU build, are taken from ``TORCH_INDEX`` as in the Makefile.
"""

from __future__ import annotations

import os
from pathlib import Path

import nox

nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True

TORCH = ("2.11", "2.12", "2.13", "2.14", "2.15")
TRANSFORMERS = ("4.57", "5.0", "newest")
"""``newest``: the release that constraints.txt names."""

EXTRAS = nox.project.load_toml("pyproject.toml")["project"]["optional-dependencies"]
STACKS = tuple(each for each in EXTRAS["stacks"] if not each.startswith("transformers"))
"""What ``tests/stacks`` trains with; what is not installed is skipped there."""
OF_DATASETS = ("datasets", "dill", "multiprocess", "fsspec", "pyarrow")
BOUND_TO_TRANSFORMERS = ("transformers", "huggingface_hub", "tokenizers", "hf-xet", *OF_DATASETS, *STACKS)
TESTS = ("tests", "-m", "not slow or stack")


@nox.session
@nox.parametrize("transformers", TRANSFORMERS)
@nox.parametrize("torch", TORCH)
def suite(session: nox.Session, torch: str, transformers: str) -> None:
    """Everything of ``tests/`` that is not slow, ``tests/stacks`` with it."""
    bound = Path(session.create_tmp()) / "constraints.txt"
    bound.write_text("\n".join(_constraints(newest=transformers == "newest")), encoding="utf-8")
    # torch goes first, so that nothing installed later chooses another build of it.
    session.install(*os.environ.get("TORCH_INDEX", "").split(), f"torch=={torch}.*")
    chosen = "transformers" if transformers == "newest" else f"transformers=={transformers}.*"
    session.install("-c", str(bound), "-e", ".[cli,test]", f"torch=={torch}.*", chosen, *STACKS, "rich")
    workers = os.environ.get("WORKERS", "2")
    try:
        session.run(
            *("python", "-m", "pytest", "-n", workers, "--dist", "worksteal", "-p", "tests.version_reports.plugin"),
            *(session.posargs or (*TESTS, "--whole-report")),
            env={"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"},
        )
    finally:
        session.run("python", "-m", "tests.version_reports.table")


USED = """
import torch
model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
model.compile(backend="glue")
model(torch.randn(4, 8)).sum().backward()
assert all(weight.grad is not None for weight in model.parameters())
import glue_compiler
print(f"torch {torch.__version__} trains with {glue_compiler.__file__}")
"""


@nox.session
@nox.parametrize("torch", TORCH)
def wheel(session: nox.Session, torch: str) -> None:
    """The wheel of the sdist trains a step, and has its command, in an environment with nothing else."""
    folder = Path(session.create_tmp()).resolve()
    session.install("build")
    session.run("python", "-m", "build", "--outdir", str(folder), silent=True)
    session.run("python", "-m", "pip", "uninstall", "-qy", "build")
    session.install(*os.environ.get("TORCH_INDEX", "").split(), f"torch=={torch}.*")
    (built,) = folder.glob("*.whl")
    session.install("--force-reinstall", "--no-deps", str(built))
    session.install(f"{built}[cli]", f"torch=={torch}.*")
    session.chdir(folder)
    session.run("python", "-c", USED)
    session.run("glue", "doctor")


def _constraints(newest: bool) -> list[str]:
    """What tests run with, without torch, and without what another transformers needs in another version."""
    left_out = ("torch", *(() if newest else BOUND_TO_TRANSFORMERS))
    lines = Path("constraints.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.partition("==")[0] not in left_out]
