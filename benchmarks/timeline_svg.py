"""Timelines of compute and copies as one SVG: a panel for each step, a lane for each engine, one scale for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from xml.etree import ElementTree

WIDTH, LEFT, RIGHT = 1200, 130, 20
LANE, GAP, TITLE, MEMORY, HEADER, AXIS = 26, 6, 30, 46, 62, 34
FONT = "font-family:system-ui,'DejaVu Sans',sans-serif"
TEXT, MUTED, GRID = "#1f2328", "#59636e", "#d1d9e0"
# Steps of the axis that people read well, in ms.
TICKS = [step * 10**power for power in range(-3, 6) for step in (1, 2, 5)]


@dataclass(frozen=True)
class Span:
    """One bar.

    Attributes:
        start, end: ms since the step began.
        region: gives the colour; None is drawn grey.
        label: written inside, where the bar is wide enough.
        waiting: drawn as an empty dashed box.
    """

    start: float
    end: float
    region: int | None
    label: str
    waiting: bool = False


@dataclass(frozen=True)
class Panel:
    """One step.

    Attributes:
        lanes: ``(name, bars)`` from the top.
        memory: ``(ms, GiB from then on)`` of saved inputs on the device, a curve from 0 to the largest of all panels;
            may be empty.
    """

    title: str
    lanes: tuple[tuple[str, tuple[Span, ...]], ...]
    memory: tuple[tuple[float, float], ...] = ()

    @property
    def height(self) -> int:
        return TITLE + len(self.lanes) * (LANE + GAP) + (MEMORY + GAP if self.memory else 0) + GAP


def draw(title: str, subtitle: str, panels: Sequence[Panel]) -> str:
    """The text of an SVG file. Region colours and the scale are the same in every panel.

    Raises:
        ValueError: nothing to draw.
    """
    spans = [span for panel in panels for _, lane in panel.lanes for span in lane]
    longest = max((span.end for span in spans), default=0.0)
    if not longest:
        raise ValueError("a timeline needs a bar that takes time")
    colours = _Colours(max((span.region for span in spans if span.region is not None), default=0) + 1)
    most = max((gib for panel in panels for _, gib in panel.memory), default=0.0)
    scale = (WIDTH - LEFT - RIGHT) / longest
    bottom = HEADER + sum(panel.height for panel in panels)
    height = bottom + AXIS
    root = ElementTree.Element(
        "svg",
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH} {height}",
        width=str(WIDTH),
        height=str(height),
        style=FONT,
        role="img",
    )
    ElementTree.SubElement(root, "title").text = title
    _rectangle(root, 0, 0, WIDTH, height, fill="#ffffff")
    _text(root, 20, 26, title, size=17, weight="600")
    _text(root, 20, 46, subtitle, size=12, fill=MUTED)
    _draw_axis(root, longest, scale, bottom)
    top = HEADER
    for panel in panels:
        _draw_panel(root, panel, top, scale, colours, most)
        top += panel.height
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode") + "\n"


class _Colours:
    """A hue for each region, from blue over green to red, light enough for dark text."""

    def __init__(self, regions: int) -> None:
        self.regions = regions

    def of(self, region: int | None) -> str:
        if region is None:
            return "#c8ced6"
        return f"hsl({230 - 215 * region / max(1, self.regions - 1):.0f},62%,72%)"


def _draw_axis(root: ElementTree.Element, longest: float, scale: float, bottom: float) -> None:
    step = next((tick for tick in TICKS if tick * scale >= 70), TICKS[-1])
    for number in range(int(longest / step) + 1):
        x = LEFT + number * step * scale
        _line(root, x, HEADER, x, bottom, stroke=GRID)
        _text(root, x, bottom + 16, f"{number * step:g}", size=11, fill=MUTED, anchor="middle")
    _text(root, LEFT - 10, bottom + 16, "ms", size=11, fill=MUTED, anchor="end")


def _draw_panel(
    root: ElementTree.Element, panel: Panel, top: float, scale: float, colours: _Colours, most: float
) -> None:
    group = ElementTree.SubElement(root, "g")
    _line(group, 20, top + 4, WIDTH - RIGHT, top + 4, stroke=MUTED)
    # A title on the grid lines needs a background of its own.
    _rectangle(group, 20, top + 6, WIDTH - RIGHT - 20, TITLE - 8, fill="#ffffff")
    _text(group, 20, top + 21, panel.title, size=13, weight="600")
    y = top + TITLE
    for name, spans in panel.lanes:
        _text(group, LEFT - 10, y + LANE / 2 + 4, name, size=11, anchor="end")
        for span in spans:
            _draw_span(group, span, y, scale, colours)
        y += LANE + GAP
    if panel.memory:
        _text(group, LEFT - 10, y + MEMORY / 2 + 4, "saved inputs", size=11, anchor="end")
        _draw_memory(group, panel.memory, y, scale, most)


def _draw_span(group: ElementTree.Element, span: Span, y: float, scale: float, colours: _Colours) -> None:
    x, width = LEFT + span.start * scale, max(0.5, (span.end - span.start) * scale)
    look = {"fill": colours.of(span.region), "stroke": "#ffffff", "stroke-width": "0.5"}
    if span.waiting:
        look = {"fill": "none", "stroke": MUTED, "stroke-dasharray": "3 2"}
    bar = _rectangle(group, x, y, width, LANE, **look)
    ElementTree.SubElement(bar, "title").text = f"{span.label}: {span.start:.2f} to {span.end:.2f} ms"
    if width >= 7 * len(span.label) + 4:
        fill = MUTED if span.waiting else TEXT
        _text(group, x + width / 2, y + LANE / 2 + 4, span.label, size=11, anchor="middle", fill=fill)


def _draw_memory(
    group: ElementTree.Element, memory: Sequence[tuple[float, float]], y: float, scale: float, most: float
) -> None:
    def height(gib: float) -> float:
        return y + MEMORY - gib / most * (MEMORY - 12) if most else y + MEMORY

    points = [(LEFT + ms * scale, height(gib)) for ms, gib in memory]
    corners = [points[0]]
    for (_, before), (x, now) in pairwise(points):
        corners += [(x, before), (x, now)]
    outline = [(corners[0][0], y + MEMORY), *corners, (corners[-1][0], y + MEMORY)]
    ElementTree.SubElement(
        group, "polygon", points=" ".join(f"{x:.1f},{v:.1f}" for x, v in outline), fill="#b6d7f2", stroke="#3b78b0"
    )
    ms, peak = max(memory, key=lambda point: point[1])
    _text(group, LEFT + ms * scale, height(peak) - 3, f"{peak:.2f} GiB", size=11, anchor="middle", fill=MUTED)


def _rectangle(
    parent: ElementTree.Element, x: float, y: float, width: float, height: float, **look: str
) -> ElementTree.Element:
    place = {"x": f"{x:.2f}", "y": f"{y:.1f}", "width": f"{width:.2f}", "height": f"{height:.1f}"}
    return ElementTree.SubElement(parent, "rect", place | look)


def _line(parent: ElementTree.Element, x1: float, y1: float, x2: float, y2: float, *, stroke: str) -> None:
    ends = {"x1": f"{x1:.1f}", "y1": f"{y1:.1f}", "x2": f"{x2:.1f}", "y2": f"{y2:.1f}"}
    ElementTree.SubElement(parent, "line", ends | {"stroke": stroke})


def _text(
    parent: ElementTree.Element,
    x: float,
    y: float,
    content: str,
    *,
    size: int,
    anchor: str = "start",
    fill: str = TEXT,
    weight: str = "400",
) -> None:
    place = {"x": f"{x:.1f}", "y": f"{y:.1f}", "font-size": str(size), "text-anchor": anchor}
    element = ElementTree.SubElement(parent, "text", place | {"fill": fill, "font-weight": weight})
    element.text = content
