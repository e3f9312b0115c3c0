"""Single rewrites, counted: each has a number, and those beyond a limit are refused. ``glue bisect`` searches with it.

Source: "optimization fuel" (Whalley, Automatic Isolation of Compiler Errors, 1994).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from glue_compiler.compat import bisector

T = TypeVar("T")


@dataclass(frozen=True)
class Rewrite:
    """One single rewrite: its number, from 1, over all graphs and passes since the last reset; and what it does."""

    number: int
    what: str


@dataclass
class RewriteCounter:
    """How many single rewrites were made so far. A backend has one, and starts again at ``torch.compiler.reset()``."""

    count: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def reset(self) -> None:
        with self.lock:
            self.count = 0

    def number(self, what: str) -> Rewrite:
        """The next number, for a rewrite that is made. The caller holds the lock."""
        self.count += 1
        return Rewrite(self.count, what)

    @contextlib.contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """A graph that is captured again after an error gets the same numbers again."""
        before = self.count
        try:
            yield
        except BaseException:
            with self.lock:
                self.count = before
            raise


@dataclass
class Fuel:
    """What a pass asks before each single rewrite, in the order in which it makes them.

    Once it has said no, it says no until the end: a rewrite may build on those that were asked for before it.
    """

    counter: RewriteCounter = field(default_factory=RewriteCounter)
    limit: int | None = None
    """The number of the last rewrite that is allowed; None: all are."""
    taken: list[Rewrite] = field(default_factory=list)

    def take(self, what: str) -> bool:
        """May this rewrite be made? ``what``: a few words, such as ``"merge nonzero_1 into nonzero"``."""
        with self.counter.lock:
            if self.limit is not None and self.counter.count >= self.limit:
                return False
            if bisector.disables(bisector.REWRITES, what):
                # Torch's bisector counts its refusals too, so a later one must not be allowed because of them.
                self.limit = self.counter.count
                return False
            self.taken.append(self.counter.number(what))
            return True

    def allowed(self, planned: Iterable[tuple[str, T]]) -> tuple[T, ...]:
        """The rewrites of a plan that may be made: all up to the first refusal. Each comes with what it does."""
        found = []
        for what, rewrite in planned:
            if not self.take(what):
                break
            found.append(rewrite)
        return tuple(found)

    def give_back(self) -> None:
        """What was taken was not done after all: its numbers go to the next rewrites."""
        with self.counter.lock:
            self.counter.count -= len(self.taken)
        self.taken.clear()
