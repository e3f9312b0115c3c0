"""``python -m tests.version_reports.table``: writes what the reports say into docs/versions.md, between two marks."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

from tests.version_reports.report import Report, load_all, number

PAGE = Path(__file__).parents[2] / "docs" / "versions.md"
BEGIN, END = "<!-- begin: python -m tests.version_reports.table -->", "<!-- end -->"
OF_A_RELEASE = ("torch", "transformers")
"""What reasons of skips begin with that are about a release, and not about the machine."""


def table(reports: list[Report]) -> str:
    """Markdown: one row a run, then what fails and what is skipped because of a release."""
    if not reports:
        return "No run is on record."
    rows = [
        "| torch | transformers | test files | passed | failed | skipped | run on |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {each.torch} | {each.transformers} | {len(each.files)} | {each.passed} | {len(each.failed)} "
            f"| {each.skipped.total()} | {each.date}, Python {each.python} |"
            for each in reports
        ),
    ]
    failed: dict[str, list[Report]] = defaultdict(list)
    limits: dict[str, list[Report]] = defaultdict(list)
    for report in reports:
        for name in report.failed:
            failed[name].append(report)
        for reason in report.skipped:
            if reason.startswith(OF_A_RELEASE):
                limits[reason].append(report)
    if failed:
        rows += ["", "Fails:", "", "| test | where |", "|---|---|"]
        rows += [f"| `{name}` | {_where(found)} |" for name, found in sorted(failed.items())]
    if limits:
        rows += ["", "Does not hold, and is skipped:", "", "| what | tests | where |", "|---|---|---|"]
        for reason, found in sorted(limits.items()):
            most = max(report.skipped[reason] for report in found)
            rows.append(f"| {reason} | {most} | {_where(found)} |")
    return "\n".join(rows)


def _where(reports: list[Report]) -> str:
    """The releases, each with what it ran with."""
    beside: dict[str, list[str]] = defaultdict(list)
    for report in reports:
        beside[report.torch.partition("+")[0]].append(report.transformers)
    return "; ".join(
        f"torch {torch} with transformers {', '.join(sorted(found, key=number))}" for torch, found in beside.items()
    )


def updated(page: str, reports: list[Report]) -> str:
    """``page`` with the table between its marks; what is written by hand stays.

    Raises:
        ValueError: without the marks.
    """
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no '{BEGIN}' with an '{END}' behind it")
    return f"{head}{BEGIN}\n\n{table(reports)}\n\n{END}{tail}"


def main() -> int:
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8"), load_all()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
