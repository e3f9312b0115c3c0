"""Training steps of models whose attention needs no mask, on one GPU: eager, Inductor, glue, and written by hand.

    python -m benchmarks.packed_attention [--cases mixed,mixed-varying,unpacked:4] [--variants inductor,glue]

A step is forward and backward, without an optimizer; random weights, bf16, transformers' sdpa attention except where it
is written by hand. All variants of a case compile side by side, each in its own process, and are timed one after the
other once all are ready; "--together" lets the cases compile side by side too. "graphs" counts what Dynamo captured,
"later" of them after the first step: recompiles, one of which a varying case needs. "token_us" is microseconds for a
token. "attention", "products" and "others" add up the kernels of one more step, in milliseconds.

"varlen by hand" and "flex by hand" replace the attention of every layer by torch's varlen_attn or flex_attention, with
metadata that is made outside of the model, before the clock starts; "operators by hand" calls glue's from there.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import statistics
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

DEVICE = "cuda"


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and its batches.

    ``documents``: lengths in every row; empty: not packed; ``None``: new ones each step. ``padding``: rows are half
    full to full, and padded on the right. ``least``: rows have from so many tokens to ``length``, other numbers each
    step; the graph that serves them all is compiled at the second.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_heads: int
    rows: int
    length: int
    documents: tuple[int, ...] | None
    checkpointing: bool = False
    frozen: bool = False
    lora: bool = False
    padding: bool = False
    least: int | None = None


CASES = {
    "packed": Case(1024, 3072, 28, 16, 8, 1, 8192, (512,) * 16),
    "mixed": Case(1024, 3072, 28, 16, 8, 1, 8192, None),
    "padded": Case(1024, 3072, 28, 16, 8, 4, 2048, (), padding=True),
    "unpacked": Case(4096, 12288, 16, 32, 8, 2, 8192, (), checkpointing=True, frozen=True),
    "lora": Case(5120, 17408, 40, 40, 8, 1, 8192, (1024,) * 8, lora=True),
    "mixed-varying": Case(1024, 3072, 28, 16, 8, 1, 8192, None, least=6000),
    "padded-varying": Case(1024, 3072, 28, 16, 8, 4, 2048, (), padding=True, least=1500),
    "unpacked-varying": Case(4096, 12288, 16, 32, 8, 2, 8192, (), checkpointing=True, frozen=True, least=6000),
    "lora-varying": Case(5120, 17408, 40, 40, 8, 1, 8192, None, lora=True, least=6000),
}
NAMES = {
    "packed": "Qwen3-0.6B shape, 16 documents of 512",
    "mixed": "Qwen3-0.6B shape, documents of 64 to 4096, other lengths each step",
    "padded": "Qwen3-0.6B shape, 4 rows of 1024 to 2048 tokens, padded",
    "unpacked": "8B-like, 2 x 8192 tokens, not packed, checkpointing, frozen base",
    "lora": "Qwen3-14B shape with LoRA, 8 documents of 1024",
    "mixed-varying": "Qwen3-0.6B shape, documents of 64 to 4096, 6000 to 8192 tokens",
    "padded-varying": "Qwen3-0.6B shape, 4 rows, padded to 1500 to 2048 tokens",
    "unpacked-varying": "8B-like, 2 x 6000 to 8192 tokens, not packed, checkpointing, frozen base",
    "lora-varying": "Qwen3-14B shape with LoRA, documents of 64 to 4096, 6000 to 8192 tokens",
}
KINDS = {"attention": ("sdpa", "flash", "fmha", "flex", "attention"), "products": ("gemm", "nvjet", "cutlass", "xmma")}
"""Words in the names of kernels."""
VARIANTS = ("eager", "inductor", "glue", "varlen by hand", "flex by hand", "operators by hand")


def make_model(case: Case) -> torch.nn.Module:
    from transformers import Qwen3Config, Qwen3Model

    config = Qwen3Config(
        vocab_size=1024,
        hidden_size=case.hidden,
        intermediate_size=case.intermediate,
        num_hidden_layers=case.layers,
        num_attention_heads=case.heads,
        num_key_value_heads=case.key_heads,
        head_dim=128,
        max_position_embeddings=case.length,
        attn_implementation="sdpa",
        use_cache=False,
    )
    with torch.device(DEVICE):
        model = Qwen3Model(config).to(torch.bfloat16)
    if case.frozen:
        model.requires_grad_(False)
    if case.lora:
        from peft import LoraConfig, get_peft_model

        names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        model = get_peft_model(
            model, LoraConfig(r=16, lora_alpha=16, target_modules=names), autocast_adapter_dtype=False
        )
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def random_lengths(total: int, generator: torch.Generator) -> tuple[int, ...]:
    """Document lengths of 64 to 4096 tokens, as often short as long, that fill ``total``."""
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        drawn = int(2 ** (6 + 6 * torch.rand((), generator=generator).item()))
        lengths.append(left if left < 128 else min(drawn, left - 64))
    return tuple(lengths)


def make_batches(case: Case, number: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(number):
        length = case.length
        if case.least is not None:
            length = int(torch.randint(case.least, case.length + 1, (), generator=generator))
        lengths = random_lengths(length, generator) if case.documents is None else case.documents
        batch = {"inputs_embeds": torch.randn(case.rows, length, case.hidden, device=DEVICE, dtype=torch.bfloat16)}
        if lengths:
            positions = torch.cat([torch.arange(length) for length in lengths])
            batch["position_ids"] = positions.expand(case.rows, -1).to(DEVICE)
        if case.padding:
            filled = torch.randint(length // 2, length + 1, (case.rows, 1), generator=generator)
            if case.least is not None:
                filled[0] = length  # the longest row, which the others are padded to
            batch["attention_mask"] = (torch.arange(length) < filled).long().to(DEVICE)
        batches.append(batch)
    return batches


def varlen_by_hand(case: Case) -> tuple[Callable[..., Any], Callable[[Tensor], dict[str, Any]]]:
    from torch.nn.attention.varlen import varlen_attn

    grouped = {"enable_gqa": True} if "enable_gqa" in varlen_attn.__annotations__ else {}

    def attend(
        module: Any, q: Tensor, k: Tensor, v: Tensor, _: Any, scaling: float, cu_seqlens: Tensor, **__: Any
    ) -> Any:
        length = q.shape[2]
        flat = (each.transpose(1, 2).flatten(0, 1) for each in (q, k, v))
        out = varlen_attn(*flat, cu_seqlens, cu_seqlens, length, length, scale=scaling, window_size=(-1, 0), **grouped)
        return out.view(case.rows, length, *out.shape[1:]), None

    def prepare(starts: Tensor) -> dict[str, Any]:
        cu_seqlens = torch.ops.glue.exact_document_offsets(starts)
        torch._dynamo.mark_dynamic(cu_seqlens, 0)
        return {"cu_seqlens": cu_seqlens}

    return attend, prepare


def flex_by_hand(case: Case) -> tuple[Callable[..., Any], Callable[[Tensor], dict[str, Any]]]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, block_mask: Any, scaling: float, **_: Any) -> Any:
        out = flex_attention(q, k, v, block_mask=block_mask, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2), None

    def prepare(starts: Tensor) -> dict[str, Any]:
        ids = starts.cumsum(1)

        def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (ids[b, q] == ids[b, k]) & (q >= k)

        return {"attention_mask": create_block_mask(visible, case.rows, None, *2 * (starts.shape[1],))}

    return attend, prepare


def operators_by_hand(case: Case) -> tuple[Callable[..., Any], Callable[[Tensor], dict[str, Any]]]:
    glue = torch.ops.glue

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, _: Any, scaling: float, **packed: Any) -> Any:
        if case.documents == ():
            return glue.causal_attention(q, k, v, scaling).transpose(1, 2), None
        cu_seqlens, blocks = packed["cu_seqlens"], packed["blocks"]
        out = glue.packed_attention(q, k, v, cu_seqlens, q.shape[2], True, -1, scaling, blocks)
        return out.transpose(1, 2), None

    def prepare(starts: Tensor) -> dict[str, Any]:
        cu_seqlens = glue.document_offsets(starts)
        return {"cu_seqlens": cu_seqlens, "blocks": glue.document_blocks(cu_seqlens, *starts.shape, True)}

    return attend, prepare


BY_HAND = {
    "varlen by hand": varlen_by_hand,
    "flex by hand": flex_by_hand,
    "operators by hand": operators_by_hand,
}


def make_steps(case: Case, variant: str, number: int) -> Iterator[tuple[Callable[[Callable[[], None]], None], int]]:
    """One step after the other, and its tokens; a step calls its argument between forward and backward."""
    model = make_model(case)
    batches = make_batches(case, number)
    base = model.get_base_model() if case.lora else model
    if variant in BY_HAND:
        from transformers import AttentionInterface

        attend, prepare = BY_HAND[variant](case)
        AttentionInterface.register("by_hand", attend)
        base.config._attn_implementation = "by_hand"
        for batch in batches:
            starts = torch.zeros(batch["inputs_embeds"].shape[:2], dtype=torch.bool, device=DEVICE)
            batch.update(prepare(batch["position_ids"] == 0 if "position_ids" in batch else starts))
    call = model
    if variant != "eager":
        how: dict[str, Any] = {"backend": "inductor"}
        if variant == "glue":
            how = {"backend": "glue", "options": {"passes": {"specialize_attention": True}}}
        is_one_size = case.documents is not None and case.least is None
        call = torch.compile(model, **how, fullgraph=True, dynamic=False if is_one_size else None)
    target = torch.randn(case.rows, case.length, case.hidden, device=DEVICE, dtype=torch.bfloat16)
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for batch in batches:
        embeddings = batch["inputs_embeds"].requires_grad_()

        def step(between: Callable[[], None], batch: Any = batch, embeddings: Tensor = embeddings) -> None:
            for each in (*learned, embeddings):
                each.grad = None
            hidden = call(**batch).last_hidden_state
            between()
            hidden.backward(target[:, : hidden.shape[1]])

        yield step, embeddings.shape[0] * embeddings.shape[1]


def kernel_times(step: Callable[[Callable[[], None]], None]) -> dict[str, Any]:
    """Milliseconds of one step's kernels by what they compute; ``"kernels"`` names the longest."""
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            step(lambda: None)
            torch.cuda.synchronize()
    except RuntimeError:  # where the profiler may not read the device
        return {}
    total: Counter[str] = Counter()
    longest: Counter[str] = Counter()
    for event in recorded.key_averages():
        total[kind_of_kernel(event.key.lower())] += event.self_device_time_total / 1000
        longest[event.key[:70]] += event.self_device_time_total / 1000
    return {**{f"{kind}_ms": total[kind] for kind in (*KINDS, "others")}, "kernels": dict(longest.most_common(6))}


def kind_of_kernel(name: str) -> str:
    if name.startswith(("triton_poi", "triton_red", "triton_per")):
        return "others"  # their names list the operators around them too
    return next((kind for kind, words in KINDS.items() if any(word in name for word in words)), "others")


def measure(connection: Connection, case: Case, variant: str, rounds: int) -> None:
    """Runs in a process of its own: compile, say that it is done, wait, then time the steps and send the result."""
    import glue_compiler.ops  # noqa: F401  registers torch.ops.glue

    try:
        torch.manual_seed(0)
        steps, tokens = zip(*make_steps(case, variant, 3 + rounds), strict=True)
        start = time.perf_counter()
        steps[0](lambda: None)
        torch.cuda.synchronize()
        compiling = time.perf_counter() - start
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        for step in steps[1:3]:
            step(lambda: None)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # for the others
        connection.send(None)
        connection.recv()
        torch.cuda.reset_peak_memory_stats()
        times = []
        for step in steps[3:]:
            events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
            events[0].record()
            step(events[1].record)
            events[2].record()
            events[2].synchronize()
            times.append((events[0].elapsed_time(events[1]), events[1].elapsed_time(events[2])))
        forward, backward = (statistics.median(part) for part in zip(*times, strict=True))
        peak = torch.cuda.max_memory_allocated()
        connection.send(
            {
                "forward_ms": forward,
                "backward_ms": backward,
                "step_ms": statistics.median(map(sum, times)),
                "token_us": statistics.median(sum(t) / n * 1000 for t, n in zip(times, tokens[3:], strict=True)),
                "peak_gib": peak / 2**30,
                "first_s": compiling,
                "graphs": graphs,
                "later": torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs,
                **kernel_times(steps[-1]),
            }
        )
    except Exception as error:
        connection.send(f"{type(error).__name__}: {str(error)[:400]}\n{traceback.format_exc()[-1200:]}")


Running = dict[str, tuple[multiprocessing.process.BaseProcess, Connection]]


def named_case(text: str) -> tuple[str, Case]:
    """``"packed"``, or ``"packed:4"`` for fewer layers."""
    name, _, layers = text.partition(":")
    return name, dataclasses.replace(CASES[name], layers=int(layers)) if layers else CASES[name]


def start_case(case: Case, variants: list[str], rounds: int) -> Running:
    """One process for each variant of a case; each compiles at once."""
    context = multiprocessing.get_context("spawn")
    running: Running = {}
    for variant in variants:
        ours, theirs = context.Pipe()
        process = context.Process(target=measure, args=(theirs, case, variant, rounds))
        process.start()
        theirs.close()
        running[variant] = process, ours
    return running


def wait_for_case(running: Running, limit: float) -> dict[str, str]:
    """Until all have compiled; the reasons of those that failed, or took more than ``limit`` seconds."""
    deadline = time.monotonic() + limit
    return {
        variant: failure for variant, (_, pipe) in running.items() if (failure := _received(pipe, deadline)) is not None
    }


def time_case(name: str, case: Case, running: Running, failures: dict[str, str], limit: float) -> dict[str, Any]:
    """The variants' times, one after the other, printed too."""
    print(f"{NAMES[name]}, {case.layers} layers", flush=True)
    results: dict[str, Any] = {}
    for variant, (process, pipe) in running.items():
        if variant not in failures:
            pipe.send(None)
            results[variant] = _received(pipe, time.monotonic() + limit)
        process.terminate()
        process.join()
    for variant, result in {**results, **failures}.items():
        shown = result
        if isinstance(result, dict):
            shown = "  ".join(f"{key} {value:.1f}" for key, value in result.items() if key != "kernels")
        print(f"  {variant:<18} {shown}", flush=True)
        for kernel, time_ms in result.get("kernels", {}).items() if isinstance(result, dict) else ():
            print(f"  {'':<18}   {time_ms:8.2f} ms  {kernel}", flush=True)
    return {"case": name, "layers": case.layers, **results}


def _received(pipe: Connection, deadline: float) -> Any:
    try:
        return pipe.recv() if pipe.poll(max(0.0, deadline - time.monotonic())) else "not ready in time"
    except EOFError:
        return "the process ended"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES), help=f"of {', '.join(CASES)}; 'packed:4': of 4 layers")
    parser.add_argument("--variants", default=",".join(VARIANTS), help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--rounds", type=int, default=10, help="timed steps")
    parser.add_argument("--limit", type=float, default=900, help="seconds for compiling a case's variants")
    parser.add_argument("--together", action="store_true", help="compile all cases side by side")
    parser.add_argument("--json", help="also write the numbers to this file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}", flush=True)
    variants = arguments.variants.split(",")
    limit = arguments.limit
    cases = [named_case(text) for text in arguments.cases.split(",")]
    lines = []
    for group in [cases] if arguments.together else [[each] for each in cases]:
        running = [start_case(case, variants, arguments.rounds) for _, case in group]
        failures = [wait_for_case(each, limit) for each in running]
        lines += [
            time_case(*named, processes, failed, limit)
            for named, processes, failed in zip(group, running, failures, strict=True)
        ]
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(lines, file, indent=1)


if __name__ == "__main__":
    main()
