"""Columns of benchmarks.end_to_end, and how a number is written."""

from __future__ import annotations

COLUMNS = {
    "fixed_ms": "step ms",
    "best_ms": "best",
    "worst_ms": "worst",
    "tokens_s": "tokens/s",
    "of_peak": "of peak",
    "varying_us": "varying us/token",
    "ratio": "ratio",
    "graphs": "graphs",
    "warnings": "warnings",
    "peak_gib": "GiB",
    "first_s": "first s",
    "warm_s": "warm s",
    "ready_s": "ready s",
    "hundredth_s": "100 steps s",
    "hundredth_warm_s": "warm 100 steps s",
    "loss": "last loss",
}


def cell(value: float | None) -> str:
    if value is None or value != value:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.0f}" if value >= 1000 else f"{value:.4g}"
