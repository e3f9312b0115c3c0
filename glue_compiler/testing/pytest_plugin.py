"""Fixtures for tests of passes, and graphs in the report of a test that fails. Pytest finds it by its entry point."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

# Torch and glue are imported where a test asks for them: pytest loads this file in every run.


@pytest.fixture
def glue_capture() -> Iterator[Callable[..., Any]]:
    """:func:`glue_compiler.testing.capture`, with Dynamo reset before and after."""
    import torch

    from glue_compiler.testing import capture

    torch.compiler.reset()
    yield capture
    torch.compiler.reset()


@pytest.fixture
def glue_run_pass() -> Callable[..., Any]:
    """:func:`glue_compiler.testing.run_pass`."""
    from glue_compiler.testing import run_pass

    return run_pass


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome: Any = yield
    error = call.excinfo.value if call.excinfo else None
    if difference := getattr(error, "difference", ""):
        outcome.get_result().sections.append(("glue: graph before and after", difference))
