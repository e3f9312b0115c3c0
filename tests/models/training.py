"""Training loops as users write them: tiny random models of transformers, a loss, an optimizer, batches that vary."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from glue_compiler.backend import GlueBackend
from glue_compiler.errors import GlueWarning
from glue_compiler.report.session import Session
from tests.passes.chunk_loss.exact_models import in_fp64

VOCABULARY = 64
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "use_cache": False,
}
WINDOWS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
MODELS = {
    "llama": {},
    "qwen3": {},
    "gemma3_text": WINDOWS,
    "gpt_oss": {**WINDOWS, **EXPERTS},
    "mixtral": EXPERTS,
}


def tiny(kind: str, dtype: torch.dtype = torch.float64, **settings: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind, **{**COMMON, **MODELS[kind], **settings})
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).train()
    if dtype == torch.float64:  # else the loss alone is of fp32
        model.loss_function = in_fp64("transformers.loss.loss_utils").ForCausalLMLoss
    return model


def with_lora(model: nn.Module) -> nn.Module:
    """Adapters in fp32 on a base of half precision, as peft makes them; in fp64 on one of fp64."""
    peft = pytest.importorskip("peft")
    dtype = next(model.parameters()).dtype
    adapters = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    adapted = peft.get_peft_model(model, adapters)
    return adapted.double() if dtype == torch.float64 else adapted


Batch = dict[str, Tensor]


def packed(lengths: Iterable[int], seed: int = 0) -> Batch:
    """One row of documents of these lengths, as transformers' DataCollatorWithFlattening makes it."""
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    ids = _random_ids(positions.shape, seed)
    return {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}


def padded(lengths: Iterable[int], seed: int = 0, side: str = "right") -> Batch:
    """A row for each length, padded to the longest."""
    numbers = torch.tensor(list(lengths))
    mask = (torch.arange(int(numbers.max())) < numbers[:, None]).long()
    mask = mask if side == "right" else mask.flip(1)
    ids = _random_ids(mask.shape, seed)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def packed_and_padded(rows: Iterable[tuple[int, ...]], seed: int = 0) -> Batch:
    """Rows of documents, padded on the right to the longest; padding goes on counting positions."""
    rows = list(rows)
    batch = padded(map(sum, rows), seed)
    length = batch["input_ids"].shape[1]
    positions = [torch.cat([torch.arange(n) for n in (*row[:-1], row[-1] + length - sum(row))]) for row in rows]
    return {**batch, "position_ids": torch.stack(positions)}


def _random_ids(shape: Iterable[int], seed: int) -> Tensor:
    return torch.randint(3, VOCABULARY, tuple(shape), generator=torch.Generator().manual_seed(seed))


TOLERANCE = 1e-10


@dataclass
class Training:
    """A model compiled by glue beside a copy that stays eager; both learn the same.

    Attributes:
        around: the context of each forward.
        compiled: what is called; ``model`` itself, where its layers were compiled one by one.
        caught: warnings of glue.
    """

    model: nn.Module
    compile: Callable[[nn.Module, dict[str, Any]], nn.Module] = lambda model, how: torch.compile(model, **how)
    dynamic: bool | None = None
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    caught: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.eager = copy.deepcopy(self.model)
        self.session = Session()
        how = {"backend": GlueBackend(session=self.session), "options": {"compiler": "aot_eager"}}
        self.compiled = self.compile(self.model, {**how, "dynamic": self.dynamic})
        self.optimizers = [
            torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
            for model in (self.model, self.eager)
        ]

    def train(self, batches: Iterable[Batch]) -> None:
        """One step on each; loss, logits and every gradient are those of eager."""
        for batch in batches:
            with self._watched():
                actual = self._step(self.model, self.compiled, batch)
            expected = self._step(self.eager, self.eager, batch)
            assert actual.keys() == expected.keys()
            assert len(actual) > 10
            for name, want in expected.items():
                got = actual[name]
                assert (got is None) == (want is None), name
                if want is not None and got is not None:
                    assert (got - want).abs().max() <= TOLERANCE * (1e-3 + want.abs().max()), name
            for optimizer in self.optimizers:
                optimizer.step()

    def evaluate(self, batch: Batch) -> None:
        with torch.no_grad(), self._watched(), self.around():
            actual = self.compiled.eval()(**batch)
        with torch.no_grad(), self.around():
            expected = self.eager.eval()(**batch)
        self.compiled.train(), self.eager.train()
        torch.testing.assert_close(actual.logits, expected.logits, rtol=TOLERANCE, atol=TOLERANCE)

    def _step(self, model: nn.Module, call: nn.Module, batch: Batch) -> dict[str, Tensor | None]:
        for parameter in model.parameters():
            parameter.grad = None
        with self.around():
            out = call(**batch)
        out.loss.backward()
        gradients = {name: p.grad if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        return {"loss": out.loss.detach(), "logits": out.logits.detach(), **gradients}

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
        self.caught += [str(each.message) for each in caught if issubclass(each.category, GlueWarning)]

    @property
    def rewrites(self) -> list[dict[str, int]]:
        """Of each compile the rewrites by kind; a frame that torch converts again before it runs counts once."""
        found: dict[str, dict[str, int]] = {}
        for graph in self.session.graphs:
            assert not any(report.error for report in graph.passes)
            counts: Counter[str] = Counter()
            for report in graph.passes:
                counts.update(report.counts)
            found[str(graph.compile_id).partition("_")[0]] = dict(counts)
        return list(found.values())

    @property
    def attentions(self) -> list[dict[str, int]]:
        """Of each compile the attentions by the form that they took."""
        forms = ("unmasked", "causal", "packed", "listed")
        return [{form: counts[form] for form in forms if form in counts} for counts in self.rewrites]
