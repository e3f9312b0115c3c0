"""Draws statements: random choices, fresh names, the values that are there at a place, and blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from tools.fuzz.programs import Statement

T = TypeVar("T")


@dataclass
class Value:
    """A tensor that statements may use. ``dtype`` is ``"float"``, ``"int"`` or ``"bool"``.

    ``is_leaf``: an input that needs a gradient, so no statement may write it.
    """

    name: str
    dtype: str
    dims: int
    is_leaf: bool = False


@dataclass(frozen=True)
class Drawn:
    """What a kind of program says besides its statements (see :class:`programs.Program`)."""

    make: tuple[Statement, ...]
    inputs: tuple[str, ...]
    compiled: tuple[str, ...] = ("f",)
    zero_for_none: bool = False
    options: tuple[tuple[str, object], ...] = ()


class Draw:
    """What a generator of programs writes with."""

    def __init__(self, random: Random, device: str = "cpu", *, twists: float = 0.1) -> None:
        self.random = random
        self.device = device
        self.twists = twists
        """How likely a statement is followed by a twist."""
        self.oddness = 0.35
        """How likely a choice that has a usual answer gets another one."""
        self.twist: Callable[[Draw], None] | None = None
        self.values: list[Value] = []
        self.prelude: dict[str, Statement] = {}
        """Helpers that statements ask for, by name."""
        self.outputs: list[str] = []
        self.grows = False
        self.one_graph = False
        """Nothing that ends a captured graph."""
        self.precision = "float64"
        self.small = False
        """Compiled by Inductor, which takes long."""
        self.late = 0.5
        """How likely a caller differentiates losses alone and reads the rest later."""
        self.settings: list[str] = []
        """Expressions for context managers around the whole run."""
        self.nan_may_vanish: tuple[str, ...] = ()
        self.spoils: list[tuple[Statement, tuple[str, ...]]] = []
        self.uses_state = False
        self._lines: list[list[Statement]] = [[]]
        self._count = 0
        self._twisting = False

    @property
    def generator(self) -> Statement:
        """Makes ``g``, which inputs are drawn with."""
        device = f"device={self.device!r}" if self.device != "cpu" else ""
        return Statement(f"g = torch.Generator({device}).manual_seed(seed)")

    def size(self, name: str, constant: str) -> Statement:
        """Makes a size, which is another one for each seed if the inputs grow."""
        return Statement(f"{name} = {constant} + 2 * seed" if self.grows else f"{name} = {constant}")

    @property
    def at(self) -> str:
        """``, device=...`` for a call that makes a tensor."""
        return "" if self.device == "cpu" else f", device={self.device!r}"

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def pick(self, *options: T) -> T:
        return self.random.choice(options)

    def mostly(self, usual: T, *others: T, share: float | None = None) -> T:
        """``usual`` in that share of all draws; by default as the program's oddness says."""
        odd = self.chance(self.oddness if share is None else 1 - share)
        return self.pick(*others) if odd and others else usual

    def integer(self, low: int, high: int) -> int:
        return self.random.randint(low, high)

    def name(self, prefix: str) -> str:
        self._count += 1
        return f"{prefix}{self._count}"

    def emit(self, text: str, plain: str = "", *, twist: bool = False) -> None:
        self.add(Statement(text, plain=plain, twist=twist or self._twisting))

    def add(self, statement: Statement) -> None:
        """One that is drawn."""
        self._lines[-1].append(statement)

    def let(self, prefix: str, expression: str, dtype: str, dims: int, plain: str = "") -> str:
        """``name = expression``, and maybe a twist behind it."""
        name = self.name(prefix)
        self.emit(f"{name} = {expression}", plain=f"{name} = {plain}" if plain else "")
        self.values.append(Value(name, dtype, dims))
        self.maybe_twist()
        return name

    def maybe_twist(self) -> None:
        if self.twist is not None and not self._twisting and self.chance(self.twists):
            self._twisting = True
            try:
                self.twist(self)
            finally:
                self._twisting = False

    @contextmanager
    def block(self, header: str, *, twist: bool = False) -> Iterator[None]:
        """Statements inside of ``header``; the values made there are not offered to statements behind it."""
        known = len(self.values)
        self._lines.append([])
        yield
        body = tuple(self._lines.pop())
        self._lines[-1].append(Statement(header, body, twist=twist or self._twisting))
        del self.values[known:]

    @contextmanager
    def maybe_inside(self, probability: float, *headers: str) -> Iterator[None]:
        """A block with one of ``headers``, or none; its values stay known, since Python's blocks are no scopes."""
        if not self.chance(probability):
            yield
            return
        self._lines.append([])
        yield
        body = tuple(self._lines.pop())
        self._lines[-1].append(Statement(self.pick(*headers), body, twist=True))

    def need(self, name: str, text: str) -> str:
        """A helper in front of the program, once; gives its name."""
        self.prelude.setdefault(name, Statement(text.strip("\n")))
        return name

    def inner(self, twists: float | None = None) -> Draw:
        """Writes a function in front of the program, which has helpers and settings in common with it."""
        found = Draw(self.random, self.device, twists=self.twists if twists is None else twists)
        found.twist, found.oddness, found.precision = self.twist, self.oddness, self.precision
        found.prelude, found.settings = self.prelude, self.settings
        return found

    def spoil(self, line: str, *nan_may_vanish: str, is_unread: bool = False) -> None:
        """A line that may follow those which make the inputs; see :class:`programs.Program` for ``nan_may_vanish``.

        ``is_unread``: NaN vanishes where what the line writes is not read, and for no other reason.
        """
        statement = Statement("if SPOILED:", (Statement(line),)) if is_unread else Statement(line)
        self.spoils.append((statement, nan_may_vanish))

    def set(self, setting: str) -> None:
        """Once."""
        if setting not in self.settings:
            self.settings.append(setting)

    def statements(self) -> tuple[Statement, ...]:
        assert len(self._lines) == 1
        return tuple(self._lines[0])
