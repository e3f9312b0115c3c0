"""Curves over steps, or over any other numbers, as one SVG file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, LEFT, TOP, GAP = 760, 220, 70, 40, 46
COLORS = ("#8a8f98", "#d1495b", "#2a6f97", "#3a7d44")
TICKS = 4


@dataclass(frozen=True)
class Curve:
    name: str
    values: Sequence[float]


@dataclass(frozen=True)
class Panel:
    """Curves of one scale, which begins at ``least``, or at their least value.

    What is nan is not drawn, and what is zero is not on a ``logarithmic`` scale.
    """

    name: str
    curves: Sequence[Curve]
    logarithmic: bool = False
    least: float | None = None

    def scaled(self, value: float) -> float | None:
        if math.isnan(value):
            return None
        if not self.logarithmic:
            return value
        return math.log10(value) if value > 0 else None


def draw(title: str, steps: str, panels: Sequence[Panel], places: Sequence[float] = ()) -> str:
    """The panels below each other. ``places``: where along the axis the values are; by default steps from 1 on."""
    height = TOP + len(panels) * (HEIGHT + GAP)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(LEFT, 20, title),
    ]
    for number, panel in enumerate(panels):
        lines += _panel(panel, steps, TOP + number * (HEIGHT + GAP), places)
    return "\n".join([*lines, "</svg>", ""])


def _panel(panel: Panel, steps: str, top: int, places: Sequence[float]) -> list[str]:
    scaled = [[panel.scaled(value) for value in curve.values] for curve in panel.curves]
    known = [value for values in scaled for value in values if value is not None] or [0.0]
    low, high = min(known) if panel.least is None else panel.least, max(known)
    high = high if high > low else low + 1
    longest = max(len(values) for values in scaled)
    where = places or range(1, longest + 1)
    ticks = places or [round((longest - 1) * tick / TICKS) + 1 for tick in range(TICKS + 1)]
    right = WIDTH - 20

    def x(place: float) -> float:
        return LEFT + (right - LEFT) * (place - where[0]) / max(where[-1] - where[0], 1)

    def y(value: float) -> float:
        return top + HEIGHT * (high - value) / (high - low)

    lines = [f'<rect x="{LEFT}" y="{top}" width="{right - LEFT}" height="{HEIGHT}" fill="none" stroke="#c4c8ce"/>']
    for tick in range(TICKS + 1):
        value = low + (high - low) * tick / TICKS
        shown = f"{10**value:.0e}" if panel.logarithmic else f"{value:.2f}"
        lines.append(_text(LEFT - 6, y(value) + 4, shown, anchor="end"))
    lines += [_text(x(place), top + HEIGHT + 16, str(place), anchor="middle") for place in ticks]
    lines.append(_text((LEFT + right) / 2, top + HEIGHT + 32, steps, anchor="middle"))
    lines.append(_text(LEFT + 8, top + 16, panel.name))
    # The names stand where the curves are not.
    rises = sum(values[-1] or 0.0 for values in scaled if values) > sum(values[0] or 0.0 for values in scaled if values)
    for number, (curve, values) in enumerate(zip(panel.curves, scaled, strict=True)):
        color = COLORS[number % len(COLORS)]
        points = " ".join(f"{x(i):.1f},{y(v):.1f}" for i, v in zip(where, values, strict=False) if v is not None)
        lines.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        side, down, anchor = (LEFT + 8, 32, "start") if rises else (right - 8, 16, "end")
        lines.append(_text(side, top + down + 16 * number, curve.name, color, anchor))
    return lines


def _text(x: float, y: float, text: str, color: str = "#30343a", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" text-anchor="{anchor}">{escape(text)}</text>'
