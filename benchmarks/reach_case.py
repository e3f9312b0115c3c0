"""One case of ``benchmarks.reach``: a tiny model, a batch and a way to compile it, beside the same in eager."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from benchmarks.reach_configs import LENGTH, Kind, NotBuilt, Tiny, tiny_model
from glue_compiler.backend import GlueBackend
from glue_compiler.errors import GlueWarning
from glue_compiler.report.session import Session

TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-3}
"""Of the largest number of a tensor, by dtype of the weights; models in fp64 round to fp32 in norms and losses."""
MIXED = "its parts are of several dtypes"
FORMS = ("unmasked", "causal", "packed", "listed")
Status = Literal["right", "wrong", "failed", "torch fails", "eager fails", "not built", "not taken", "out of time"]
"""``failed``: with glue alone. ``torch fails``: without glue it fails, or is wrong, too. ``not taken``: the batch."""


@dataclasses.dataclass(frozen=True)
class Case:
    """``batch``: packed, padded, plain. ``mode``: training, no_grad. ``scope``: whole, layers, regions.

    ``attention``: "eager", or "default": sdpa where the family has it.
    """

    family: str
    kind: Kind
    attention: str = "default"
    batch: str = "packed"
    mode: str = "training"
    scope: str = "whole"

    @property
    def name(self) -> str:
        return "/".join(dataclasses.astuple(self))


@dataclasses.dataclass
class Result:
    """What became of a case.

    Attributes:
        error: of a tensor that differs most, relative to its largest number; None: nothing was compared.
        why: which tensor that is, or what was raised, or why there is no model.
        rewrites: by kind, over all graphs.
        regions: what each compile was of.
        attentions: in the graphs that were captured: sdpa with a ``mask``, ``without`` one, and ``softmax`` of scores.
        skips: (pass, reason, number).
        failures: of passes.
    """

    case: str
    status: Status
    why: str = ""
    error: float | None = None
    graphs: int = 0
    breaks: int = 0
    rewrites: dict[str, int] = dataclasses.field(default_factory=dict)
    skips: list[tuple[str, str, int]] = dataclasses.field(default_factory=list)
    failures: list[str] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)
    capture: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    attention: str = ""
    dtype: str = ""

    attentions: dict[str, int] = dataclasses.field(default_factory=dict)
    regions: list[str] = dataclasses.field(default_factory=list)

    @property
    def specialised(self) -> int:
        """Attentions that took another form."""
        return sum(self.rewrites.get(form, 0) for form in FORMS)


class _Counting(GlueBackend):
    """Counts the attentions of each graph before glue changes it."""

    def __init__(self, session: Session) -> None:
        super().__init__(session=session)
        self.found: dict[Any, Counter[str]] = {}

    def __call__(self, gm: fx.GraphModule, example_inputs: Any, **settings: Any) -> Callable[..., Any]:
        modules = [module for module in gm.modules() if isinstance(module, fx.GraphModule)]
        kinds = (_attention(node) for module in modules for node in module.graph.nodes)
        self.found[torch._guards.CompileContext.current_compile_id()] = Counter(each for each in kinds if each)
        return super().__call__(gm, example_inputs, **settings)


def _attention(node: fx.Node) -> str | None:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name == "scaled_dot_product_attention":
        mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
        return "without" if mask is None else "mask"
    shape = getattr(node.meta.get("example_value"), "shape", ())
    is_of_scores = len(shape) in (3, 4) and all(size >= LENGTH for size in shape[-2:])
    return "softmax" if name == "softmax" and is_of_scores else None


def run_case(case: Case) -> Result:
    start = time.perf_counter()
    torch._dynamo.reset()
    try:
        result = _run(case)
    except NotBuilt as reason:
        result = Result(case.name, "not built", str(reason))
    result.seconds = round(time.perf_counter() - start, 1)
    return result


def _run(case: Case) -> Result:
    """Some models do not run in fp64, and some compute a part of an attention in fp32, which is left alone in fp64."""
    for dtype in TOLERANCES:
        result = _run_in(dtype, case)
        if result.status != "eager fails" and not any(MIXED in reason for _, reason, _ in result.skips):
            break
        torch._dynamo.reset()
    return result


def _run_in(dtype: torch.dtype, case: Case) -> Result:
    attention, repeats = None if case.attention == "default" else case.attention, 4 if case.scope == "regions" else 1
    tiny = tiny_model(case.family, case.kind, attention, dtype, repeats)
    inputs = batch_for(case, tiny)
    if inputs is None:
        return Result(case.name, "not taken")
    eager, alone = copy.deepcopy(tiny.model), copy.deepcopy(tiny.model)
    try:
        expected = _outcome(eager, eager, inputs, case.mode)
    except Exception as error:
        return Result(case.name, "eager fails", _first_line(error))
    session = Session()
    backend = _Counting(session=session)
    result = Result(case.name, "right", attention=tiny.attention, dtype=str(dtype))
    regions = "auto" if case.scope == "regions" else "whole"
    how = {"backend": backend, "options": {"compiler": "aot_eager", "regions": regions}}
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            actual = _outcome(tiny.model, _compiled(tiny.model, case, how), inputs, case.mode)
    except Exception as error:
        result.status, result.why = "failed", _first_line(error)
    else:
        result.error, result.why = _difference(actual, expected)
        result.status = "right" if result.error <= TOLERANCES[dtype] else "wrong"
        _read(session, result)
        result.attentions = dict(sum(backend.found.values(), Counter()))
        result.warnings = sorted({str(w.message)[:300] for w in caught if issubclass(w.category, GlueWarning)})
    if result.status in ("wrong", "failed"):
        _ask_torch(alone, case, inputs, expected, TOLERANCES[dtype], result)
    return result


def _ask_torch(
    model: nn.Module, case: Case, inputs: dict[str, Tensor], expected: Outcome, tolerance: float, result: Result
) -> None:
    """Does the same happen without glue?"""
    torch._dynamo.reset()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = _outcome(model, _compiled(model, case, {"backend": "aot_eager"}), inputs, case.mode)
        error, what = _difference(found, expected)
        if error > tolerance:
            result.status, result.why = "torch fails", f"aot_eager differs too, by {error:.1e} in {what}"
    except Exception as error:
        result.status, result.why = "torch fails", _first_line(error)


def batch_for(case: Case, tiny: Tiny) -> dict[str, Tensor] | None:
    """A batch of token ids; None: the model's forward does not take one of that kind."""
    takes = tiny.takes
    generator = torch.Generator().manual_seed(1)
    rows = 1 if case.batch == "packed" else 2
    ids = torch.randint(10, tiny.vocabulary, (rows, LENGTH), generator=generator)
    found, labels = {"input_ids": ids}, ids
    if case.batch == "packed":
        # Rows of an encoder, or positions of an image, are not told apart by position_ids.
        if "position_ids" not in takes or case.kind == "encoder-decoder":
            return None
        found["position_ids"] = torch.cat([torch.arange(n) for n in (13, 5, LENGTH - 18)])[None]
        labels = ids.masked_fill(found["position_ids"] == 0, -100)
    elif case.batch == "padded":
        if "attention_mask" not in takes:
            return None
        found["attention_mask"] = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [LENGTH - 11]])).long()
        labels = ids.masked_fill(found["attention_mask"] == 0, -100)
    if "labels" in takes:
        found["labels"] = labels
    return found


def _compiled(model: nn.Module, case: Case, how: dict[str, Any]) -> nn.Module:
    if case.scope != "layers":
        compiled: nn.Module = torch.compile(model, **how)
        return compiled
    layers = list(_layers(model))
    if not layers:
        raise NotBuilt("it has no layers that checkpointing knows")
    for layer in layers:
        layer.compile(**how)
    return model


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            yield module


Outcome = dict[str, Tensor | None]


def _outcome(model: nn.Module, call: Callable[..., Any], inputs: dict[str, Tensor], mode: str) -> Outcome:
    """The loss and every gradient, by name; or, without gradients, the output's tensors."""
    torch.manual_seed(2)
    if mode == "no_grad":
        model.eval()
        with torch.no_grad():
            found = call(**inputs)
        return {f"output {i}": each for i, each in enumerate(_tensors(found))}
    found = call(**inputs)
    loss = _loss(found)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return {"loss": loss.detach(), **gradients}


def _loss(output: Any) -> Tensor:
    loss: Tensor | None = getattr(output, "loss", None)
    if loss is not None:
        return loss
    numbers = [each for each in _tensors(output) if each.requires_grad]
    return torch.stack([each.double().pow(2).mean() for each in numbers]).sum()


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, dict):
        for each in output.values():
            yield from _tensors(each)
    elif isinstance(output, list | tuple):
        for each in output:
            yield from _tensors(each)


def _difference(actual: Outcome, expected: Outcome) -> tuple[float, str]:
    """The largest, relative to the largest number of its tensor, and which tensor that is."""
    if actual.keys() != expected.keys():
        return float("inf"), f"other tensors: {sorted(actual.keys() ^ expected.keys())[:3]}"
    worst, where = 0.0, ""
    for name, want in expected.items():
        got = actual[name]
        if (got is None) != (want is None):
            return float("inf"), f"{name} is {'None' if got is None else 'not None'}"
        if got is None or want is None:
            continue
        if got.shape != want.shape:
            return float("inf"), f"{name} is of shape {tuple(got.shape)}"
        if not want.numel():
            continue
        # A gradient of rounding alone has no digits to compare.
        unlike = (got.double() - want.double()).abs().max() / max(float(want.double().abs().max()), 1e-6)
        error = float(unlike) if bool((got.isnan() == want.isnan()).all()) else float("inf")
        if error != error:
            finite = want.isfinite()
            error = float((got - want)[finite].abs().max() / 1.0) if bool(finite.any()) else 0.0
        if error > worst:
            worst, where = error, name
    return worst, where


def _read(session: Session, result: Result) -> None:
    """What glue did. Of a graph that torch converts again before it runs the last counts."""
    counts: Counter[str] = Counter()
    skips: Counter[tuple[str, str]] = Counter()
    graphs = list({str(graph.compile_id or graph.id).partition("_")[0]: graph for graph in session.graphs}.values())
    for graph in graphs:
        for report in graph.passes:
            counts.update(report.counts)
            skips.update((report.name, skip.reason) for skip in report.skips)
            if report.error:
                result.failures.append(f"{report.name}: {report.error[:300]}")
    result.graphs = len(graphs)
    result.breaks = sum(graph.graph_break is not None for graph in graphs)
    result.rewrites = dict(sorted(counts.items()))
    result.skips = [(name, reason, number) for (name, reason), number in skips.most_common()]
    result.regions = [str(graph.region) for graph in session.graphs if graph.region]
    result.capture = sorted({event.reason.splitlines()[0][:200] for event in session.capture_events})


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(itertools.chain([f"{type(error).__name__}:"], lines[:2]))[:300]
