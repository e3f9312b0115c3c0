"""What ``plan_memory`` predicted of a step, from a dump's ``summary.json``."""

from __future__ import annotations

import json
import os
from typing import Any

GIB = 2**30


def planned(folder: str) -> dict[str, Any]:
    """Of the plan that was made last; empty where none was made.

    Predicted: ``planned ms`` and ``planned GiB``, ``moved GiB``, kernels that are ``recomputed``, seconds of
    ``planning s``. ``replan``: texts that say why plans were made again, or should have been.
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
    _, made = found[-1]
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
    return numbers
