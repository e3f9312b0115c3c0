"""When the streams of a dumped training step would work, at given rates: a prediction from sizes alone."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from glue_compiler.report.graph_text import GraphText, NodeLine
from glue_compiler.report.transfers import Bar, layer_root, step_nodes, transfer_of

_SHAPE = re.compile(r"([a-z]+)(\d+)\w*\[([\d, ]*)\]")


@dataclass(frozen=True)
class Rates:
    """``flops``: floating-point operations a second. ``link``: bytes a second between device and host, each way."""

    flops: float
    link: float


@dataclass(frozen=True)
class PredictedStep:
    """Bars are in milliseconds since the step began.

    Attributes:
        compute: products and attention, one bar for each run of one layer.
        waits: the compute stream waits for a copy.
        to_host, from_host: copies.
        length: of the step. backward: when backward begins.
        unknown: products and copies whose sizes are not numbers; they take no time here.
    """

    compute: tuple[Bar, ...]
    waits: tuple[Bar, ...]
    to_host: tuple[Bar, ...]
    from_host: tuple[Bar, ...]
    length: float
    backward: float
    unknown: int


def predict_step(graphs: Sequence[GraphText], rates: Rates) -> PredictedStep | None:
    """Run the step's operators in the order of issue on a compute stream and two copy streams.

    Only products, attention and a loss in chunks take time, which is a lower bound of computing: what is hidden here is
    hidden in a real step that reaches the rates. None if nothing is copied, or no product has a known size.
    """
    import glue_compiler.ops.flop_formulas  # noqa: F401  registers them; a second of start-up that other commands save

    run = _Run(rates)
    for graph, node in step_nodes(graphs):
        run.issue(graph, node)
    copies = run.bars["offload"] + run.bars["reload"]
    if not copies or not run.compute_bars:
        return None
    end = max(bar.end for bar in (*run.compute_bars, *copies))
    begins = run.begins.get("backward", end)
    compute, waits = tuple(run.compute_bars), tuple(run.waits)
    return PredictedStep(
        compute, waits, tuple(run.bars["offload"]), tuple(run.bars["reload"]), end, begins, run.unknown
    )


class _Run:
    """The clocks of the streams, in milliseconds."""

    def __init__(self, rates: Rates) -> None:
        self.rates = rates
        self.clock = {"compute": 0.0, "offload": 0.0, "reload": 0.0}
        self.begins: dict[str, float] = {}
        self.shapes: dict[str, dict[str, str]] = {}
        self.started: dict[tuple[str, str], Bar] = {}
        self.bars: dict[str, list[Bar]] = {"offload": [], "reload": []}
        self.compute_bars: list[Bar] = []
        self.waits: list[Bar] = []
        self.unknown = 0

    def issue(self, graph: str, node: NodeLine) -> None:
        self.begins.setdefault(graph, self.clock["compute"])
        self.shapes.setdefault(graph, {})[node.name] = node.shape
        transfer = transfer_of(node)
        if transfer is None:
            self._compute(graph, node)
        elif transfer.moment == "start":
            self._start(transfer.direction, graph, node)
        elif (graph, transfer.operand) in self.started:
            self._wait(self.started[graph, transfer.operand])

    def _start(self, direction: str, graph: str, node: NodeLine) -> None:
        nbytes = bytes_of(node.shape)
        self.unknown += nbytes is None
        start = max(self.clock["compute"], self.clock[direction])
        self.clock[direction] = start + (nbytes or 0) / self.rates.link * 1e3
        bar = Bar(start, self.clock[direction], node.shape, graph, node.name)
        self.bars[direction].append(bar)
        self.started[graph, node.name] = bar

    def _wait(self, copy: Bar) -> None:
        now = self.clock["compute"]
        if copy.end > now:
            self.waits.append(Bar(now, copy.end, f"waits for {copy.node}", copy.graph, copy.node))
            self.clock["compute"] = copy.end

    def _compute(self, graph: str, node: NodeLine) -> None:
        flops = flops_of(node, self.shapes[graph])
        self.unknown += flops is None
        if not flops:
            return
        start = self.clock["compute"]
        end = self.clock["compute"] = start + flops / self.rates.flops * 1e3
        label = layer_root(node.layer) or "other"
        last = self.compute_bars[-1] if self.compute_bars else None
        if last and (last.label, last.graph, last.end) == (label, graph, start):
            self.compute_bars[-1] = Bar(last.start, end, label, graph, last.node)
        else:
            self.compute_bars.append(Bar(start, end, label, graph, node.name))


def bytes_of(shape: str) -> int | None:
    """``f32[2, 8]`` → 64; None for sizes that are not numbers, or what is no tensor."""
    match = _SHAPE.fullmatch(shape)
    if match is None:
        return None
    return math.prod(_sizes(match)) * int(match[2]) // 8


def flops_of(node: NodeLine, shapes: Mapping[str, str]) -> int | None:
    """By torch's own formulas: 0 for what is neither product nor attention; None where a size is not a number."""
    try:
        call = ast.parse(node.text, mode="eval").body
    except SyntaxError:
        return 0
    packet = _packet(call.func) if isinstance(call, ast.Call) else None
    if packet not in flop_registry or not isinstance(call, ast.Call):
        return 0
    try:
        arguments = [_argument(argument, shapes) for argument in call.args]
        return int(flop_registry[packet](*arguments, out_val=_argument_of(node.shape) if node.shape else None))
    except (TypeError, ValueError, AssertionError, IndexError):
        return None


def _packet(function: ast.expr) -> Any:
    """The operator that ``torch.ops.aten.mm.default`` names; None if it names none."""
    path = ast.unparse(function).split(".")
    if path[:2] != ["torch", "ops"] or len(path) < 4:
        return None
    return getattr(getattr(torch.ops, path[2], None), path[3], None)


def _argument(argument: ast.expr, shapes: Mapping[str, str]) -> Any:
    if isinstance(argument, ast.Name):
        return _argument_of(shapes.get(argument.id, ""))
    if isinstance(argument, ast.List | ast.Tuple):
        return [_argument(element, shapes) for element in argument.elts]
    try:
        return ast.literal_eval(argument)
    except ValueError:
        return None


def _argument_of(shape: str) -> tuple[int, ...] | None:
    match = _SHAPE.fullmatch(shape)
    return tuple(_sizes(match)) if match else None


def _sizes(match: re.Match[str]) -> list[int]:
    return [int(size) for size in match[3].split(",") if size.strip()]
