"""Programs of a few lines."""

from __future__ import annotations

from typing import Any

from tools.fuzz.programs import Call, Program, Statement

WRONG = "tests.verify.wrong_passes:RenameFunctions"
"""Writes ``sin`` as ``cos``."""


def program(*lines: Any, outputs=("y",), prelude=(), **further: Any) -> Program:
    """``lines`` compute ``outputs`` of ``x``, ``[4]``."""
    given = {
        "make": (Statement("x = torch.arange(1.0, 5.0, dtype=FLOAT).add(seed).requires_grad_()"),),
        "inputs": ("x",),
        "calls": (Call("fresh", 1), Call("fresh", 2)),
        **further,
    }
    return Program(
        kind="test",
        prelude=(Statement("FLOAT = torch.float64"), *map(Statement, prelude)),
        body=tuple(line if isinstance(line, Statement) else Statement(line) for line in lines),
        outputs=outputs,
        **given,
    )
