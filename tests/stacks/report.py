"""The summary of a dump folder, as tests ask about it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Report:
    """What glue did so far in the processes that dump to ``folder``."""

    folder: Path

    @property
    def graphs(self) -> list[dict[str, Any]]:
        """Of each compiled graph what ``summary.json`` says, in order."""
        return [graph for summary in self._summaries() for graph in summary["graphs"]]

    @property
    def left_to_eager(self) -> list[str]:
        """Why frames were captured in a second try, or not at all."""
        return [event["reason"] for summary in self._summaries() for event in summary["capture"]]

    @property
    def graph_breaks(self) -> list[str]:
        return [graph["graph_break"]["reason"] for graph in self.graphs if graph["graph_break"]]

    def counts(self, pass_name: str) -> list[dict[str, int]]:
        """For each graph, what the pass counted."""
        return [p["counts"] for graph in self.graphs for p in graph["passes"] if p["name"] == pass_name]

    def skips(self, pass_name: str) -> list[str]:
        return [
            skip["reason"]
            for graph in self.graphs
            for p in graph["passes"]
            if p["name"] == pass_name
            for skip in p["skips"]
        ]

    def assert_attention(self, kind: str, layers: int, graphs: int) -> None:
        """All was captured, in so many graphs, and in each the attention of all layers is of this kind only."""
        assert len(self.graphs) == graphs
        assert not self.graph_breaks
        assert not self.left_to_eager
        for counts in self.counts("specialize_attention"):
            found = {name: counts.get(name, 0) for name in KINDS}
            assert found == {**dict.fromkeys(KINDS, 0), kind: layers}, self.skips("specialize_attention")

    def _summaries(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(self.folder.rglob("summary.json"))]


KINDS = ("causal", "packed", "unmasked")
"""What an attention loses its mask for; padding is served as documents are."""
