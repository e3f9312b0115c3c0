"""The whole-step benchmark: its rows and variants, totals that vary, a table in spite of failures."""

import argparse
from unittest import mock

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks.end_to_end import ROWS, VARIANTS, Running, Size, Trainer, print_table, size_of

TINY = Size(tokens=160, least=130, layers=None, is_tiny=True)
FULL = Size(tokens=8192, least=6000, layers=None, is_tiny=False)
WEIGHTS = {
    "qwen3-bf16": (596_049_920, 596_049_920),
    "qwen3-autocast": (596_049_920, 596_049_920),
    "llama-lora": (1_235_814_400 + 3_407_872, 3_407_872),
    "llama-8b-lora": (8_030_261_248 + 41_943_040, 41_943_040),
    "gemma3-1b": (999_885_952, 999_885_952),
    "gpt-oss": (4_451_017_664, 4_451_017_664),  # 4 of 24 layers
}
"""Of a row, and how many of them are trained: as published, but for adapters and layers."""


def steps(row, variant, number=2):
    """Of so many steps with a fixed total, and as many that vary."""
    trainer = Trainer(row, variant, TINY, "cpu", "aot_eager")
    return trainer, [list(trainer.steps(number, varies)) for varies in (False, True)]


def test_totals_vary_and_all_rows_see_the_same_batches():
    (_, one), (_, other) = (steps(row, "eager", 3) for row in ("qwen3-bf16", "qwen3-autocast"))
    for fixed, varying in (one, other):
        assert [step.tokens for step in fixed] == [160] * 3
        assert len({step.tokens for step in varying}) > 1
        assert all(130 <= step.tokens < 160 for step in varying)
    assert [step.tokens for step in one[1]] == [step.tokens for step in other[1]]
    assert [step.loss for step in one[1]] == pytest.approx([step.loss for step in other[1]], rel=0.01)


@pytest.mark.parametrize("row", ROWS)
def test_a_row_has_the_shape_that_it_names(row):
    if row.endswith("-lora"):
        pytest.importorskip("peft")
    model = ROWS[row].build(FULL, "meta", "sdpa").model
    weights = [(weight.numel(), weight.requires_grad) for weight in model.parameters()]
    found = sum(size for size, _ in weights), sum(size for size, trained in weights if trained)
    assert found == WEIGHTS[row]


def of_arguments(**given):
    return argparse.Namespace(**{"tokens": None, "least": None, "layers": None, "device": "cuda", **given})


def test_a_row_names_its_own_number_of_tokens():
    assert size_of("qwen3-bf16", of_arguments()) == Size(8192, 6000, None, False)
    assert size_of("gpt-oss", of_arguments(layers=2)) == Size(2048, 1500, 2, False)
    assert size_of("gpt-oss", of_arguments(tokens=1024, least=64)) == Size(1024, 64, None, False)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_layers_compiled_one_by_one_train_as_eager_does(row):
    """But for flex_attention, which has no backward on a CPU."""
    if row.endswith("-lora"):
        pytest.importorskip("peft")
    _, expected = steps(row, "eager")
    for variant in ("glue-layers", "inductor-layers"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        _, actual = steps(row, variant)
        for compiled, eager in zip(actual, expected, strict=True):
            assert [step.loss for step in compiled] == pytest.approx([step.loss for step in eager], rel=0.02)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2, variant  # that all layers share


@pytest.mark.parametrize("variant", [name for name, each in VARIANTS.items() if each.compiler])
def test_a_variant_compiles_the_model_or_each_of_its_layers(variant):
    trainer = Trainer("qwen3-bf16", variant, TINY, "cpu", "aot_eager")
    by_layers = variant.endswith("-layers")
    assert (trainer.call is trainer.workload.model) == by_layers
    assert [layer._compiled_call_impl is not None for layer in trainer.workload.layers] == [by_layers] * 2
    attention = "flex_attention" if variant.startswith("flex") else "sdpa"
    assert trainer.workload.model.config._attn_implementation == attention


def test_a_variant_that_fails_has_its_reason_in_the_table(capsys):
    results = [
        {"failed": "RuntimeError: no such kernel"},
        dict.fromkeys(("fixed_ms", "fixed_us", "varying_us", "ratio", "peak_gib", "ready_s", "loss"), 1.25)
        | {"graphs": 2, "warnings": 0},
    ]
    print_table([Running("row", f"variant {i}", mock.Mock(), mock.Mock(), True, r) for i, r in enumerate(results)])
    lines = capsys.readouterr().out.splitlines()
    assert "no such kernel" in lines[-2]
    assert lines[-1] == "| row | variant 1 | 1.25 | 1.25 | 1.25 | 1.25 | 2 | 0 | 1.25 | 1.25 | 1.25 |"
