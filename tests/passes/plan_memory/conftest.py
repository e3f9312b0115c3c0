"""What is planned in a test."""

from __future__ import annotations

import pytest

from glue_compiler.passes import plan_memory


@pytest.fixture
def steps_read(monkeypatch):
    """Each step that is planned in a test, with its nodes."""
    found = []
    own = plan_memory.read_step
    monkeypatch.setattr(plan_memory, "read_step", lambda *given: found.append(own(*given)) or found[-1])
    return found
