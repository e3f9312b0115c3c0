"""Times the expert operators on one GPU, against torch's own operators and against arithmetic and memory floors.

    python benchmarks/expert_operators.py [--shapes qwen3,gpt_oss] [--parts sort,rows,products,layers] [--json FILE]

Floors: ``2 * rows * N * K`` over the rate of a dense 8192-cubed bf16 product, timed in turn with the others (a busy GPU
lowers its clock, so a rate measured earlier would flatter the floor), and bytes over the rate of a device copy. All
variants of one line run in turn within each round; a line shows medians over the rounds, in milliseconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

import glue_compiler.ops  # noqa: F401  registers torch.ops.glue
from glue_compiler.ops import quack_products

glue = torch.ops.glue
DEVICE, DTYPE = "cuda", torch.bfloat16
DENSE = 8192


@dataclasses.dataclass(frozen=True)
class Shape:
    """A mixture-of-experts layer; ``biased`` also means gpt-oss's [E, K, N] weights and clamped activation."""

    name: str
    tokens: int
    top_k: int
    experts: int
    hidden: int
    intermediate: int
    biased: bool = False

    @property
    def rows(self) -> int:
        return self.tokens * self.top_k


SHAPES = {
    "qwen3": Shape("Qwen3-30B-A3B", 8192, 8, 128, 2048, 768),
    "gpt_oss": Shape("gpt-oss-20b", 8192, 4, 32, 2880, 2880, biased=True),
    "mixtral": Shape("Mixtral-8x7B", 4096, 2, 8, 4096, 14336),
}


def random(*size: int) -> Tensor:
    return (torch.randn(*size, device=DEVICE) * 0.05).to(DTYPE)


def route(shape: Shape) -> tuple[Tensor, Tensor]:
    """Chosen experts and their weights: some experts are more popular than others, as in trained models."""
    logits = torch.randn(shape.tokens, shape.experts, device=DEVICE) + 0.3 * torch.randn(shape.experts, device=DEVICE)
    weights, ids = logits.softmax(-1).topk(shape.top_k)
    return ids, (weights / weights.sum(-1, keepdim=True)).to(DTYPE)


def time_in_turn(functions: dict[str, Callable[[], object]], rounds: int = 9, repeats: int = 4) -> dict[str, float]:
    """Median milliseconds of each function; the order turns by one in every round."""
    for function in functions.values():
        for _ in range(2):
            function()
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(rounds):
        names = list(functions)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            functions[name]()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(repeats):
                functions[name]()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) / repeats)
    return {name: statistics.median(values) for name, values in times.items()}


def captured(function: Callable[[], object]) -> Callable[[], object]:
    """The function as a CUDA graph, so that launches of small kernels are not what is measured."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


class Report:
    """Prints one line per measurement and keeps them all for ``--json``."""

    def __init__(self) -> None:
        self.lines: list[dict[str, object]] = []
        left, right = random(DENSE, DENSE), random(DENSE, DENSE)
        self._dense = lambda: left @ right
        big = torch.empty(2**29, device=DEVICE)
        other = torch.empty_like(big)
        copy = time_in_turn({"copy": lambda: other.copy_(big)})["copy"]
        self.bytes_per_ms = 2 * big.nbytes / copy
        print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, copy {self.bytes_per_ms / 1e9:.2f} TB/s")

    def memory(self, name: str, moved: int, functions: dict[str, Callable[[], object]]) -> None:
        self._print(name, moved / self.bytes_per_ms, time_in_turn(functions), "")

    def arithmetic(self, name: str, operations: float, functions: dict[str, Callable[[], object]], **how: int) -> None:
        times = time_in_turn({**functions, "dense": self._dense}, **how)
        rate = 2 * DENSE**3 / times.pop("dense")
        self._print(name, operations / rate, times, f" (dense {rate / 1e9:.0f} TFLOP/s)")

    def _print(self, name: str, floor: float, times: dict[str, float], note: str) -> None:
        shown = "  ".join(f"{variant} {time:.3f}" for variant, time in times.items())
        print(f"{name:<34} floor {floor:.3f}  {shown}{note}", flush=True)
        self.lines.append({"name": name, "floor_ms": floor, **times})


def measure_sort(shape: Shape, report: Report) -> None:
    ids, _ = route(shape)
    keys = ids.t().reshape(-1).int()
    report.memory(
        f"{shape.name} sort",
        ids.nbytes + 2 * 4 * shape.rows,
        {
            "expert_sort": captured(lambda: glue.expert_sort(ids, shape.experts)),
            "torch.sort int64": captured(lambda: torch.sort(keys.long(), stable=True)),
            "torch.sort int32": captured(lambda: torch.sort(keys, stable=True)),
        },
    )


def measure_rows(shape: Shape, report: Report) -> None:
    ids, weights = route(shape)
    order, inverse, _, offsets = glue.expert_sort(ids, shape.experts)
    k, x, rows = shape.top_k, random(shape.tokens, shape.hidden), random(shape.rows, shape.hidden)
    arguments = (order, inverse, offsets, k)
    token = order.long() // k
    moved = x.nbytes + rows.nbytes
    report.memory(
        f"{shape.name} gather",
        moved,
        {"expert_gather": lambda: glue.expert_gather(x, *arguments), "x[token]": lambda: x[token]},
    )
    report.memory(
        f"{shape.name} combine",
        moved,
        {
            "expert_combine": lambda: glue.expert_combine(rows, *arguments, weights),
            "index_add_": lambda: torch.zeros_like(x).index_add_(0, token, rows * weights.view(-1)[order, None]),
        },
    )
    report.memory(
        f"{shape.name} gradient of rows",
        moved,
        {"expert_gather": lambda: glue.expert_gather(x, *arguments, weights)},
    )
    report.memory(
        f"{shape.name} gradient of routing weights",
        moved,
        {"expert_dot": lambda: glue.expert_dot(rows, x, *arguments, DTYPE)},
    )
    wide = random(shape.rows, 2 * shape.intermediate)
    report.memory(f"{shape.name} bias gradient", wide.nbytes, {"grouped_sum": lambda: glue.grouped_sum(wide, offsets)})


def with_package(functions: dict[str, Callable[[], object]], product: Callable[[], object]) -> dict[str, Callable]:
    """``functions``, and the product by QuACK where that is installed."""
    return functions if quack_products.unusable() else {**functions, "quack": product}


def measure_products(shape: Shape, report: Report) -> None:
    ids, _ = route(shape)
    offsets = glue.expert_sort(ids, shape.experts)[3]
    for name, deep, wide in (
        ("gate_up", shape.hidden, 2 * shape.intermediate),
        ("down", shape.intermediate, shape.hidden),
    ):
        x, weight, grad = random(shape.rows, deep), random(shape.experts, wide, deep), random(shape.rows, wide)
        listed = [each.clone() for each in weight.unbind()]
        bias = random(shape.experts, wide)
        operations = 2.0 * shape.rows * deep * wide
        report.arithmetic(
            f"{shape.name} {name} forward",
            operations,
            with_package(
                {
                    "grouped_linear": lambda: glue.grouped_linear(x, weight, offsets, None, False, False),  # noqa: B023
                    "with bias": lambda: glue.grouped_linear(x, weight, offsets, bias, False, False),  # noqa: B023
                    "list": lambda: glue.grouped_linear_list(x, listed, offsets, []),  # noqa: B023
                    "torch": lambda: torch._grouped_mm(x, weight.transpose(1, 2), offs=offsets),  # noqa: B023
                },
                lambda: glue.grouped_linear(x, weight, offsets),  # noqa: B023
            ),
        )
        report.arithmetic(
            f"{shape.name} {name} grad of rows",
            operations,
            with_package(
                {
                    "grouped_linear": lambda: glue.grouped_linear(grad, weight, offsets, None, True, False),  # noqa: B023
                    "list": lambda: glue.grouped_linear_list(grad, listed, offsets, [], True),  # noqa: B023
                    "torch": lambda: torch._grouped_mm(grad, weight, offs=offsets),  # noqa: B023
                },
                lambda: glue.grouped_linear(grad, weight, offsets, None, True),  # noqa: B023
            ),
        )
        report.arithmetic(
            f"{shape.name} {name} grad of weights",
            operations,
            with_package(
                {
                    "grouped_outer": lambda: glue.grouped_outer(grad, x, offsets, False),  # noqa: B023
                    "torch": lambda: torch._grouped_mm(grad.t(), x, offs=offsets),  # noqa: B023
                },
                lambda: glue.grouped_outer(grad, x, offsets),  # noqa: B023
            ),
        )


def activate(shape: Shape, hidden: Tensor, *, unbind: bool = False) -> Tensor:
    """The layer's activation; ``unbind`` takes gpt-oss's interleaved halves in another spelling of the same thing."""
    if shape.biased:
        pairs = hidden.unflatten(-1, (-1, 2)).unbind(-1) if unbind else (hidden[..., ::2], hidden[..., 1::2])
        gate, up = pairs[0].clamp(max=7.0), pairs[1].clamp(min=-7.0, max=7.0)
        return (up + 1) * gate * torch.sigmoid(gate * 1.702)
    gate, up = hidden.chunk(2, dim=-1)
    return F.silu(gate) * up


Layer = Callable[..., Tensor]


def layers(shape: Shape) -> Iterator[tuple[str, Layer]]:
    """One layer from our operators over stacked and separate weights, and one from torch's grouped product."""
    k, transposed = shape.top_k, shape.biased

    def stacked(  # type: ignore[no-untyped-def]
        x, ids, weights, gate_up, down, gate_up_bias=None, down_bias=None, unbind=False, packages=False
    ):
        order, inverse, _, offsets = glue.expert_sort(ids, shape.experts)
        rows = glue.expert_gather(x, order, inverse, offsets, k)
        hidden = glue.grouped_linear(rows, gate_up, offsets, gate_up_bias, transposed, packages)
        hidden = activate(shape, hidden, unbind=unbind)
        rows = glue.grouped_linear(hidden, down, offsets, down_bias, transposed, packages)
        return glue.expert_combine(rows, order, inverse, offsets, k, weights)

    def separate(x, ids, weights, gate_up, down, gate_up_bias=(), down_bias=()):  # type: ignore[no-untyped-def]
        order, inverse, _, offsets = glue.expert_sort(ids, shape.experts)
        rows = glue.expert_gather(x, order, inverse, offsets, k)
        hidden = activate(shape, glue.grouped_linear_list(rows, gate_up, offsets, list(gate_up_bias), transposed))
        rows = glue.grouped_linear_list(hidden, down, offsets, list(down_bias), transposed)
        return glue.expert_combine(rows, order, inverse, offsets, k, weights)

    def by_torch(x, ids, weights, gate_up, down, gate_up_bias=None, down_bias=None):  # type: ignore[no-untyped-def]
        order = torch.argsort(ids.reshape(-1), stable=True)
        expert = ids.reshape(-1)[order]
        counts = torch.histc(expert.int(), bins=shape.experts, min=0, max=shape.experts - 1)
        offsets = torch.cumsum(counts, 0, dtype=torch.int32)
        gate_up, down = (gate_up, down) if transposed else (gate_up.transpose(1, 2), down.transpose(1, 2))
        hidden = torch._grouped_mm(x[order // k], gate_up, offs=offsets)
        hidden = activate(shape, hidden if gate_up_bias is None else hidden + gate_up_bias[expert])
        rows = torch._grouped_mm(hidden, down, offs=offsets)
        rows = rows if down_bias is None else rows + down_bias[expert]
        rows = rows * weights.reshape(-1)[order, None]
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel(), device=order.device)
        return rows[inverse].view(*ids.shape, -1).sum(1)

    yield "glue, stacked", stacked
    if not quack_products.unusable():
        yield "glue, quack", functools.partial(stacked, packages=True)
    if shape.biased:
        yield "glue, unbind", functools.partial(stacked, unbind=True)
    else:
        yield "glue, separate", separate
    yield "torch._grouped_mm", by_torch


def measure_layers(shape: Shape, report: Report, names: Sequence[str] = ()) -> None:
    """``names``: of the layers to measure; none: all."""
    ids, weights = route(shape)
    wide = (shape.experts, shape.hidden, 2 * shape.intermediate), (shape.experts, shape.intermediate, shape.hidden)
    sizes = wide if shape.biased else [(experts, n, k) for experts, k, n in wide]
    biases = [(shape.experts, 2 * shape.intermediate), (shape.experts, shape.hidden)] if shape.biased else []
    x = random(shape.tokens, shape.hidden).requires_grad_()
    weights.requires_grad_()
    stacked = [random(*size).requires_grad_() for size in (*sizes, *biases)]
    grad = random(shape.tokens, shape.hidden)
    forward: dict[str, Callable[[], object]] = {}
    training: dict[str, Callable[[], object]] = {}
    for name, layer in layers(shape):
        if names and name not in names:
            continue
        # The parts of one stacked tensor lie at separate addresses, which is all that the separate form sees.
        parameters = [list(each.detach().unbind()) for each in stacked] if "separate" in name else stacked
        leaves = [x, weights]
        for each in parameters:
            leaves += [part.requires_grad_() for part in each] if isinstance(each, list) else [each]
        compiled = torch.compile(layer, fullgraph=True, dynamic=False)

        def forward_only(compiled=compiled, parameters=parameters) -> None:  # type: ignore[no-untyped-def]
            with torch.no_grad():
                compiled(x, ids, weights, *parameters)

        def forward_backward(compiled=compiled, parameters=parameters, leaves=leaves) -> None:  # type: ignore[no-untyped-def]
            for leaf in leaves:
                leaf.grad = None
            compiled(x, ids, weights, *parameters).backward(grad)

        forward[name], training[name] = forward_only, forward_backward
    operations = 2.0 * shape.rows * 3 * shape.hidden * shape.intermediate
    report.arithmetic(f"{shape.name} layer forward", operations, forward)
    report.arithmetic(f"{shape.name} layer forward+backward", 3 * operations, training)


PARTS = {"sort": measure_sort, "rows": measure_rows, "products": measure_products, "layers": measure_layers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES), help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--json", help="also write the numbers to this file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    torch.manual_seed(0)
    report = Report()
    for part in arguments.parts.split(","):
        for shape in arguments.shapes.split(","):
            PARTS[part](SHAPES[shape], report)
            torch.cuda.empty_cache()
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(report.lines, file, indent=1)


if __name__ == "__main__":
    main()
