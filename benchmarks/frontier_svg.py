"""Named dots over two axes, as one SVG file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 760, 420, 70, 40, 60, 50
TICKS = 5
OWN, OTHERS = "#2a6f97", "#8a8f98"


@dataclass(frozen=True)
class Dot:
    name: str
    x: float
    y: float

    @property
    def is_plan(self) -> bool:
        return self.name.startswith("plan")


def draw(title: str, x_name: str, y_name: str, dots: Sequence[Dot]) -> str:
    """Dots of plans are joined by a line, in the order of ``x``."""
    xs, ys = _range([dot.x for dot in dots]), _range([dot.y for dot in dots])

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - xs[0]) / (xs[1] - xs[0]) * (WIDTH - LEFT - RIGHT)
        down = HEIGHT - BOTTOM - (y - ys[0]) / (ys[1] - ys[0]) * (HEIGHT - TOP - BOTTOM)
        return round(across, 1), round(down, 1)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="15">{escape(title)}</text>',
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 12}" text-anchor="middle">{escape(x_name)}</text>',
        f'<text x="{LEFT}" y="{TOP - 4}" text-anchor="end">{escape(y_name)}</text>',
    ]
    for tick in range(TICKS + 1):
        x, y = (low + tick / TICKS * (high - low) for low, high in (xs, ys))
        across, down = place(x, y)
        lines += [
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{down}" y2="{down}" stroke="#e3e5e8"/>',
            f'<text x="{LEFT - 8}" y="{down + 4}" text-anchor="end">{y:.0f}</text>',
            f'<text x="{across}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{x:.1f}</text>',
        ]
    plans = sorted((dot for dot in dots if dot.is_plan), key=lambda dot: dot.x)
    points = " ".join(f"{x},{y}" for x, y in (place(dot.x, dot.y) for dot in plans))
    lines.append(f'<polyline points="{points}" fill="none" stroke="{OWN}" stroke-width="1.5"/>')
    for dot in dots:
        x, y = place(dot.x, dot.y)
        lines += [
            f'<circle cx="{x}" cy="{y}" r="4.5" fill="{OWN if dot.is_plan else OTHERS}"/>',
            f'<text x="{x + 8}" y="{y - 6}">{escape(dot.name)}</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values, default=0.0), max(values, default=1.0)
    margin = 0.08 * (high - low) or 1.0
    return low - margin, high + margin
