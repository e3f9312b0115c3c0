"""What ``plan_memory`` predicted of a step, and what was seen of it, from a dump's ``summary.json``."""

from __future__ import annotations

import json
import os
from typing import Any

GIB = 2**30


def planned(folder: str) -> dict[str, Any]:
    """Of the plan that was made last; empty where none was made.

    Predicted: ``planned ms`` and ``planned GiB``, the ``gap ms`` that is proved (see ``Plan.gap``), ``moved GiB``,
    kernels that are ``recomputed``, seconds of ``planning s``. Seen in the second and third step, where a card was
    looked at: ``seen ms`` and ``seen GiB`` of the graph alone, the least of both steps; the latter of those steps that
    were the process's highest. ``replan``: texts that say why plans were made again, or should have been.
    """
    path = os.path.join(folder, "summary.json")
    if not os.path.exists(path):
        return {}
    with open(path) as file:
        graphs = json.load(file)["graphs"]
    found = [
        (graph, p) for graph in graphs for p in graph["passes"] if p["name"] == "plan_memory" and "peak" in p["counts"]
    ]
    if not found:
        return {}
    graph, made = found[-1]
    counts = made["counts"]
    numbers: dict[str, Any] = {
        "planned ms": counts["microseconds"] / 1e3,
        "planned GiB": counts["peak"] / GIB,
        "moved GiB": counts["moved_bytes"] / GIB,
        "recomputed": counts["recomputed"],
        "planning s": made["ms"] / 1e3,
    }
    if told := [graph["replan"] for graph in graphs if graph.get("replan")]:
        numbers["replan"] = told
    if "gap_microseconds" in counts:
        numbers["gap ms"] = counts["gap_microseconds"] / 1e3
    if seen := graph.get("measured"):
        numbers["seen ms"] = min(step["microseconds"] for step in seen) / 1e3
        if exact := [step["peak"] for step in seen if step["is_exact"]]:
            numbers["seen GiB"] = min(exact) / GIB
    return numbers
