"""Writes what runs of benchmarks.end_to_end measured as a page, and one plot of it.

    python -m benchmarks.end_to_end --rows qwen3-bf16 --variants glue,inductor,flex --json build/qwen3.json
    python -m benchmarks.end_to_end_page build/*.json --page docs/end_to_end.md --svg docs/end_to_end.svg

Times of different runs are not compared: each run has tables of its own, with its command. The first table and the plot
have, of each row, the last of the given files that has glue and a peer beside it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.end_to_end_table import COLUMNS, cell

INTRODUCTION = """# End to end

Whole training steps of unmodified models from configurations, random weights: forward, loss, backward, clipping, AdamW,
one row of packed documents that differ each step. `python -m benchmarks.end_to_end --help` says what rows, variants and
columns are. This page is written by `python -m benchmarks.end_to_end_page`; compare numbers of one run only. Best and
worst are far apart where the host was busy, with Python of the step itself or with what was left of other compiles.
[Each rewrite alone](rewrites_alone.md) has a page of its own.
"""
WIDTH, NAME, BAR, GAP = 820, 190, 16, 22
OWN, OTHERS = "#2a6f97", "#b8bdc6"


@dataclass(frozen=True)
class Run:
    """One file: when, on what and how it was made, with which packages; for each row a result for each variant, as far
    as there is one."""

    date: str
    device: str
    torch: str
    command: str
    results: tuple[dict[str, Any], ...]
    packages: tuple[tuple[str, str], ...] = ()

    @classmethod
    def read(cls, path: Path) -> Run:
        found = json.loads(path.read_text())
        packages = tuple(found.get("packages", {}).items())
        return cls(found["date"], found["device"], found["torch"], found["command"], tuple(found["results"]), packages)

    @property
    def rows(self) -> list[str]:
        return list(dict.fromkeys(result["row"] for result in self.results))

    def of(self, row: str) -> list[dict[str, Any]]:
        return [result for result in self.results if result["row"] == row]


def page(runs: Sequence[Run]) -> str:
    """Each row in the last run that has glue and a peer beside it, then all runs, the last one first."""
    parts = [INTRODUCTION, *_summary(runs), ""]
    for run in reversed(runs):
        made_with = ", ".join([f"torch {run.torch}", *(f"{name} {version}" for name, version in run.packages)])
        parts += [f"`{run.command}`\n", f"{run.device}, {made_with}, {run.date}.\n"]
        for row in run.rows:
            parts += [f"## {row}\n", *_table(run.of(row)), ""]
    return "\n".join(parts)


def _summary(runs: Sequence[Run]) -> list[str]:
    lines = [
        "| row | glue: ms, GiB | fastest other | us/token, lengths that vary | least memory of others | run of |",
        "|---|---|---|---|---|---|",
    ]
    for row, (run, measured) in _compared(runs).items():
        own = next(result for result in measured if result["variant"] == "glue")
        others = [result for result in measured if not _is_own(result["variant"])]
        fastest = min(others, key=lambda result: float(result["fixed_ms"]))
        least = min(others, key=lambda result: float(result["peak_gib"]))
        varying = [cell(each.get("varying_us")) for each in (own, fastest)]
        cells = [
            row,
            f"**{cell(own['fixed_ms'])}**, {cell(own['peak_gib'])}",
            f"{fastest['variant']} {cell(fastest['fixed_ms'])}, {cell(fastest['peak_gib'])}",
            " for ".join(varying) if all(varying) else "",
            f"{least['variant']} {cell(least['peak_gib'])}",
            run.date,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _table(results: Sequence[dict[str, Any]]) -> list[str]:
    names = [name for name in COLUMNS if any(cell(result.get(name)) for result in results)] or ["fixed_ms"]
    lines = [f"| | {' | '.join(COLUMNS[name] for name in names)} |", f"|---|{'---|' * len(names)}"]
    for result in results:
        cells = [cell(result.get(name)) for name in names]
        if "failed" in result:
            cells = [str(result["failed"]).replace("|", "/").replace("\n", " "), *[""] * (len(names) - 1)]
        lines.append(f"| {result['variant']} | {' | '.join(cells)} |")
    return lines


def plot(runs: Sequence[Run]) -> str:
    """Milliseconds of a step as bars, each row on a scale of its own."""
    lines: list[str] = []
    down = 40
    for row, (_, results) in _compared(runs).items():
        slowest = max(result["fixed_ms"] for result in results)
        lines.append(f'<text x="10" y="{down + 12}" font-weight="bold">{escape(row)}</text>')
        for result in sorted(results, key=lambda result: float(result["fixed_ms"])):
            down += GAP
            long = result["fixed_ms"] / slowest * (WIDTH - NAME - 170)
            color = OWN if _is_own(result["variant"]) else OTHERS
            label = f"{result['fixed_ms']:.1f} ms, {result['peak_gib']:.1f} GiB"
            lines += [
                f'<text x="{NAME - 8}" y="{down + 12}" text-anchor="end">{escape(result["variant"])}</text>',
                f'<rect x="{NAME}" y="{down}" width="{long:.1f}" height="{BAR}" fill="{color}"/>',
                f'<text x="{NAME + long + 6:.1f}" y="{down + 12}">{label}</text>',
            ]
        down += 2 * GAP
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {down}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{down}" fill="white"/>',
        '<text x="10" y="22" font-size="15">A training step of unmodified models, packed documents</text>',
    ]
    return "\n".join([*head, *lines, "</svg>"]) + "\n"


def _is_own(variant: str) -> bool:
    return variant.startswith(("glue", "plan"))


def _compared(runs: Sequence[Run]) -> dict[str, tuple[Run, list[dict[str, Any]]]]:
    found: dict[str, tuple[Run, list[dict[str, Any]]]] = {}
    for run in runs:
        for row in run.rows:
            measured = [result for result in run.of(row) if "fixed_ms" in result]
            variants = [result["variant"] for result in measured]
            if "glue" in variants and not all(map(_is_own, variants)):
                found[row] = run, measured
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--svg", type=Path)
    arguments = parser.parse_args()
    runs = [Run.read(path) for path in arguments.files]
    if arguments.page:
        arguments.page.write_text(page(runs))
    if arguments.svg:
        arguments.svg.write_text(plot(runs))


if __name__ == "__main__":
    main()
