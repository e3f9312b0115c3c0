"""An explanation as text: the verdict first, then what was done to each graph, then what stayed, each reason once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from glue_compiler.capture import CaptureEvent
from glue_compiler.pipeline.results import Skip
from glue_compiler.report import recurrent_kernels
from glue_compiler.report.graph_report import GraphReport, HostSync
from glue_compiler.report.page_data import short_source

REWRITES = {
    "loops_grouped": "expert loops that become one sort and grouped products",
    "loops_sliced": "expert loops that read all row counts at once",
    "fallbacks_replaced": "grouped products that no longer wait for the host",
    "products_replaced": "grouped products on faster kernels",
    "rows_summed": "sums of experts' rows without atomics",
    "loops_rolled": "loops over chunks that one graph holds at any length",
    "unmasked": "attentions without their mask, which hides nothing",
    "causal": "attentions without their causal mask",
    "packed": "attentions within documents, without a mask",
    "listed": "attentions that skip what their mask hides",
    "losses": "losses computed in chunks of rows",
    "statistics": "log-probabilities computed in chunks of rows",
    "deferred": "outputs with logits, computed only if they are read",
    "embeddings": "embedding gradients without a table in fp32",
    "operators": "operators that compute only the tokens that padding does not hide",
    "shared_prefixes": "batches whose rows compute what they begin with once",
    "merged": "repeated computations that go",
    "lifted": "computations that leave checkpoints, and are not repeated in backward",
    "prologue_nodes": "operators that run once a batch",
    "steps": "operators of equal layers, forward and backward, that are compiled once",
    "states": "states of random generators that attention without dropout no longer keeps",
    "moved": "saved tensors that wait for backward in host memory",
    "recomputed": "kernels that run again in backward to save memory",
}
"""What a count of a pass means to a user. A pass that has none of these is shown with all of its counts."""


def explanation_lines(graphs: Sequence[GraphReport], capture: Sequence[CaptureEvent]) -> list[str]:
    return [*_verdict(graphs), *_details(graphs), *_left(graphs), *_capture(capture)]


def _verdict(graphs: Sequence[GraphReport]) -> list[str]:
    done: dict[str, Counter[str]] = {}
    for graph in graphs:
        for report in graph.passes:
            if report.changed:
                done.setdefault(report.name, Counter()).update(report.counts)
    breaks = sum(graph.graph_break is not None and not _is_of_layers(graph, graphs) for graph in graphs)
    where = f"{_number(len(graphs), 'graph')}, {_number(breaks, 'graph break')}, torch {torch.__version__}"
    lines = [f"glue: {_number(len(done), 'rewrite')} {'applies' if len(done) == 1 else 'apply'} here ({where})"]
    width = max(map(len, done), default=0)
    lines += [f"  {name:<{width}}  {_told(counts)}" for name, counts in done.items()]
    regions = list(dict.fromkeys(graph.region for graph in graphs if graph.region))
    if regions:
        lines.append(f"Layers that share what is compiled, each kind with graph breaks around it: {', '.join(regions)}")
    if done:
        lines.append(f"Worth here: {_worth(graphs, done.values())}")
    kernels = recurrent_kernels.advice(["flash-linear-attention"])
    if kernels and any(counts["loops_rolled"] for counts in done.values()):
        lines.append(f"Faster with kernels than as loops, if the model knows them: {kernels} is not installed")
    return [*lines, f"Left: {_what_is_left(graphs, breaks)}"]


def _told(counts: Counter[str]) -> str:
    told = [f"{text}: {counts[name]}" for name, text in REWRITES.items() if counts[name]]
    return "; ".join(told or [f"{name}: {count}" for name, count in counts.items()])


def _worth(graphs: Sequence[GraphReport], counts: Iterable[Counter[str]]) -> str:
    before, after = (sum(getattr(graph, f"nodes_{when}") for graph in graphs) for when in ("before", "after"))
    syncs = sum(each["syncs_removed"] for each in counts)
    once = sum(sync.once_per_batch for sync in _syncs(graphs))
    found = [f"{before} operators become {after}"] if before > after else []
    found += [f"{_number(syncs, 'wait')} for the device fewer in a forward"] if syncs > 0 else []
    found += [f"{_number(once, 'wait')} once a batch instead of in each call"] if once else []
    return ", ".join(found) or "nothing that a graph shows; time a step with and without"


def _what_is_left(graphs: Sequence[GraphReport], breaks: int) -> str:
    waits = sum(not sync.once_per_batch for sync in _syncs(graphs))
    places = sum(len(report.skips) for graph in graphs for report in graph.passes)
    errors = sum(report.error is not None for graph in graphs for report in graph.passes)
    found = [_number(waits, "wait") + " for the device"] if waits else []
    found += [_number(breaks, "graph break")] if breaks else []
    found += (
        [_number(places, "place") + " left as it was" if places == 1 else f"{places} places left as they were"]
        if places
        else []
    )
    found += [_number(errors, "pass", "passes") + " failed"] if errors else []
    return ", ".join(found) + (": see below" if found else "nothing")


def _details(graphs: Sequence[GraphReport]) -> list[str]:
    lines = []
    for graph in graphs:
        region = f" ({graph.region})" if graph.region else ""
        lines.append(f"\ngraph {graph.id}{region}: {graph.nodes_before} → {graph.nodes_after} nodes")
        for report in graph.passes:
            done = ", ".join(f"{name} {count}" for name, count in report.counts.items() if count)
            if report.error or done:
                lines.append(f"  {report.name}: {report.error or done} ({report.milliseconds:.0f} ms)")
        for sync in graph.host_syncs:
            when = "once per batch" if sync.once_per_batch else "that remains"
            lines.append(f"  host sync {when}: {sync.target}{_at(sync.source)}")
        if graph.graph_break:
            reason, source = graph.graph_break
            ours = _is_of_layers(graph, graphs)
            why = "where Python calls the layers" if ours else f"at a graph break: {reason.splitlines()[0]}"
            lines.append(f"  ends {why}{_at(source)}")
    return lines


def _is_of_layers(graph: GraphReport, graphs: Sequence[GraphReport]) -> bool:
    """Does the graph end where glue has Dynamo leave the loop over layers to Python? Torch's reason says no more."""
    in_regions = any(each.region for each in graphs)
    return in_regions and graph.graph_break is not None and graph.graph_break[0].startswith("step_unsupported")


def _left(graphs: Sequence[GraphReport]) -> list[str]:
    """Each reason of a pass once, the most frequent first; reasons that differ in numbers of names alone are one."""
    found: dict[tuple[str, str], list[Skip]] = {}
    for graph in graphs:
        for report in graph.passes:
            for skip in report.skips:
                found.setdefault((report.name, re.sub(r"\d+", "", skip.reason)), []).append(skip)
    lines = ["\nleft as it was, and why (docs/<rewrite>.md says what each one asks for):"] if found else []
    for (name, _), skips in sorted(found.items(), key=lambda item: -len(item[1])):
        times = f" x{len(skips)}" if len(skips) > 1 else ""
        node = f"{skips[0].node}: " if len(skips) == 1 and skips[0].node else ""
        lines.append(f"  {name}{times}: {node}{skips[0].reason}{_lines_of(skips)}")
    return lines


def _lines_of(skips: Sequence[Skip]) -> str:
    sources = list(dict.fromkeys(skip.source for skip in skips if skip.source))
    more = f", and {_number(len(sources) - 1, 'other line')}" if len(sources) > 1 else ""
    return _at(sources[0] + more) if sources else ""


def _capture(capture: Sequence[CaptureEvent]) -> list[str]:
    lines = ["\ncapture:"] if capture else []
    for event in capture:
        again = "captured again without data-dependent values"
        outcome = "captured with its layers" if event.whole else again if event.retried else "left to eager"
        lines.append(f"  a frame was {outcome}: {event.reason}")
    return lines


def _syncs(graphs: Sequence[GraphReport]) -> list[HostSync]:
    return [sync for graph in graphs for sync in graph.host_syncs]


def _number(count: int, one: str, many: str = "") -> str:
    return f"{count} {one if count == 1 else many or one + 's'}" if count else f"no {many or one + 's'}"


def _at(source: str) -> str:
    return f" ({short_source(source)})" if source else ""
