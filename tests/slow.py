"""Parameters of which a few run in the fast suite, and all in the whole one."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but(fast: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """``values`` as parameters, those that are not among ``fast`` marked slow."""
    return [pytest.param(value, marks=() if value in fast else pytest.mark.slow) for value in values]


def one_in(number: int, values: Iterable[Any]) -> list[Any]:
    """``values`` as parameters, the first and each ``number``-th after it fast, the others marked slow."""
    return [value if place % number == 0 else _slow(value) for place, value in enumerate(values)]


def _slow(value: Any) -> Any:
    if isinstance(value, type(pytest.param())):
        return pytest.param(*value.values, marks=(*value.marks, pytest.mark.slow), id=value.id)
    return (
        pytest.param(*value, marks=pytest.mark.slow)
        if isinstance(value, tuple)
        else pytest.param(value, marks=pytest.mark.slow)
    )
