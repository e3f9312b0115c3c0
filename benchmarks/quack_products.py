"""QuACK's grouped products beside torch's and glue's own, over its tiles, and in a layer: is the package worth it?

    python -m benchmarks.quack_products [--shape qwen3] [--parts check,tiles,layers,routing] [--json FILE]

``check`` compares the operators with products per expert; ``tiles`` times every product by every kernel, in turn;
``layers`` times the layer from glue's operators; ``routing`` the model's own layer, compiled with ``kernels="all"`` and
``"torch"`` (needs transformers). Needs a Hopper GPU and ``glue-compiler[experts]``. The last lines are a table.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.expert_operators import SHAPES, Report, Shape, measure_layers, random, route, time_in_turn
from glue_compiler.ops import optional_package, quack_products
from glue_compiler.ops.quack_products import Tiles

glue = torch.ops.glue
TILES = [
    Tiles(128, 192, 2, 1, pingpong=True),
    Tiles(128, 192, 1, 2, pingpong=True),
    Tiles(128, 128, 1, 2, pingpong=True),
    Tiles(128, 256, 2, 1, pingpong=False),
    Tiles(128, 256, 1, 2, pingpong=False),
    Tiles(128, 256, 1, 1, pingpong=False),
    Tiles(256, 128, 2, 1, pingpong=False),
    Tiles(256, 128, 1, 2, pingpong=False),
]
DEFAULT, OWN, TORCH = "quack", "glue", "torch"
KINDS = {
    "forward": quack_products.LINEAR,
    "grad of rows": quack_products.LINEAR,
    "grad of weights": quack_products.OUTER,
}


def named(tiles: Tiles) -> str:
    schedule = "pingpong" if tiles.pingpong else "together"
    return f"{tiles.tile_m}x{tiles.tile_n} {tiles.cluster_m}x{tiles.cluster_n} {schedule}"


def products(shape: Shape) -> dict[tuple[str, str], dict[str, Callable[[Tiles | None], Tensor | None]]]:
    """(matrix, kind) → kernel → the product; QuACK's take tiles."""
    ids, _ = route(shape)
    offsets = glue.expert_sort(ids, shape.experts)[3]
    made: dict[tuple[str, str], dict[str, Callable[[Tiles | None], Tensor | None]]] = {}
    sizes = {"up": (shape.hidden, 2 * shape.intermediate), "down": (shape.intermediate, shape.hidden)}
    for name, (deep, wide) in sizes.items():
        x, weight, grad = random(shape.rows, deep), random(shape.experts, wide, deep), random(shape.rows, wide)
        if shape.biased:  # [E, K, N]
            weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
        turned = weight.transpose(1, 2)

        def forward(tiles, x=x, weight=weight):  # type: ignore[no-untyped-def]
            return quack_products.linear(x, weight, offsets, None, False, tiles)

        def grad_of_rows(tiles, grad=grad, weight=weight):  # type: ignore[no-untyped-def]
            return quack_products.linear(grad, weight, offsets, None, True, tiles)

        def grad_of_weights(tiles, grad=grad, x=x):  # type: ignore[no-untyped-def]
            return quack_products.outer(grad, x, offsets, tiles)

        made[name, "forward"] = {
            DEFAULT: forward,
            OWN: lambda _, x=x, weight=weight: glue.grouped_linear(x, weight, offsets, None, False, False),  # type: ignore[misc]
            TORCH: lambda _, x=x, turned=turned: torch._grouped_mm(x, turned, offs=offsets),  # type: ignore[misc]
        }
        made[name, "grad of rows"] = {
            DEFAULT: grad_of_rows,
            OWN: lambda _, grad=grad, weight=weight: glue.grouped_linear(grad, weight, offsets, None, True, False),  # type: ignore[misc]
            TORCH: lambda _, grad=grad, weight=weight: torch._grouped_mm(grad, weight, offs=offsets),  # type: ignore[misc]
        }
        made[name, "grad of weights"] = {
            DEFAULT: grad_of_weights,
            OWN: lambda _, grad=grad, x=x: glue.grouped_outer(grad, x, offsets, False),  # type: ignore[misc]
            TORCH: lambda _, grad=grad, x=x: torch._grouped_mm(grad.t(), x, offs=offsets),  # type: ignore[misc]
        }
    return made


def check(shape: Shape) -> bool:
    """Edge cases in a small size, then the shape itself by every tile against glue's own kernels."""
    good = True

    def report(name: str, error: float, bound: float) -> None:
        nonlocal good
        good &= error <= bound
        print(
            f"check {name:<58} error {error:.1e} {'ok' if error <= bound else f'WRONG, over {bound:.0e}'}", flush=True
        )

    for counts in ([700, 0, 129, 1, 300, 270], [0, 0, 0, 0, 0, 1411], [0] * 6):
        for dtype in (torch.bfloat16, torch.float16):
            small_check(counts, dtype, report)
    for (name, kind), kernels in products(shape).items():
        own = kernels[OWN](None)
        assert own is not None
        worst = 0.0
        for tiles in TILES:
            got = kernels[DEFAULT](tiles)
            if got is not None:
                worst = max(worst, relative_error(got, own))
        report(f"{name}, {kind}, all tiles, against glue's own", worst, 1e-2)
    return good


def relative_error(actual: Tensor, wanted: Tensor) -> float:
    if not actual.isfinite().all():
        return float("inf")
    return float((actual.double() - wanted.double()).abs().max() / wanted.abs().max().clamp(min=1e-6))


def small_check(counts: list[int], dtype: torch.dtype, report: Callable[[str, float, float], None]) -> None:
    offsets = torch.tensor(counts, device="cuda").cumsum(0).int()
    end = sum(counts)
    rows, wide, deep = max(end, 128 * len(counts)) + 37, 264, 200
    x = torch.randn(rows, deep, device="cuda").to(dtype)
    grad = torch.randn(rows, wide, device="cuda").to(dtype)
    x[end:] = grad[end:] = float("nan")  # rows of no expert are not read
    weight = torch.randn(len(counts), wide, deep, device="cuda").to(dtype) * 0.1
    bias = torch.randn(len(counts), wide, device="cuda").to(dtype)
    owner = torch.repeat_interleave(torch.arange(len(counts), device="cuda"), torch.tensor(counts, device="cuda"))
    exact = torch.zeros(rows, wide, dtype=torch.float64, device="cuda")
    outer = torch.zeros(len(counts), wide, deep, dtype=torch.float64, device="cuda")
    for expert in range(len(counts)):
        mine = torch.nonzero(owner == expert).flatten()
        exact[mine] = x[mine].double() @ weight[expert].double().t()
        outer[expert] = grad[mine].double().t() @ x[mine].double()
    title = f"{counts}, {str(dtype).removeprefix('torch.')}"
    bound = torch.finfo(dtype).eps
    turned = weight.transpose(1, 2).contiguous()
    for name, given, transposed in (("[E, N, K]", weight, False), ("[E, K, N]", turned, True)):
        if not quack_products.serves_linear(x, given, offsets, bias, transposed):
            report(f"{title} {name}: not served", float("inf"), bound)
            continue
        first = glue.grouped_linear(x, given, offsets, None, transposed)
        report(f"{title} {name}", relative_error(first, exact), bound)
        biased = exact.clone()
        biased[:end] += bias.double()[owner]
        report(
            f"{title} {name}, bias",
            relative_error(glue.grouped_linear(x, given, offsets, bias, transposed), biased),
            bound,
        )
        again = glue.grouped_linear(x, given, offsets, None, transposed)
        same = torch.equal(first, again) and bool((first[end:] == 0).all())
        report(f"{title} {name}: equal twice, zeros behind", 0.0 if same else float("inf"), 0.0)
    report(f"{title} outer", relative_error(glue.grouped_outer(grad, x, offsets), outer), bound)


def measure_tiles(shape: Shape, summary: list[dict[str, object]]) -> None:
    for (name, kind), kernels in products(shape).items():
        functions: dict[str, Callable[[], object]] = {
            kernel: (lambda product=kernels[kernel]: product(None)) for kernel in (TORCH, OWN)
        }
        for tiles in TILES:
            if kernels[DEFAULT](tiles) is not None:  # None: they do not compile
                functions[named(tiles)] = lambda product=kernels[DEFAULT], tiles=tiles: product(tiles)
        times = time_in_turn(functions, rounds=7, repeats=3)
        print(f"\n{shape.name} {name}, {kind}")
        for variant, milliseconds in sorted(times.items(), key=lambda item: item[1]):
            print(f"  {milliseconds:.3f}  {variant}")
        best = min((each for each in times if each not in (TORCH, OWN)), key=times.__getitem__)
        fixed = times.get(named(KINDS[kind]), float("nan"))
        summary.append(
            {"product": f"{name}, {kind}", **{each: times[each] for each in (TORCH, OWN)}, DEFAULT: fixed}
            | {"best": times[best], "tiles": best}
        )


def measure_routing(model: str) -> list[dict[str, object]]:
    from benchmarks import expert_routing

    arguments = argparse.Namespace(
        models=model, rows="glue,glue_torch", modes="training", layers=0, kernels=12, quick=False
    )
    with torch._dynamo.config.patch(recompile_limit=64), torch._inductor.config.patch(force_disable_caches=True):
        cells = expert_routing.measure_models(arguments, "cuda", torch.bfloat16)
    return [{"row": cell["row"], "ms": cell["ms"], "error": cell["error"], "failed": cell["failed"]} for cell in cells]


def print_table(
    summary: list[dict[str, object]], layers: list[dict[str, object]], routing: list[dict[str, object]]
) -> None:
    if summary:
        print("\n| product | torch | glue's own | quack | best of its tiles | |\n|---|---|---|---|---|---|")
        columns = (TORCH, OWN, DEFAULT, "best")
        for line in summary:
            print(f"| {line['product']} | {' | '.join(f'{line[each]:.3f}' for each in columns)} | {line['tiles']} |")
        totals = [sum(float(line[each]) for line in summary) for each in columns]  # type: ignore[arg-type]
        print(f"| all six | {' | '.join(f'{total:.3f}' for total in totals)} | |")
    for line in layers:
        print("layer:", {key: round(value, 3) if isinstance(value, float) else value for key, value in line.items()})
    for line in routing:
        print("compiled layer:", line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3", help=f"one of {', '.join(SHAPES)}")
    parser.add_argument("--parts", default="check,tiles,layers,routing")
    parser.add_argument("--json", help="also write the numbers to this file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise SystemExit("this benchmark needs a Hopper GPU")
    if reason := quack_products.unusable():
        raise SystemExit(reason)
    warnings.simplefilter("always")
    torch.manual_seed(0)
    shape, parts = SHAPES[arguments.shape], arguments.parts.split(",")
    print(
        f"torch {torch.__version__}, {torch.cuda.get_device_name()}, quack",
        optional_package.installed_version(quack_products.PACKAGE),
    )
    summary: list[dict[str, object]] = []
    layers: list[dict[str, object]] = []
    routing: list[dict[str, object]] = []
    good = True
    for part in parts:
        began = time.perf_counter()
        if part == "check":
            good = check(shape)
        elif part == "tiles":
            measure_tiles(shape, summary)
        elif part == "layers":
            report = Report()
            measure_layers(shape, report, ("glue, stacked", "glue, quack", "torch._grouped_mm"))
            layers = report.lines
        elif importlib.util.find_spec("transformers") is None:
            print("routing: transformers is not installed")
        else:
            routing = measure_routing(arguments.shape)
        torch.cuda.empty_cache()
        print(f"({part}: {time.perf_counter() - began:.0f} s)", flush=True)
        # After each part, so that a run that is cut short has shown what it found.
        if arguments.json:
            with open(arguments.json, "w") as file:
                json.dump({"good": good, "products": summary, "layers": layers, "routing": routing}, file, indent=1)
    print_table(summary, layers, routing)
    print("all correct" if good else "WRONG RESULTS, see above")
    if not good:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
