"""Which pieces of a graph are alike, and are to be compiled once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import fx

from glue_compiler.passes.share_layers.borders import CALL, Span, spans_between_borders
from glue_compiler.passes.share_layers.pieces import Piece, piece_of
from glue_compiler.passes.share_layers.steps import Steps, UnknownStep, read_steps

WORTH = 100
"""Fewer steps that need not be compiled again are not worth a body."""


@dataclass(frozen=True)
class SharedBody:
    """Pieces that are alike, in order."""

    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        return len(self.pieces[0].nodes)

    @property
    def saved(self) -> int:
        """Steps that are not compiled, less what the calls cost."""
        return (len(self.pieces) - 1) * self.size - CALL * len(self.pieces)


@dataclass(frozen=True)
class SharePlan:
    """``bodies`` to be made. ``reasons``: why steps that come again and again are not shared."""

    bodies: tuple[SharedBody, ...]
    reasons: tuple[str, ...] = ()


def plan_sharing(graph: fx.Graph, *, random_numbers: bool) -> SharePlan:
    """Reads only."""
    steps = read_steps(graph, random_numbers=random_numbers)
    row = _Row(steps, spans_between_borders(steps))
    row.grow()
    row.join()
    found = sorted(row.bodies(), key=lambda body: -body.saved)
    bodies = tuple(body for body in found if body.saved > 0)
    if sum(body.saved for body in bodies) < WORTH:
        return SharePlan((), tuple(row.reasons))
    return SharePlan(bodies, tuple(row.reasons))


class _Row:
    """The spans of a graph, in order, each with the kind of its piece; a kind of its own where no body can hold it."""

    def __init__(self, steps: Steps, spans: Sequence[Span]) -> None:
        self.steps = steps
        self.pieces: dict[Span, Piece | None] = {}
        self.reasons: dict[str, None] = {}
        self.spans = list(spans)
        self.numbers: dict[Hashable, int] = {}
        self.known: dict[Span, int] = {}

    def piece(self, span: Span) -> Piece | None:
        if span not in self.pieces:
            try:
                self.pieces[span] = piece_of(self.steps, span)
            except UnknownStep as reason:
                self.pieces[span] = None
                if str(reason):
                    self.reasons[str(reason)] = None
        return self.pieces[span]

    def kind(self, span: Span) -> int:
        if span not in self.known:  # kinds are long, and hashed each time
            piece = self.piece(span)
            self.known[span] = self.numbers.setdefault(piece.kind if piece is not None else span, len(self.numbers))
        return self.known[span]

    def kinds(self) -> list[int]:
        return [self.kind(span) for span in self.spans]

    def grow(self) -> None:
        """Find further pieces of a known kind beside those that are known, in what no border was seen in.

        In the first layer, what all layers share is young still, and hides its borders.
        """
        times = Counter(self.kinds())
        shapes = {}
        for span in self.spans:
            if times[self.kind(span)] > 1 and self.piece(span) is not None:
                shapes[self.steps.local[slice(*span)]] = self.kind(span)
        shapes = dict(sorted(shapes.items(), key=lambda each: -len(each[0])))  # the longest first
        found: list[Span] = []
        for span in self.spans:
            if times[self.kind(span)] > 1:
                found.append(span)
            else:
                found += self._split(span, shapes)
        self.spans = found

    def _split(self, span: Span, shapes: dict[tuple[int, ...], int]) -> list[Span]:
        """Pieces of known ``shapes`` at its end and at its start, the longest first, and the rest between them."""
        first, last = span
        before: list[Span] = []
        after: list[Span] = []
        while inner := self._piece_at(first, last, shapes, at_end=True):
            after.append(inner)
            last = inner[0]
        while inner := self._piece_at(first, last, shapes, at_end=False):
            before.append(inner)
            first = inner[1]
        rest = [(first, last)] if first < last else []
        return [*before, *rest, *reversed(after)]

    def _piece_at(self, first: int, last: int, shapes: dict[tuple[int, ...], int], *, at_end: bool) -> Span | None:
        for shape, kind in shapes.items():
            start = last - len(shape) if at_end else first
            inner = (start, start + len(shape))
            fits = first <= start and inner[1] <= last and self.steps.local[slice(*inner)] == shape
            if fits and self.kind(inner) == kind:
                return inner
        return None

    def join(self) -> None:
        """Join neighbours that come together again and again: fewer calls, and more that can be fused."""
        while pairs := self._pairs_to_join():
            joined: list[Span] = []
            for span, kind in zip(self.spans, self.kinds(), strict=True):
                if joined and (self.kind(joined[-1]), kind) in pairs and joined[-1][1] == span[0]:
                    joined[-1] = (joined[-1][0], span[1])
                else:
                    joined.append(span)
            if len(joined) == len(self.spans):
                return
            self.spans = joined

    def _pairs_to_join(self) -> set[tuple[int, int]]:
        kinds = self.kinds()
        size = {kind: span[1] - span[0] for kind, span in zip(kinds, self.spans, strict=True)}
        times, pairs = Counter(kinds), Counter(pairwise(kinds))
        best: dict[tuple[int, int], float] = {}
        for (one, other), together in pairs.items():
            if one == other or together < 2:
                continue
            # What stays alone of either is compiled beside the two.
            alone = sum(size[kind] for kind in (one, other) if times[kind] > together)
            if alone <= CALL * together:
                best[one, other] = together * CALL - alone
        chosen: set[tuple[int, int]] = set()
        taken: set[int] = set()
        for pair in sorted(best, key=lambda pair: -best[pair]):
            if not taken & set(pair):
                chosen.add(pair)
                taken |= set(pair)
        return chosen

    def bodies(self) -> list[SharedBody]:
        groups: dict[int, list[Piece]] = defaultdict(list)
        for span, kind in zip(self.spans, self.kinds(), strict=True):
            if (piece := self.piece(span)) is not None:
                groups[kind].append(piece)
        return [SharedBody(tuple(pieces)) for pieces in groups.values() if len(pieces) > 1]
