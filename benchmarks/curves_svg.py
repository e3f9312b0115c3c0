"""Curves over steps, as one SVG file."""

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
    """Curves of one scale; on a ``logarithmic`` one zeros are not drawn."""

    name: str
    curves: Sequence[Curve]
    logarithmic: bool = False

    def scaled(self, value: float) -> float | None:
        if not self.logarithmic:
            return value
        return math.log10(value) if value > 0 else None


def draw(title: str, steps: str, panels: Sequence[Panel]) -> str:
    """The panels below each other."""
    height = TOP + len(panels) * (HEIGHT + GAP)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(LEFT, 20, title),
    ]
    for number, panel in enumerate(panels):
        lines += _panel(panel, steps, TOP + number * (HEIGHT + GAP))
    return "\n".join([*lines, "</svg>", ""])


def _panel(panel: Panel, steps: str, top: int) -> list[str]:
    scaled = [[panel.scaled(value) for value in curve.values] for curve in panel.curves]
    known = [value for values in scaled for value in values if value is not None] or [0.0]
    low, high = min(known), max(known)
    high = high if high > low else low + 1
    longest = max(len(values) for values in scaled)
    right = WIDTH - 20

    def x(step: float) -> float:
        return LEFT + (right - LEFT) * step / max(longest - 1, 1)

    def y(value: float) -> float:
        return top + HEIGHT * (high - value) / (high - low)

    lines = [f'<rect x="{LEFT}" y="{top}" width="{right - LEFT}" height="{HEIGHT}" fill="none" stroke="#c4c8ce"/>']
    for tick in range(TICKS + 1):
        value = low + (high - low) * tick / TICKS
        shown = f"{10**value:.0e}" if panel.logarithmic else f"{value:.2f}"
        lines.append(_text(LEFT - 6, y(value) + 4, shown, anchor="end"))
        step = round((longest - 1) * tick / TICKS)
        lines.append(_text(x(step), top + HEIGHT + 16, str(step + 1), anchor="middle"))
    lines.append(_text((LEFT + right) / 2, top + HEIGHT + 32, steps, anchor="middle"))
    lines.append(_text(LEFT + 8, top + 16, panel.name))
    for number, (curve, values) in enumerate(zip(panel.curves, scaled, strict=True)):
        color = COLORS[number % len(COLORS)]
        points = " ".join(f"{x(i):.1f},{y(value):.1f}" for i, value in enumerate(values) if value is not None)
        lines.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        lines.append(_text(right - 8, top + 16 + 16 * number, curve.name, color, "end"))
    return lines


def _text(x: float, y: float, text: str, color: str = "#30343a", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" text-anchor="{anchor}">{escape(text)}</text>'
