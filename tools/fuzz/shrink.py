"""Makes a program that fails smaller: statements go, blocks open, plain spellings come, as long as it fails alike."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

from tools.fuzz.programs import Call, Program, Statement, Step, made_plain, paths, unwrapped, without

PARTS = ("body", "prelude", "make")
_NAME = re.compile(r"[A-Za-z_]\w*")


def shrunk(program: Program, still_fails: Callable[[Program], bool], seconds: float) -> Program:
    """The smallest program found within ``seconds``; ``still_fails``: does a candidate fail as the first did?"""
    end = time.monotonic() + seconds
    progress = True
    while progress:
        progress = False
        for candidate in _smaller(program):
            if time.monotonic() > end:
                return program
            if candidate != program and still_fails(candidate):
                program, progress = candidate, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    """Candidates, the largest steps first."""
    if program.compiler != "aot_eager":  # cheaper, too
        options = tuple(each for each in program.options if each[0] != "compiler")
        yield dataclasses.replace(program, options=options, twice=False)
    if program.twice:
        yield dataclasses.replace(program, twice=False)
    if len(program.calls) > 1:
        yield from (dataclasses.replace(program, calls=(call,)) for call in program.calls if call.how == "fresh")
        for gone in range(len(program.calls)):
            left = program.calls[:gone] + program.calls[gone + 1 :]
            if left and left[0].how == "fresh":
                yield dataclasses.replace(program, calls=left)
    if program.between != "pass":
        yield dataclasses.replace(program, between="pass", written=None)
    if program.step != Step():
        yield dataclasses.replace(program, step=Step())
        yield dataclasses.replace(program, step=dataclasses.replace(program.step, late=False))
        yield dataclasses.replace(program, step=dataclasses.replace(program.step, update="pass"))
        yield dataclasses.replace(program, step=dataclasses.replace(program.step, in_loss="True"))
        for gone in range(len(program.step.takes)):
            takes = program.step.takes[:gone] + program.step.takes[gone + 1 :]
            yield dataclasses.replace(program, step=dataclasses.replace(program.step, takes=takes))
    for gone in range(len(program.settings)):
        yield dataclasses.replace(program, settings=program.settings[:gone] + program.settings[gone + 1 :])
    if program.dynamic is not None:
        yield dataclasses.replace(program, dynamic=None)
    plain = tuple(Call(call.how, call.seed) for call in program.calls)
    if plain != program.calls:
        yield dataclasses.replace(program, calls=plain)
    for gone in range(len(program.outputs)):
        if len(program.outputs) > 1:
            yield dataclasses.replace(program, outputs=program.outputs[:gone] + program.outputs[gone + 1 :])
    yield _needed(program)
    yield from _halves(program)
    yield from _single_edits(program)
    for name in program.inputs:
        yield dataclasses.replace(program, inputs=tuple(n for n in program.inputs if n != name))


def _needed(program: Program) -> Program:
    """Without the statements that, by the names in them, nothing that is returned can depend on."""
    needed = set(program.outputs)
    kept: list[Statement] = []
    for statement in reversed(program.body):
        names = set(_NAME.findall("\n".join(statement.lines())))
        assigned = {name.strip() for name in statement.text.partition(" = ")[0].split(",")}
        if names & needed and (not assigned.isdisjoint(needed) or " = " not in statement.text):
            kept.append(statement)
            needed |= names
    return dataclasses.replace(program, body=tuple(reversed(kept)))


def _halves(program: Program) -> Iterator[Program]:
    """All twists at once, then runs of statements."""
    body = program.body
    twists = [path for path, statement in paths(body) if statement.twist]
    if len(twists) > 1:
        kept = body
        for path in twists:
            kept = _tried(kept, path)
        yield dataclasses.replace(program, body=kept)
    for size in (len(body) // 2, len(body) // 4, 3):
        if size > 1:
            for start in range(0, len(body), size):
                yield dataclasses.replace(program, body=body[:start] + body[start + size :])


def _tried(statements, path):  # type: ignore[no-untyped-def]
    try:
        return without(statements, path)
    except IndexError:  # it went with its block
        return statements


def _single_edits(program: Program) -> Iterator[Program]:
    for part in PARTS:
        statements = getattr(program, part)
        for path, statement in paths(statements):
            yield _with(program, part, without(statements, path))
            if statement.body and part == "body":
                yield _with(program, part, unwrapped(statements, path))
            if statement.plain:
                yield _with(program, part, made_plain(statements, path))


def _with(program: Program, part: str, statements: tuple[Statement, ...]) -> Program:
    changed: dict[str, Any] = {part: statements}
    return dataclasses.replace(program, **changed)
