"""Parameters of which a few run in the fast suite, and all in the whole one."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but(fast: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """``values`` as parameters, those that are not among ``fast`` marked slow."""
    return [pytest.param(value, marks=() if value in fast else pytest.mark.slow) for value in values]
