"""Cross entropy of a projection to the vocabulary on one GPU: time and memory, by who computes it and in which chunks.

    python -m benchmarks.loss_operators [--rows qwen3,llama,gemma3] [--parts losses,statistics,kernel,products]
                                        [--chunks 256,512,1024,0] [--json FILE]

``losses``: forward and backward of the mean loss of bf16 rows and weights with ``.float()`` logits, milliseconds and
the most memory in MiB beside what it starts with. "glue 512" has chunks of about 512 MiB of logits, "glue all" one.
torch's own ``linear_cross_entropy`` and Liger's are shown where they are installed. ``statistics``: forward and
backward of the loss of each token, and with entropies. ``kernel``: one chunk of 512 MiB through the kernel that reads
logits and writes their gradient over them, by columns and warps of a program; the floor is what copying takes for one
reading and one writing. ``products``: each of the three products of a chunk, and the floor of a dense product.
All variants of one line run in turn; medians.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

import glue_compiler.ops  # noqa: F401  registers torch.ops.glue
from benchmarks.expert_operators import time_in_turn
from glue_compiler.ops import loss_chunks

glue = torch.ops.glue
MIB = 2**20
IGNORED = -100
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    tokens: int
    hidden: int
    classes: int
    trained: bool  # whether the head's weight gets a gradient


ROWS = {
    "qwen3": Row("Qwen3-0.6B", 8192, 1024, 151_936, True),
    "llama": Row("Llama-3.2-1B, frozen head", 8192, 2048, 128_256, False),
    "gemma3": Row("gemma3-1B", 8192, 1152, 262_144, True),
}


def operands(row: Row) -> tuple[Tensor, Tensor, Tensor]:
    rows = torch.randn(row.tokens, row.hidden, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(row.classes, row.hidden, device="cuda") / row.hidden**0.5).bfloat16()
    target = torch.randint(row.classes, (row.tokens,), device="cuda")
    target[::16] = IGNORED
    return rows, weight.requires_grad_(row.trained), target


def eager(rows: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(rows, weight).float(), target, ignore_index=IGNORED)


def fused(trained: bool, predictions: bool) -> Loss:
    def loss(rows: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        needs_grad = [True, trained, False]
        return glue.linear_cross_entropy(
            [rows], [weight], None, target, None, "mean", IGNORED, 0.0, 1.0, 0.0, torch.float32, needs_grad, predictions
        )[0]

    return torch.compile(loss, dynamic=False)


def by_token(rows: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(rows, weight).float(), target, ignore_index=IGNORED, reduction="none").mean()


def with_entropy(rows: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    log_probs = F.linear(rows, weight).float().log_softmax(1)
    picked = log_probs.gather(1, target.clamp(min=0)[:, None])
    return picked.mean() - (log_probs.exp() * log_probs).sum(1).mean()


def from_statistics(wants: list[bool]) -> Loss:
    def loss(rows: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        logsumexp, target_logit, _, entropy, _ = glue.linear_row_statistics(
            [rows], [weight], None, target, 1.0, 0.0, torch.float32, wants, False
        )
        value = (logsumexp - target_logit).mean()
        return value + entropy.mean() if wants[3] else value

    return torch.compile(loss, dynamic=False)


def others() -> Iterator[tuple[str, Loss]]:
    """Losses that need what may not be installed."""
    options = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if options is not None:
        for policy in ("balanced", "compact"):

            def by_torch(rows: Tensor, weight: Tensor, target: Tensor, policy: str = policy) -> Tensor:
                chosen = options(acc_policy=policy)
                return F.linear_cross_entropy(rows, weight, target, ignore_index=IGNORED, options=chosen)

            yield f"torch {policy}", by_torch
    if importlib.util.find_spec("liger_kernel") is None:
        return
    fused_loss = importlib.import_module("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy

    def by_liger(rows: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        found = fused_loss(rows, weight, target, ignore_index=IGNORED)
        return found[0] if isinstance(found, tuple) else found

    yield "liger", by_liger


class Chunked:
    """A step whose operators cut their rows for ``mib`` MiB of logits; 0: not at all."""

    def __init__(self, step: Callable[[], object], mib: int) -> None:
        self._step = step
        self._limits = dataclasses.replace(loss_chunks.LIMITS["cuda"], target_bytes=mib * MIB or 2**62)

    def __call__(self) -> None:
        before, loss_chunks.LIMITS["cuda"] = loss_chunks.LIMITS["cuda"], self._limits
        try:
            self._step()
        finally:
            loss_chunks.LIMITS["cuda"] = before


def step(loss: Loss, rows: Tensor, weight: Tensor, target: Tensor) -> None:
    rows.grad = weight.grad = None
    loss(rows, weight, target).backward()


def peak(function: Callable[[], object]) -> float:
    function()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    return (torch.cuda.max_memory_allocated() - before) / MIB


class Report:
    def __init__(self) -> None:
        self.lines: list[dict[str, object]] = []
        big = torch.empty(2**29, device="cuda")
        other = torch.empty_like(big)
        self.bytes_per_ms = 2 * big.nbytes / time_in_turn({"copy": lambda: other.copy_(big)})["copy"]
        print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, copy {self.bytes_per_ms / 1e9:.2f} TB/s")

    def add(self, name: str, functions: Mapping[str, Callable[[], object]], floor: float | None = None) -> None:
        print(name if floor is None else f"{name}: floor {floor:.3f} ms", flush=True)
        peaks = {variant: peak(function) for variant, function in functions.items()}
        for variant, time in time_in_turn(dict(functions), rounds=7, repeats=3).items():
            print(f"  {variant:<24} {time:9.3f} ms {peaks[variant]:9.0f} MiB", flush=True)
            self.lines.append({"name": name, "variant": variant, "ms": time, "peak_mib": peaks[variant]})


def chunked(name: str, function: Callable[[], object], chunks: list[int]) -> dict[str, Callable[[], object]]:
    return {f"{name} {mib or 'all'}": Chunked(function, mib) for mib in chunks}


def measure_losses(row: Row, report: Report, chunks: list[int]) -> None:
    tensors = operands(row)

    def of(loss: Loss) -> Callable[[], object]:
        return functools.partial(step, loss, *tensors)

    functions: dict[str, Callable[[], object]] = {
        "eager": of(eager),
        "inductor": of(torch.compile(eager, dynamic=False)),
        **{name: of(loss) for name, loss in others()},
        **chunked("glue", of(fused(row.trained, False)), chunks),
        "glue, predictions": of(fused(row.trained, True)),
    }
    report.add(f"{row.name}: loss", functions)


def measure_statistics(row: Row, report: Report, chunks: list[int]) -> None:
    tensors = operands(row)
    for name, loss, wants in (
        ("of each token", by_token, [True, True, False, False, False]),
        ("with entropies", with_entropy, [True, True, False, True, False]),
    ):
        functions: dict[str, Callable[[], object]] = {
            "inductor": functools.partial(step, torch.compile(loss, dynamic=False), *tensors),
            **chunked("glue", functools.partial(step, from_statistics(wants), *tensors), chunks),
        }
        report.add(f"{row.name}: {name}", functions)


def measure_kernel(row: Row, report: Report, _: list[int]) -> None:
    from glue_compiler.ops import row_losses_triton
    from glue_compiler.ops.row_losses_triton import RowBlocks

    height = 512 * MIB // (2 * row.classes)
    # The kernel writes gradients over the logits; what it reads then is small numbers, in the same time.
    logits = torch.randn(height, row.classes, device="cuda").bfloat16()
    target = torch.randint(row.classes, (height,), device="cuda")
    ones, factor, losses = (
        torch.ones(height, device="cuda"),
        torch.ones((), device="cuda"),
        torch.empty(height, device="cuda"),
    )

    def run(blocks: RowBlocks, gradient: bool) -> None:
        row_losses_triton.cross_entropy(logits, target, ones, None, factor, losses, None, 1.0, 0.0, gradient, blocks)

    sizes = [(4096, 4), (4096, 8), (8192, 8), (8192, 16), (16384, 16), (16384, 32), (32768, 32)]
    for name, gradient, moved in (("loss and gradient", True, 2), ("loss", False, 1)):
        functions = {
            f"{columns} x {warps} warps": functools.partial(run, RowBlocks(columns, warps), gradient)
            for columns, warps in sizes
        }
        report.add(f"{row.name}: {name} of {height} rows", functions, moved * logits.nbytes / report.bytes_per_ms)


def measure_products(row: Row, report: Report, chunks: list[int]) -> None:
    rows, weight, _ = (tensor.detach() for tensor in operands(row))
    dense = [torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2)]
    rate = 2 * 8192**3 / time_in_turn({"dense": lambda: dense[0] @ dense[1]})["dense"]
    for mib in chunks:
        limits = dataclasses.replace(loss_chunks.LIMITS["cuda"], target_bytes=mib * MIB or 2**62)
        height = min(row.tokens, max(limits.target_bytes // (2 * row.classes), 1))
        part, logits = rows[:height], torch.randn(height, row.classes, device="cuda").bfloat16()
        total = torch.zeros(row.classes, row.hidden, device="cuda")
        logits_out, rows_out = torch.empty_like(logits), torch.empty_like(part)
        functions: dict[str, Callable[[], object]] = {
            "logits": functools.partial(torch.mm, part, weight.t(), out=logits_out),
            "gradient of rows": functools.partial(torch.mm, logits, weight, out=rows_out),
            "gradient of weight": functools.partial(torch.mm, logits.t(), part),
            "  summed in float32": functools.partial(
                torch.addmm, total, logits.t(), part, out_dtype=torch.float32, out=total
            ),
        }
        floor = 2 * height * row.classes * row.hidden / rate
        report.add(f"{row.name}: products of {height} rows", functions, floor)


PARTS = {
    "losses": measure_losses,
    "statistics": measure_statistics,
    "kernel": measure_kernel,
    "products": measure_products,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS), help=f"of {', '.join(ROWS)}")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--chunks", default="256,512,1024,0", help="MiB of logits; 0: all rows at once")
    parser.add_argument("--json", help="also write the numbers to this file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    torch.manual_seed(0)
    report = Report()
    chunks = [int(mib) for mib in arguments.chunks.split(",")]
    for part in arguments.parts.split(","):
        for name in arguments.rows.split(","):
            PARTS[part](ROWS[name], report, chunks)
            torch.cuda.empty_cache()
            torch._dynamo.reset()
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(report.lines, file, indent=1)


if __name__ == "__main__":
    main()
