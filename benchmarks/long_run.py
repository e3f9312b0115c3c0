"""Thousands of steps of one model: does memory stay as it is, does nothing compile again, is the loss eager's?

    python -m benchmarks.long_run [--steps 5000] [--tokens 1024] [--runs glue:0,eager:0,eager:1]

Qwen3-0.6B's shape in bf16, checkpointed, learns the bytes of this repository's pages and of the installed packages'
sources; each step has other documents and another total. Each run has a seed, for its first weights and its batches.
It evaluates 5 times in its first 20 steps, and then each 200. ``glue`` has layers in regions within a memory budget.
Its run is in three processes: the first is killed (SIGKILL) while it compiles, the second in the middle of a save, and
the third goes on from what the second had saved halfway, with the caches that both have left.

Columns: ms of a step (median); GiB of the process and of tensors on the device after a tenth of its process's steps,
and at the end; how many graphs were compiled behind a process's 20th step; the held-out loss at the end, and the mean
distance of the held-out losses from those of ``eager:0``, over the second half of what both have done.

On a CPU, to test the code: ``--device cpu --compiler aot_eager --steps 60 --tokens 128``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import random
import signal
import statistics
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.end_to_end_rows import SHAPES, TINY

ROOT = Path(__file__).resolve().parents[1]
FIRST = 20
"""Steps in which both lengths of each mode are seen."""
EVALUATED = (3, 6, 9, 12, 15)
EVERY = 200
GIB = 2**30
COLUMNS = (
    *("ms", "host GiB, early", "at the end", "device GiB, early", "at the end"),
    *("compiled late", "held-out loss", "distance"),
)


def corpus() -> bytes:
    """A few MiB of text; its last part is held out."""
    packages = Path(sysconfig.get_paths()["purelib"])
    files = [*sorted(ROOT.glob("docs/*.md")), *sorted(packages.glob("t*/**/*.py"))]
    text = bytearray()
    for file in files:
        text += file.read_bytes()
        if len(text) > 16 << 20:
            break
    return bytes(text)


class Batches:
    """Packed documents of bytes: batch ``number`` of a seed is the same in each process."""

    def __init__(self, seed: int, tokens: int, device: str) -> None:
        self.seed, self.tokens, self.device = seed, tokens, device
        text = torch.frombuffer(bytearray(corpus()), dtype=torch.uint8)
        self.held_out = len(text) // 20
        self.text = text.long()

    def batch(self, number: int, is_held_out: bool = False) -> dict[str, Tensor]:
        draw = random.Random(f"{0 if is_held_out else self.seed} {number} {is_held_out}")
        total = draw.randint(self.tokens * 5 // 8, self.tokens)
        ids, positions, labels = [], [], []
        while total > 0:
            length = min(total, draw.randint(16, self.tokens // 2))
            border = len(self.text) - self.held_out
            low, high = (border, len(self.text)) if is_held_out else (0, border)
            start = draw.randrange(low, high - length)
            document = self.text[start : start + length]
            ids.append(document)
            positions.append(torch.arange(length))
            labels.append(torch.cat([document.new_tensor([-100]), document[1:]]))
            total -= length
        made = {"input_ids": ids, "position_ids": positions, "labels": labels}
        return {name: torch.cat(parts)[None].to(self.device) for name, parts in made.items()}


class Training:
    """A model, its optimizer, and the file with its state."""

    def __init__(self, kind: str, seed: int, arguments: argparse.Namespace) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self.arguments, self.device = arguments, arguments.device
        settings = dict(SHAPES["qwen3"]) | (TINY if self.device == "cpu" else {})
        if arguments.layers:
            settings["num_hidden_layers"] = arguments.layers
        special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
        config = AutoConfig.for_model("qwen3", use_cache=False, **special, **settings)
        torch.manual_seed(seed)
        with torch.device(self.device):
            self.model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=arguments.rate, fused=self.device == "cuda")
        self.batches = Batches(seed, arguments.tokens, self.device)
        if kind == "glue":
            options = {"memory_budget": arguments.budget, "compiler": arguments.compiler}
            self.model.compile(backend="glue", options=options)

    def load(self, file: Path) -> int:
        """The step that comes next."""
        state = torch.load(file, map_location=self.device)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        return int(state["step"])

    def save(self, file: Path, step: int) -> None:
        """A file that is there is whole."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": step}
        torch.save(state, file.with_suffix(".new"))
        file.with_suffix(".new").replace(file)

    def step(self, number: int) -> float:
        start = time.perf_counter()
        self.model(**self.batches.batch(number)).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def held_out_loss(self) -> float:
        self.model.eval()
        with torch.no_grad():
            losses = [self.model(**self.batches.batch(number, True)).loss.item() for number in range(4)]
        self.model.train()
        return statistics.fmean(losses)


def memory(device: str) -> dict[str, float]:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    host = pages * os.sysconf("SC_PAGE_SIZE") / GIB
    return {"host": host, "device": torch.cuda.memory_allocated() / GIB if device == "cuda" else 0.0}


def train(kind: str, seed: int, folder: str, until: int, arguments: argparse.Namespace) -> None:
    """From what was saved on, a line of JSON for each step. Saves in the middle."""
    warnings.simplefilter("ignore")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/caches"
    torch.set_num_threads(1)
    training = Training(kind, seed, arguments)
    file, middle = Path(folder, "state.pt"), arguments.steps // 2
    first = training.load(file) if file.exists() else 0
    with Path(folder, "steps.jsonl").open("a", buffering=1) as log:
        for number in range(first, until):
            found: dict[str, Any] = {"step": number, "of_process": number - first, "seconds": training.step(number)}
            if number - first in EVALUATED or (number + 1) % EVERY == 0 or number + 1 == arguments.steps:
                found["loss"] = training.held_out_loss()
            found["graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            log.write(json.dumps(found | memory(arguments.device)) + "\n")
            if number + 1 == middle and kind == "glue":
                training.save(file, middle)
            if number + 1 == until and until < arguments.steps:
                training.save(Path(folder, "later.pt"), until)  # it is killed in here
                time.sleep(60)


def run(kind: str, seed: int, folder: Path, arguments: argparse.Namespace) -> Iterator[None]:
    """Each ``next`` is a look at how far it is."""
    context = multiprocessing.get_context("spawn")

    def started(until: int) -> Any:
        process = context.Process(target=train, args=(kind, seed, str(folder), until, arguments), daemon=True)
        process.start()
        return process

    def killed(process: Any) -> None:
        os.kill(process.pid, signal.SIGKILL)
        process.join()

    if kind == "glue":
        process = started(arguments.steps)
        while process.is_alive() and sum(1 for _ in (folder / "caches").rglob("*.py")) < 1:
            yield
        killed(process)
        process = started(arguments.steps // 2 + FIRST)
        while process.is_alive() and not list(folder.glob("later*")):
            yield
        killed(process)
    process = started(arguments.steps)
    while process.is_alive():
        yield
    process.join()


def lines_of(folder: Path) -> list[dict[str, Any]]:
    file = folder / "steps.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """The last that was done of each number."""
    return list({each["step"]: each for each in lines_of(folder)}.values())


def compiled_late(folder: Path) -> int:
    """Graphs that a process compiled behind its first steps."""
    late = 0
    for before, after in itertools.pairwise(lines_of(folder)):
        if after["of_process"] == before["of_process"] + 1 and after["of_process"] > FIRST:
            late += after["graphs"] - before["graphs"]
    return late


def losses_of(found: Sequence[dict[str, Any]], after: int) -> dict[int, float]:
    return {each["step"]: each["loss"] for each in found if "loss" in each and each["step"] >= after}


def line(name: str, found: Sequence[dict[str, Any]], late: int, reference: Sequence[dict[str, Any]]) -> str:
    if not found:
        return f"| {name} | did not train |"
    last_process = found[-1]["step"] - found[-1]["of_process"]
    own = [each for each in found if each["step"] >= last_process]
    early, end = own[len(own) // 10], own[-1]
    half = min(found[-1]["step"], reference[-1]["step"] if reference else 0) // 2
    losses, others = losses_of(found, half), losses_of(reference, half)
    both = losses.keys() & others.keys()
    distance = statistics.fmean(abs(losses[step] - others[step]) for step in both) if both else float("nan")
    cells = [
        f"{statistics.median(each['seconds'] for each in found) * 1e3:.1f}",
        *(f"{each[place]:.3f}" for place in ("host", "device") for each in (early, end)),
        str(late),
        f"{next(each['loss'] for each in reversed(found) if 'loss' in each):.4f}",
        f"{distance:.4f}",
    ]
    return f"| {name} | {len(found)} | {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", default="glue:0,eager:0,eager:1", help="side by side")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--tokens", type=int, default=1024, help="in a step, at most")
    parser.add_argument("--layers", type=int, help="28 by default")
    parser.add_argument("--budget", default="12GiB", help="glue's memory_budget")
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--limit", type=float, default=3600, help="seconds; what is done by then is printed")
    parser.add_argument("--compiler", default="inductor", choices=("inductor", "aot_eager"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    arguments = parser.parse_args(argv)
    names = arguments.runs.split(",")
    end = time.monotonic() + arguments.limit
    with tempfile.TemporaryDirectory() as top:
        folders = {name: Path(top, name.replace(":", "-")) for name in names}
        runs = {}
        for name, folder in folders.items():
            folder.mkdir()
            kind, _, seed = name.partition(":")
            runs[name] = run(kind, int(seed or 0), folder, arguments)
        while runs and time.monotonic() < end:
            for name in [name for name, each in runs.items() if next(each, "ended") == "ended"]:
                del runs[name]
            time.sleep(0.02)
        found = {name: steps_of(folder) for name, folder in folders.items()}
        print(f"| run | steps | {' | '.join(COLUMNS)} |\n|{'---|' * (2 + len(COLUMNS))}")
        for name, steps in found.items():
            print(line(name, steps, compiled_late(folders[name]), found.get("eager:0", [])), flush=True)
        for name, steps in found.items():
            losses = losses_of(steps, 0)
            picked = sorted(losses)[:: max(1, len(losses) // 12)]
            print(name, " ".join(f"{step + 1}:{losses[step]:.3f}" for step in picked))


if __name__ == "__main__":
    main()
