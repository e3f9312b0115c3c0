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

    @property
    def attention(self) -> list[dict[str, int]]:
        """For each graph with attention, how many layers lost their mask, by what it is proved to show."""
        found = [
            {kind: counts[kind] for kind in KINDS if kind in counts} for counts in self.counts("specialize_attention")
        ]
        return [kinds for kinds in found if kinds]

    def assert_attention(self, kind: str, layers: int, compiles: int, breaks: tuple[str, ...] = ()) -> None:
        """The attention of all layers is of one kind, in so many graphs, and nothing is left to eager.

        Args:
            breaks: where another library's code ends a graph with every backend: what each reason begins with.
        """
        assert self.attention == [{kind: layers}] * compiles, self.skips("specialize_attention")
        assert not self.skips("specialize_attention")
        if breaks:
            assert all(reason.startswith(breaks) for reason in self.graph_breaks), self.graph_breaks
        else:
            assert len(self.graphs) == compiles, self.graph_breaks
            assert not self.left_to_eager

    def _summaries(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(self.folder.rglob("summary.json"))]


KINDS = ("causal", "packed", "unmasked")
"""What an attention loses its mask for; padding is served as documents are."""
