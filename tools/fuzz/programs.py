"""A fuzzed program: plain data that is printed as Python, and made smaller statement by statement."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

INDENT = "    "


@dataclass(frozen=True)
class Statement:
    """One line, or the header of a block with its ``body``.

    Attributes:
        plain: a plainer line that may stand in its place, tried when a failure is made smaller.
        twist: the program is of its kind without it too.
    """

    text: str
    body: tuple[Statement, ...] = ()
    plain: str = ""
    twist: bool = False

    def lines(self, depth: int = 0) -> Iterator[str]:
        yield from (INDENT * depth + line for line in self.text.split("\n"))
        if self.text.endswith(":"):
            for child in self.body or (Statement("pass"),):
                yield from child.lines(depth + 1)


@dataclass(frozen=True)
class Call:
    """One call of the program.

    Attributes:
        how: ``"fresh"``: with new inputs, made from ``seed``; ``"refill"``: the inputs of the call before, written in
            place with what ``seed`` makes; ``"again"``: with the inputs of the call before.
        context: an expression for the context manager around the call.
    """

    how: str
    seed: int = 0
    context: str = "contextlib.nullcontext()"


@dataclass(frozen=True)
class Step:
    """What a caller does with the outputs of a call (see :func:`harness.one_call`).

    Attributes:
        in_loss: an expression of an output ``out`` and its number ``i``: is it differentiated? All are, if none is.
        takes: what is made of each output ``out``, an expression, and when: ``"called"``, ``"differentiated"`` or
            ``"stepped"``.
        update: a line that writes an input, ``value``, by its ``gradient``.
        late: all of it is read behind the next call.
    """

    in_loss: str = "True"
    takes: tuple[tuple[str, str], ...] = ()
    update: str = "pass"
    late: bool = False


@dataclass(frozen=True)
class Program:
    """A module with ``make(seed)``, which returns the inputs, ``f``, which takes them, and how to call it.

    Attributes:
        kind: what it was drawn as.
        prelude: what stands in front of ``f``: helpers, and state that it keeps.
        compiled: names of the functions that are compiled; the others stay eager.
        between: what the caller does to each output, ``out``, before it calls backward.
        written: the number of the input to which it does that instead.
        dynamic: as for ``torch.compile``.
        options: further options of glue.
        precision: of the least precise arithmetic in it.
        zero_for_none: it selects parameters by data; in a graph the gradient of one that was not selected is zero. Or
            it is several graphs, and what one returns is not all used.
        raises: a call may end in an error.
        step: what its caller does with what it returned.
        settings: expressions for context managers around a run.
        nan_may_vanish: where eager has NaN in values with these words in their label, the number is as right that the
            program gives while ``SPOILED`` is false, and any is where that is NaN too.
        twice: it is compiled twice, the second time with what the first left in the caches on disk.
    """

    kind: str
    prelude: tuple[Statement, ...]
    make: tuple[Statement, ...]
    inputs: tuple[str, ...]
    body: tuple[Statement, ...]
    outputs: tuple[str, ...]
    calls: tuple[Call, ...]
    compiled: tuple[str, ...] = ("f",)
    refill: str = "old.detach().copy_(new)"
    between: str = "pass"
    written: int | None = None
    dynamic: bool | None = None
    options: tuple[tuple[str, object], ...] = ()
    precision: str = "float64"
    zero_for_none: bool = False
    raises: bool = False
    step: Step = Step()
    settings: tuple[str, ...] = ()
    nan_may_vanish: tuple[str, ...] = ()
    twice: bool = False

    @property
    def compiler(self) -> str:
        return str(dict(self.options).get("compiler", "aot_eager"))

    def source(self) -> str:
        """The program as the text of a module."""
        names = "".join(f"{name}, " for name in self.inputs)
        given = Statement(f"def f({names.rstrip(', ')}):", (*self.body, Statement(f"return ({_tuple(self.outputs)})")))
        make = Statement("def make(seed):", (*self.make, Statement(f"return ({names})")))
        loop = Statement("for old, new in zip(inputs, make(seed)):", (Statement(self.refill),))
        refill = Statement("def refill(inputs, seed):", (loop,))
        has_gradient = " and out.requires_grad" if self.written is None else ""
        whose = "outputs" if self.written is None else f"inputs[{self.written}:{self.written + 1}]"
        asked = Statement(f"if isinstance(out, torch.Tensor){has_gradient}:", (Statement(self.between),))
        between = Statement("def between(outputs, inputs):", (Statement(f"for out in {whose}:", (asked,)),))
        in_loss = Statement("def in_loss(i, out):", (Statement(f"return {self.step.in_loss}"),))
        step = Statement("def step(value, gradient):", (Statement(self.step.update),))
        calls = ", ".join(f"({c.how!r}, {c.seed}, lambda: {c.context})" for c in self.calls)
        takes = ", ".join(f"({when!r}, lambda out: {taken})" for when, taken in self.step.takes)
        lines = [*IMPORTS, ""]
        for part in (*self.prelude, make, refill, between, given, in_loss, step):
            lines += [*part.lines(), ""]
        options = {"compiler": self.compiler, **dict(self.options)}
        lines += [
            f"CALLS = [{calls}]",
            f"TAKES, LATE = [{takes}], {self.step.late!r}",
            f"SETTINGS = [{', '.join(f'lambda: {setting}' for setting in self.settings)}]",
            f"COMPILED = {list(self.compiled)!r}",
            f"HOW = {{'dynamic': {self.dynamic!r}, 'options': {options!r}}}",
            f"PRECISION, ZERO_FOR_NONE, TWICE = {self.precision!r}, {self.zero_for_none!r}, {self.twice!r}",
            f"NAN_MAY_VANISH, SPOILED = {self.nan_may_vanish!r}, True",
        ]
        return "\n".join(lines) + "\n"


IMPORTS = (
    "import contextlib",
    "import copy",
    "import itertools",
    "import math",
    "import operator",
    "import pickle",
    "from unittest import mock",
    "",
    "import torch",
    "import torch.nn.functional as F",
    "from torch.utils.checkpoint import checkpoint",
)


def _tuple(names: Sequence[str]) -> str:
    return "".join(f"{name}, " for name in names)


def without(statements: Sequence[Statement], path: tuple[int, ...]) -> tuple[Statement, ...]:
    """``statements`` without the one at ``path`` (an index into each nested body)."""
    return _edited(statements, path, lambda _: ())


def unwrapped(statements: Sequence[Statement], path: tuple[int, ...]) -> tuple[Statement, ...]:
    """``statements`` with the body of the block at ``path`` in its place."""
    return _edited(statements, path, lambda statement: statement.body)


def made_plain(statements: Sequence[Statement], path: tuple[int, ...]) -> tuple[Statement, ...]:
    """``statements`` with the plainer line of the one at ``path``."""
    return _edited(statements, path, lambda s: (dataclasses.replace(s, text=s.plain, plain=""),))


def _edited(statements, path, edit):  # type: ignore[no-untyped-def]
    head, *rest = path
    found = statements[head]
    new = edit(found) if not rest else (dataclasses.replace(found, body=_edited(found.body, tuple(rest), edit)),)
    return (*statements[:head], *new, *statements[head + 1 :])


def paths(statements: Sequence[Statement], above: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], Statement]]:
    """Each statement with its path, the last first."""
    for index in reversed(range(len(statements))):
        path = (*above, index)
        yield path, statements[index]
        yield from paths(statements[index].body, path)
