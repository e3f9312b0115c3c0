"""CPU seconds of the first steps of tiny models: what glue adds to Dynamo and AOTAutograd.

    python -m benchmarks.first_step [--families llama,t5] [--kinds causal,masked] [--batches packed,padded,plain]
        [--variants aot_eager,glue] [--repeat 1]

Models and batches are those of ``benchmarks.reach``, and ``images``: Qwen2.5-VL with two vision blocks and two text
layers, one step for each of three image sizes. All variants but the last compile for ``aot_eager``, so that what is
compared is in front of it:

- ``aot_eager``: torch alone;
- ``flags``: torch alone, with Dynamo's two flags for sizes and numbers that depend on data;
- ``glue``; ``no capture``: with ``options={"capture": False}``;
- ``inductor``: torch alone with its default compiler, the C++ compiler's time included.

Each step runs in a process of its own, forked from one that has compiled before. Columns: CPU seconds by variant, the
least of ``--repeat``, and their ratio to the first variant's; graphs; of ``glue`` the seconds of its passes with all
around them. The last column is glue's share of a first step with Inductor: what ``glue`` takes more than ``aot_eager``,
over ``inductor`` and that.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from benchmarks.reach import PRELOADED, names, parser_of_cases
from benchmarks.reach_case import Case, batch_for
from benchmarks.reach_configs import NotBuilt, families, tiny_model
from glue_compiler.backend import GlueBackend
from glue_compiler.capture import FLAGS
from glue_compiler.handoff.hand_off import hand_off

VARIANTS = ("aot_eager", "flags", "glue", "no capture", "inductor")
IMAGES = Case("qwen2_5_vl", "multimodal", batch="images")


def main() -> None:
    arguments = _arguments()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    columns = [f"{name} s | ratio | graphs" for name in arguments.variants]
    print(f"| case | {' | '.join(columns)} | glue's passes s | glue's share |")
    print("|---" * (3 * len(arguments.variants) + 3) + "|")
    for case in _cases(arguments):
        cells, first = [], None
        in_glue, took = "", dict[str, float]()
        for variant in arguments.variants:
            runs = [_in_a_process(context, case, variant) for _ in range(arguments.repeat)]
            if isinstance(runs[0], str):
                cells += [runs[0], "", ""]
                continue
            seconds, graphs, passes = min(run for run in runs if not isinstance(run, str))
            first = first or seconds
            took[variant] = seconds
            cells += [f"{seconds:.2f}", f"{seconds / first:.2f}", str(graphs)]
            in_glue = f"{passes:.2f}" if variant == "glue" else in_glue
        share = ""
        if took.keys() >= {"aot_eager", "glue", "inductor"}:
            more = took["glue"] - took["aot_eager"]
            share = f"{more / (took['inductor'] + more):.0%}"
        print(f"| {case.family}/{case.kind}/{case.batch} | {' | '.join(cells)} | {in_glue} | {share} |", flush=True)


def _cases(arguments: argparse.Namespace) -> Iterator[Case]:
    if "images" in arguments.batches:
        yield IMAGES
    for kind in arguments.kinds:
        for family in families(kind):
            if arguments.families and family not in arguments.families:
                continue
            yield from (Case(family, kind, batch=batch) for batch in arguments.batches if batch != "images")


def _in_a_process(context: Any, case: Case, variant: str) -> tuple[float, int, float] | str:
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(case, variant, sender), daemon=True)
    process.start()
    sender.close()
    try:
        found: tuple[float, int, float] | str = receiver.recv()
    except EOFError:
        found = "the process ended"
    process.join()
    return found


def _measure(case: Case, variant: str, sender: Connection) -> None:
    """Sends seconds, graphs, and seconds inside of glue's backend; or why there are none."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    try:
        model, batches = _model_and_batches(case)
    except Exception as error:
        sender.send(f"{type(error).__name__}: {str(error)[:60]}")
        return
    passes = 0.0

    def timed_hand_off(*args: Any) -> Callable[..., Any]:
        nonlocal passes
        start = time.process_time()
        call = hand_off(*args)
        passes -= time.process_time() - start
        return call

    class Timed(GlueBackend):
        def __call__(self, *args: Any, **settings: Any) -> Callable[..., Any]:
            nonlocal passes
            start = time.process_time()
            call = super().__call__(*args, **settings)
            passes += time.process_time() - start
            return call

    how: dict[str, Any] = {"backend": "inductor" if variant == "inductor" else "aot_eager"}
    if variant in ("glue", "no capture"):
        options = {"compiler": "aot_eager", "capture": variant == "glue"}
        how = {"backend": Timed(timed_hand_off), "options": options}
    patched = torch._dynamo.config.patch(FLAGS) if variant == "flags" else contextlib.nullcontext()
    torch._inductor.config.compile_threads = 1
    torch._inductor.config.force_disable_caches = True
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with patched:
        compiled = torch.compile(model, **how)
        start = _cpu_seconds()
        try:
            for batch in batches:
                _sum(compiled(**batch)).backward()
        except Exception as error:
            sender.send(f"{type(error).__name__}: {str(error)[:60]}")
            return
        seconds = _cpu_seconds() - start
    sender.send((seconds, torch._dynamo.utils.counters["stats"]["unique_graphs"], passes))


def _cpu_seconds() -> float:
    """Of this process and of the compilers that it ran."""
    return sum(os.times()[:4])


def _sum(found: Any) -> Tensor:
    loss = getattr(found, "loss", None)
    total: Tensor = found.logits.float().square().mean() if loss is None else loss
    return total


def _model_and_batches(case: Case) -> tuple[Any, list[dict[str, Tensor]]]:
    if case.batch == "images":
        return _with_images()
    tiny = tiny_model(case.family, case.kind, None, torch.float32)
    batch = batch_for(case, tiny)
    if batch is None:
        raise NotBuilt("it does not take such a batch")
    return tiny.model, [batch]


def _with_images() -> tuple[Any, list[dict[str, Tensor]]]:
    """Qwen2.5-VL: images of 8 by 8, 8 by 12 and 12 by 12 patches, of which four are a token."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "mrope_section": [3, 3, 2], "rope_theta": 10000.0},
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_heads": 4,
        "out_hidden_size": 64,
        "fullatt_block_indexes": [1],
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=3,
        video_token_id=4,
        vision_start_token_id=5,
        vision_end_token_id=6,
    )
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(config).train()
    batches = []
    for high, wide in ((8, 8), (8, 12), (12, 12)):
        image = [5, *[3] * (high * wide // 4), 6]
        ids = torch.tensor([[*range(10, 22), *image, *range(30, 50)]])
        pixels = torch.randn(high * wide, 3 * vision.get("temporal_patch_size", 2) * 14 * 14)
        grid = torch.tensor([[1, high, wide]])
        kinds = (ids == 3).int()
        batches.append(
            {
                "input_ids": ids,
                "attention_mask": torch.ones_like(ids),
                "mm_token_type_ids": kinds,
                "pixel_values": pixels,
                "image_grid_thw": grid,
                "labels": ids.masked_fill(ids < 10, -100),
            }
        )
    return model, batches


def _arguments() -> argparse.Namespace:
    parser = parser_of_cases(__doc__)
    parser.add_argument("--batches", type=names, default=["plain"])
    parser.add_argument("--variants", type=names, default=list(VARIANTS))
    parser.add_argument("--repeat", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
