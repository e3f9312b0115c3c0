"""Sweeps the tile sizes of the grouped products on one GPU: what ``glue_compiler/ops/grouped_product_tiles.py`` holds.

    python -m benchmarks.product_tiles [--shapes mixtral,gpt_oss] [--compilers 12]

Shown are milliseconds (medians; all candidates of one product run in turn within each round), the best first, beside
torch's grouped product and the floor at the rate of a dense product. The kernels are compiled by several processes
first, which only fill Triton's cache.
"""

from __future__ import annotations

import argparse
import functools
import subprocess
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.expert_operators import DENSE, SHAPES, Shape, random, route, time_in_turn
from glue_compiler.ops.grouped_product_tiles import Tiles, linear_tiles, outer_tiles
from glue_compiler.ops.grouped_product_triton import linear, outer

LINEAR = [
    Tiles(128, 128, 64, 8, 4, 3, 2, descriptors=True),
    Tiles(128, 128, 64, 4, 4, 3, 2, descriptors=True),
    Tiles(128, 128, 64, 16, 4, 3, 2, descriptors=True),
    Tiles(128, 128, 64, 8, 4, 3, 0, descriptors=True),
    Tiles(128, 128, 64, 8, 4, 4, 1, descriptors=True),
    Tiles(128, 128, 64, 8, 8, 4, 1, descriptors=True),
    Tiles(128, 128, 128, 8, 8, 3, 1, descriptors=True),
    Tiles(128, 256, 64, 4, 8, 3, 1, descriptors=True),
    Tiles(128, 256, 64, 8, 8, 3, 1, descriptors=True),
    Tiles(128, 256, 64, 16, 8, 3, 1, descriptors=True),
    Tiles(128, 256, 64, 8, 8, 4, 1, descriptors=True),
    Tiles(128, 256, 64, 8, 8, 3, 0, descriptors=True),
    Tiles(128, 256, 64, 8, 8, 4, 0, descriptors=True),
    Tiles(256, 128, 64, 4, 8, 3, 1, descriptors=True),
    Tiles(256, 128, 64, 8, 8, 3, 1, descriptors=True),
    Tiles(256, 128, 64, 8, 8, 4, 1, descriptors=True),
    Tiles(256, 128, 64, 8, 8, 3, 0, descriptors=True),
    Tiles(64, 256, 64, 8, 4, 4, 1, descriptors=True),
]
OUTER = [
    Tiles(128, 128, 64, 16, 8, 3, descriptors=True),
    Tiles(128, 128, 64, 8, 4, 3, descriptors=True),
    Tiles(128, 256, 64, 8, 8, 3, descriptors=True),
    Tiles(256, 128, 64, 8, 8, 3, descriptors=True),
    Tiles(256, 128, 64, 8, 8, 4, descriptors=True),
]

Run = Callable[[Tiles], Tensor]


def products(shape: Shape, offsets: Tensor) -> Iterator[tuple[str, float, list[Tiles], Run, Callable[[], Tensor]]]:
    """(name, operations, candidates, ours with given tiles, torch's) of each product of a training step."""
    rows = shape.rows
    for name, deep, wide in (
        ("gate_up", shape.hidden, 2 * shape.intermediate),
        ("down", shape.intermediate, shape.hidden),
    ):
        x, grad = random(rows, deep), random(rows, wide)
        kn = shape.biased  # gpt-oss holds [E, K, N]
        weight = random(shape.experts, deep, wide) if kn else random(shape.experts, wide, deep)
        k_by_n, n_by_k = (weight, weight.transpose(1, 2)) if kn else (weight.transpose(1, 2), weight)
        operations = 2.0 * rows * deep * wide
        yield (
            f"{name} forward",
            operations,
            list(dict.fromkeys([linear_tiles(rows, shape.experts, wide, x, not kn), *LINEAR])),
            lambda tiles, x=x, weight=weight, kn=kn: linear(x, weight, offsets, None, kn, tiles),  # type: ignore[misc]
            lambda x=x, right=k_by_n: torch._grouped_mm(x, right, offs=offsets),  # type: ignore[misc]
        )
        yield (
            f"{name} grad of rows",
            operations,
            list(dict.fromkeys([linear_tiles(rows, shape.experts, deep, grad, kn), *LINEAR])),
            lambda tiles, grad=grad, weight=weight, kn=kn: linear(grad, weight, offsets, None, not kn, tiles),  # type: ignore[misc]
            lambda grad=grad, right=n_by_k: torch._grouped_mm(grad, right, offs=offsets),  # type: ignore[misc]
        )
        left, right = (x, grad) if kn else (grad, x)
        yield (
            f"{name} grad of weights",
            operations,
            list(dict.fromkeys([outer_tiles(left.shape[1], right.shape[1], left), *OUTER])),
            lambda tiles, left=left, right=right: outer(left, right, offsets, tiles),  # type: ignore[misc]
            lambda left=left, right=right: torch._grouped_mm(left.t(), right, offs=offsets),  # type: ignore[misc]
        )


def named(tiles: Tiles) -> str:
    walk = f"{tiles.programs_per_processor} a processor" if tiles.programs_per_processor else "one a tile"
    sizes = f"{tiles.block_m}x{tiles.block_n}x{tiles.block_k}"
    return f"{sizes} band {tiles.group_m}, {tiles.warps} warps, {tiles.stages} stages, {walk}"


def failure_of(ours: Run, tiles: Tiles) -> str | None:
    """Why these tiles cannot be run: too much shared memory, say."""
    try:
        ours(tiles)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"
    return None


def sweep(shape: Shape) -> None:
    ids, _ = route(shape)
    offsets = torch.ops.glue.expert_sort(ids, shape.experts)[3]
    left, right = random(DENSE, DENSE), random(DENSE, DENSE)
    for name, operations, candidates, ours, by_torch in products(shape, offsets):
        runs: dict[str, Callable[[], object]] = {"torch": by_torch, "dense": lambda: left @ right}
        for tiles in candidates:
            failure = failure_of(ours, tiles)
            if failure:
                print(f"  {named(tiles)}: {failure}")
            else:
                runs[named(tiles)] = functools.partial(ours, tiles)
        times = time_in_turn(runs, rounds=5, repeats=2)
        floor = operations / (2.0 * DENSE**3) * times.pop("dense")
        chosen = named(candidates[0])
        print(f"{shape.name} {name}: floor {floor:.3f}, torch {times.pop('torch'):.3f}, now {times[chosen]:.3f}")
        for each, ms in sorted(times.items(), key=lambda item: item[1])[:5]:
            print(f"    {ms:.3f}  {each}{'  (now)' if each == chosen else ''}", flush=True)


def compile_some(shapes: list[str], part: int, parts: int) -> None:
    """Run every ``parts``-th candidate once."""
    for name in shapes:
        ids, _ = route(SHAPES[name])
        offsets = torch.ops.glue.expert_sort(ids, SHAPES[name].experts)[3]
        for _, _, candidates, ours, _ in products(SHAPES[name], offsets):
            for tiles in candidates[part::parts]:
                failure_of(ours, tiles)  # the sweep reports it
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="mixtral,gpt_oss", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--compilers", type=int, default=8, help="processes that compile")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    shapes = arguments.shapes.split(",")
    if arguments.part is not None:
        compile_some(shapes, arguments.part, arguments.compilers)
        return
    command = [sys.executable, "-m", "benchmarks.product_tiles", *sys.argv[1:], "--part"]
    processes = [subprocess.Popen([*command, str(part)]) for part in range(arguments.compilers)]
    for process in processes:
        process.wait()
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}", flush=True)
    for name in shapes:
        sweep(SHAPES[name])
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
