"""What glue did in a test: the dump that a user would set in the environment, read back."""

from __future__ import annotations

import sys

import pytest

from tests.stacks.report import Report


@pytest.fixture
def report(tmp_path, monkeypatch):
    """Of all that this process, and processes that it starts, compile with glue from here on.

    The rewritten graphs run in eager operators: a test of code generation asks for Inductor itself.
    """
    folder = tmp_path / "dump"
    monkeypatch.setenv("GLUE_DUMP", str(folder))
    monkeypatch.setenv("GLUE_COMPILER", "aot_eager")
    return Report(folder)


@pytest.fixture(autouse=True)
def fresh_accelerate():
    """Its state holds the backend of the run before."""
    yield
    if "accelerate" in sys.modules:
        sys.modules["accelerate"].state.AcceleratorState._reset_state(reset_partial_state=True)
