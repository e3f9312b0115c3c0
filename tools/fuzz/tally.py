"""What a run is asked for, what it counts, and where its failures go."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tools.fuzz.failures import Failure
from tools.fuzz.kinds import KINDS


@dataclass(frozen=True)
class Settings:
    """How a run goes on.

    Attributes:
        seconds, count: it ends after so long, or so many programs. first: the number of the one that it begins with.
        kinds: what is drawn.
        only: the pass that runs on graphs.
        shrink_seconds: for one failure.
        keep: folder for the scripts of failures.
    """

    seed: int
    seconds: float = 60.0
    count: int | None = None
    first: int = 0
    kinds: tuple[str, ...] = tuple(KINDS)
    device: str = "cpu"
    only: str | None = None
    shrink_seconds: float = 30.0
    keep: Path | None = None

    def is_over(self, start: float, ran: int) -> bool:
        return time.monotonic() - start >= self.seconds or (self.count is not None and ran >= self.count)


WHAT = ("drawn", "rewritten", "refused", "failed")


@dataclass
class Tally:
    """What a run did.

    Attributes:
        ran: programs (or graphs) checked; ``rewritten``: those of them that some pass changed.
        refused: drawn, and wrong in eager code already.
        torchs_own: plain ``aot_eager`` gives the same wrong results.
        fired: pass → programs that it rewrote; ``left_alone``: that it looked at and left as they were.
        repeats: failures that were not looked at closer, since their like was found before.
        of_kind: what became of a program and its kind → how many.
        inductor: programs that Inductor compiled; ``warm``: graphs that it took from caches on disk.
        unread: values that a caller came too late for, as is documented.
    """

    level: str
    ran: int = 0
    rewritten: int = 0
    refused: int = 0
    torchs_own: int = 0
    repeats: int = 0
    inductor: int = 0
    warm: int = 0
    unread: int = 0
    seconds: float = 0.0
    fired: Counter[str] = field(default_factory=Counter)
    rewrites: Counter[str] = field(default_factory=Counter)
    left_alone: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    of_kind: Counter[tuple[str, str]] = field(default_factory=Counter)

    def refuse(self, kind: str) -> None:
        self.refused += 1
        self.of_kind["refused", kind] += 1

    def count(self, kind: str, fired: dict[str, int], looked_at: set[str]) -> None:
        """One more program: pass → rewrites, and the passes that gave a reason to leave something."""
        self.ran += 1
        self.rewritten += bool(fired)
        self.of_kind["rewritten", kind] += bool(fired)
        self.fired.update(fired.keys())
        self.rewrites.update(fired)
        self.left_alone.update(looked_at - fired.keys())

    def add(self, other: Tally) -> None:
        for name in ("ran", "rewritten", "refused", "torchs_own", "repeats", "inductor", "warm", "unread"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.seconds = max(self.seconds, other.seconds)
        self.fired += other.fired
        self.rewrites += other.rewrites
        self.left_alone += other.left_alone
        self.failures += other.failures
        self.of_kind += other.of_kind

    def lines(self) -> list[str]:
        """As text."""
        each = self.seconds / max(1, self.ran)
        share = 100 * self.rewritten / max(1, self.ran)
        found = [
            f"{self.level}: {self.ran} in {self.seconds:.0f} s ({each:.3f} s each), {share:.0f}% rewritten; refused by "
            f"eager {self.refused}, wrong without glue too {self.torchs_own}, failed {len(self.failures)} (and "
            f"{self.repeats} like them); by Inductor {self.inductor}, graphs from warm caches {self.warm}; values "
            f"asked for too late {self.unread}"
        ]
        for kind in sorted({kind for _, kind in self.of_kind}):
            counts = ", ".join(f"{what} {self.of_kind[what, kind]}" for what in WHAT)
            found.append(f"  {kind}: {counts}")
        found += [
            f"  {name}: rewrote {self.fired[name]} ({self.rewrites[name]} rewrites), left {self.left_alone[name]} alone"
            for name in sorted(self.fired.keys() | self.left_alone.keys())
        ]
        found += [f"  FAILED {each.origin}: {each.cause}: {each.wrong[0][:200]}" for each in self.failures]
        return found


class Reporter:
    """Says what failed, once for each cause, and writes the scripts."""

    def __init__(self, say: Callable[[str], None], keep: Path | None, limit: int = 2) -> None:
        self.say, self._keep, self._limit = say, keep, limit
        self._seen: Counter[str] = Counter()
        self.on_progress: Callable[[int, Tally], None] = lambda number, tally: None
        """Called before program (or template) ``number`` is drawn, with what was done before."""

    def is_new(self, kind: str) -> bool:
        """Is a failure of this kind worth a closer look? So many are."""
        self._seen[kind] += 1
        return self._seen[kind] <= self._limit

    def add(self, failure: Failure | None, tally: Tally) -> None:
        """None: it was torch's own."""
        if failure is None:
            tally.torchs_own += 1
            return
        self._seen[failure.cause] += 1
        if self._seen[failure.cause] > self._limit:
            tally.repeats += 1
            return
        tally.failures.append(failure)
        self.say(f"--- {failure.cause}\n{failure.script.partition('# From here on')[0]}")
        if self._keep is not None:
            self._keep.mkdir(parents=True, exist_ok=True)
            name = "".join(c if c.isalnum() else "_" for c in f"{failure.owner}_{failure.origin}")
            (self._keep / f"{name}.py").write_text(failure.script, encoding="utf-8")
