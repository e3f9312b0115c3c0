"""Functions that cannot be traced with data-dependent values, so that they are not tried again.

Where a conversion fails deep inside of what it inlines, Dynamo breaks the graph at the outermost call, and converts
what that calls as a frame of its own, what this calls, and so on: each would be traced up to the very same failure. So
a function that was being traced then is converted without data-dependent values from the start. So is what goes on in
it behind a break, if the call that fails is still to come; in the innermost function the values are known by then. Only
failures of tracing are kept: they are the program's, and not of one call's sizes or of a compiler.
"""

from __future__ import annotations

from glue_compiler.compat import dynamo, frame_places


class KnownFailures:
    """Of one process."""

    def __init__(self) -> None:
        self._failures: dict[frame_places.Place, tuple[int, str | None]] = {}
        """The line of the call that fails, 0 in the innermost function, and why."""

    def note(self, error: Exception, reason: str) -> None:
        places = frame_places.places_in(error)
        if dynamo.is_soft_failure(error):  # the graph breaks in what is inlined, and it is the outermost that must not
            places = places[:1]
        for i, (place, line) in enumerate(places):
            self._failures[place] = line if i < len(places) - 1 else 0, reason

    def of(self, frame: object) -> str | None:
        """Why a frame that is about to be converted would fail; None if that is not known."""
        found = frame_places.place_of(frame) if self._failures else None
        if found is None:
            return None
        place, goes_on_at = found
        line, reason = self._failures.get(place, (0, None))
        return reason if goes_on_at is None or goes_on_at < line else None

    def clear(self) -> None:
        self._failures.clear()
