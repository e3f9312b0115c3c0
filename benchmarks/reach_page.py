"""The page that ``benchmarks.reach --page`` writes: a summary by outcome and by reason, and a line for each family."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable

import torch

from benchmarks.reach_case import Case, Result
from benchmarks.reach_configs import families

INTRODUCTION = """# Reach

What glue does to every family of models that transformers maps to a causal, masked, encoder-decoder or multimodal
language model. This page is written by

```
python -m benchmarks.reach                            # results, in build/reach.jsonl
python -m benchmarks.reach --page docs/reach.md       # this page
```

Each model is tiny and has random weights: its family's default configuration with small sizes, one layer of each
kind, dropout zero. Multimodal models get text alone. `compiler="aot_eager"` on a CPU, weights in fp64 where the
family runs in fp64; experts are the loops of transformers' `experts_implementation="eager"`. A case is right if the
loss, every gradient and which gradients are None are eager's (without gradients: the outputs), to 1e-4 of a tensor's
largest number: models in fp64 round to fp32 in norms and losses.

**What is counted.** An attention is sdpa, or softmax between two products. It is specialised if glue wrote it without
its mask, over documents, or over block lists of the mask; sdpa that the model calls without a mask needs nothing.
Whether that pays is not asked on a CPU: on a GPU rows under 256 tokens, and masks that are read with under 1024
queries, are left alone, and so are sizes of heads and dtypes that its kernels do not have. Kernels of a GPU do not
run here: this table is about what is proved, and that it is right.

Families with attention that stays as it is are listed under the reason;
[what is left alone](specialize_attention.md) says of each what is in the way. `torch fails` is what fails, or differs
from eager, under `backend="aot_eager"` too. `not built` and `eager fails` are of this benchmark: what a family needs
beside text, a package that is not installed (`pip install pillow scipy` is enough for all but those that need timm), or
sizes that do not fit each other. A case that was not run is an empty cell.

Of batches, "packed" is one row of three documents told apart by `position_ids`, "padded" two rows and an
`attention_mask`, "plain" neither. A batch that a family's forward does not take is left out.
"""


def page(results: dict[str, Result]) -> str:
    """``results`` by case."""
    by_case = {Case(*name.split("/")): result for name, result in results.items()}  # type: ignore[arg-type]
    taken = {case: result for case, result in by_case.items() if result.status != "not taken"}
    parts = [INTRODUCTION, f"torch {torch.__version__.partition('+')[0]}, transformers {_transformers()}.", ""]
    parts += ["## Outcomes", "", *_outcomes(taken), ""]
    parts += ["## Why attention is left alone", "", *_reasons(taken, "specialize_attention"), ""]
    parts += ["## Why experts' loops are left alone", "", *_reasons(taken, "group_experts"), ""]
    parts += ["## Why the loss is left alone", "", *_reasons(taken, "chunk_loss"), ""]
    parts += ["## Passes that failed", "", *_failures(taken), ""]
    parts += ["## Families", "", *_families(taken), ""]
    return "\n".join(parts)


def _transformers() -> str:
    import transformers

    return transformers.__version__


def _table(header: Iterable[str], rows: Iterable[Iterable[object]]) -> list[str]:
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines]


def _outcomes(cases: dict[Case, Result]) -> list[str]:
    statuses = list(dict.fromkeys(["right", "wrong", "failed", *(r.status for r in cases.values())]))
    rows = []
    for kind in dict.fromkeys(case.kind for case in cases):
        of_kind = {case: result for case, result in cases.items() if case.kind == kind}
        counts = Counter(result.status for result in of_kind.values())
        with_attention = {case.family for case, result in of_kind.items() if _written(result)}
        done = {case.family for case in of_kind if case.family in with_attention} - {
            case.family for case, result in of_kind.items() if result.specialised < _masked(result)
        }
        known = f"{len({case.family for case in of_kind})} of {len(families(kind))}"
        rows.append([kind, known, *(counts[s] for s in statuses), f"{len(done)} of {len(with_attention)}"])
    return _table(["kind", "families run", *(f"cases {s}" for s in statuses), "all attention specialised"], rows)


def _written(result: Result) -> int:
    return sum(result.attentions.values())


def _masked(result: Result) -> int:
    return result.attentions.get("mask", 0) + result.attentions.get("softmax", 0)


def _reasons(cases: dict[Case, Result], name: str) -> list[str]:
    found: dict[str, set[str]] = defaultdict(set)
    for case, result in cases.items():
        for pass_name, reason, _ in result.skips:
            if pass_name == name:
                found[_general(reason)].add(case.family)
    if not found:
        return ["None is."]
    ordered = sorted(found.items(), key=lambda each: (-len(each[1]), each[0]))
    return _table(["families", "reason", "which"], ([len(f), reason, ", ".join(sorted(f))] for reason, f in ordered))


def _general(reason: str) -> str:
    """A reason without what differs from graph to graph: names of nodes, numbers, lines of code."""
    reason = re.sub(r"'[^']*'", "…", reason)
    reason = re.sub(r"\b[a-z_]*_?\w*\([^()]*\)", "…", reason)
    return re.sub(r"\b\d+(\.\d+)?\b", "n", reason)


def _failures(cases: dict[Case, Result]) -> list[str]:
    rows = [[case.family, case.batch, failure] for case, result in cases.items() for failure in result.failures]
    rows += [[c.family, c.batch, result.why] for c, result in cases.items() if result.status in ("failed", "wrong")]
    return _table(["family", "batch", "what"], rows) if rows else ["None did."]


def _families(cases: dict[Case, Result]) -> list[str]:
    ways = list(dict.fromkeys(_way(case) for case in cases))
    lines: dict[tuple[str, str], dict[str, Result]] = defaultdict(dict)
    for case, result in cases.items():
        lines[case.family, case.kind][_way(case)] = result
    rows = []
    for (family, kind), found in sorted(lines.items()):
        cells = [_cell(found[way]) if way in found else "" for way in ways]
        rows.append([f"`{family}`", kind, *cells, _experts(found.values()), _seconds(found.values())])
    return [
        "Attention by form; `left` is attention that stays as it is. Breaks of the graph are torch's.",
        "",
        *_table(["family", "kind", *ways, "experts", "seconds"], rows),
    ]


def _way(case: Case) -> str:
    """A case but its family, without what is the default."""
    others = [each for each in (case.attention, case.mode, case.scope) if each not in ("default", "training", "whole")]
    return " ".join([case.batch, *others])


def _cell(result: Result) -> str:
    if result.status != "right":
        short = result.why.replace("`", "").replace("\n", " ")
        return f"{result.status}: {short[:110]}"
    forms = [
        f"{result.rewrites[form]} {form}"
        for form in ("unmasked", "causal", "packed", "listed")
        if form in result.rewrites
    ]
    if without := result.attentions.get("without", 0):
        forms.append(f"{without} without mask")
    if (left := _masked(result) - result.specialised) > 0:
        forms.append(f"{left} left")
    text = ", ".join(forms) or "no attention"
    if result.breaks:
        text += f"; {result.breaks} breaks"
    return text + ("; **a pass failed**" if result.failures else "")


def _experts(results: Iterable[Result]) -> str:
    rewrites = Counter[str]()
    for result in results:
        rewrites |= Counter(result.rewrites)
    names = {"loops_grouped": "grouped", "loops_sliced": "sliced", "fallbacks_replaced": "products"}
    return ", ".join(f"{rewrites[name]} {word}" for name, word in names.items() if rewrites[name])


def _seconds(results: Iterable[Result]) -> str:
    return f"{sum(result.seconds for result in results):.0f}"
