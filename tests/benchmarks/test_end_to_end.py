"""The whole-step benchmark: its rows and variants, totals that vary, a table in spite of failures."""

import argparse
import multiprocessing
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("transformers")

from benchmarks import end_to_end
from benchmarks.end_to_end import Running, Timed, Trainer, numbers_of, print_table, run_all, size_of
from benchmarks.end_to_end_flops import step_flops
from benchmarks.end_to_end_rows import ROWS, Size
from benchmarks.end_to_end_table import COLUMNS
from benchmarks.end_to_end_variants import VARIANTS, variant_of

TINY = Size(tokens=160, least=130, layers=None, is_tiny=True)
WEIGHTS = {
    "qwen3-bf16": (596_049_920, 596_049_920),
    "qwen3-autocast": (596_049_920, 596_049_920),
    "llama-bf16": (1_235_814_400, 1_235_814_400),
    "llama-lora": (1_235_814_400 + 3_407_872, 3_407_872),
    "llama-8b-lora": (8_030_261_248 + 41_943_040, 41_943_040),
    "qwen3-8b-bf16": (1_630_556_672, 1_630_556_672),  # 2 of 36 layers
    "qwen3-lora": (596_049_920 + 10_092_544, 10_092_544),
    "llama-8b-qlora": (8_030_261_248 + 41_943_040, 41_943_040),
    "qwen3-8b-qlora": (8_190_735_360 + 43_646_976, 43_646_976),
    "qwen3-14b-qlora": (14_768_307_200 + 64_225_280, 64_225_280),
    "gemma3-1b": (999_885_952, 999_885_952),
    "qwen3-8b-lora": (8_190_735_360 + 43_646_976, 43_646_976),
    "qwen3-8b-lora-autocast": (8_190_735_360 + 43_646_976, 43_646_976),
    "qwen3-14b-lora": (14_768_307_200 + 64_225_280, 64_225_280),
    "gpt-oss": (4_451_017_664, 4_451_017_664),  # 4 of 24 layers
    "qwen3-moe": (3_114_814_464, 3_114_814_464),  # 4 of 48 layers
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


def of_arguments(**given):
    return argparse.Namespace(**{"tokens": None, "least": None, "layers": None, "device": "cuda", **given})


@pytest.mark.parametrize("row", ROWS)
def test_a_row_has_the_shape_that_it_names(row):
    if "lora" in row:
        pytest.importorskip("peft")
    if "-qlora" in row:
        pytest.importorskip("bitsandbytes")
    model = ROWS[row].build(size_of(row, of_arguments()), "meta", "sdpa").model
    weights = [(weight.numel(), weight.requires_grad) for weight in model.parameters()]
    found = sum(size for size, _ in weights), sum(size for size, trained in weights if trained)
    assert found == WEIGHTS[row.removesuffix("-padded").removesuffix("-group")]


def test_a_row_names_its_own_number_of_tokens():
    assert size_of("qwen3-bf16", of_arguments()) == Size(8192, 6000, None, False)
    assert size_of("gpt-oss", of_arguments(layers=2)) == Size(2048, 1500, 2, False)
    assert size_of("gpt-oss", of_arguments(tokens=1024, least=64)) == Size(1024, 64, 4, False)


def test_an_update_that_is_compiled_trains_as_the_fused_one():
    (compiled, found), (_, expected) = (steps("qwen3-bf16", variant, 4) for variant in ("glue-update", "glue"))
    losses = [[step.loss for kind in kinds for step in kind] for kinds in (found, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)
    assert compiled.optimizer.state[compiled.trained[0]]["step"] == 8


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_layers_compiled_one_by_one_train_as_eager_does(row):
    """But for flex_attention, which has no backward on a CPU."""
    if "lora" in row:
        pytest.importorskip("peft")
    if "-qlora" in row:
        pytest.importorskip("bitsandbytes")
    _, expected = steps(row, "eager")
    for variant in ("glue-layers", "inductor-layers"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        _, actual = steps(row, variant)
        for compiled, eager in zip(actual, expected, strict=True):
            assert [step.loss for step in compiled] == pytest.approx([step.loss for step in eager], rel=0.02)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2, variant  # that all layers share


@pytest.mark.slow
def test_regions_by_hand_train_as_eager_does(monkeypatch):
    """With sdpa: flex_attention has no backward on a CPU."""
    monkeypatch.setitem(VARIANTS, "by-hand", replace(VARIANTS["flex-regions"], attention="sdpa"))
    (_, eager), (trainer, found) = (steps("qwen3-bf16", variant) for variant in ("eager", "by-hand"))
    for compiled, expected in zip(found, eager, strict=True):
        assert [step.loss for step in compiled] == pytest.approx([step.loss for step in expected], rel=0.02)
    assert all(layer._compiled_call_impl is not None for layer in trainer.workload.layers)


HERE = [
    name
    for name, each in VARIANTS.items()
    if each.compiler and not each.attention.startswith("flash") and not each.by_regions
]


@pytest.mark.parametrize("variant", HERE)
def test_a_variant_compiles_the_model_or_each_of_its_layers(variant):
    trainer = Trainer("qwen3-bf16", variant, TINY, "cpu", "aot_eager")
    by_layers = variant.endswith("-layers")
    assert (trainer.call is trainer.workload.model) == by_layers
    assert [layer._compiled_call_impl is not None for layer in trainer.workload.layers] == [by_layers] * 2
    attention = "flex_attention" if variant.startswith("flex") else "sdpa"
    assert trainer.workload.model.config._attn_implementation == attention


def test_a_variant_that_fails_has_its_reason_in_the_table(capsys):
    numbers = dict.fromkeys(COLUMNS, 1.25) | {"graphs": 2, "warm_s": float("nan")}
    del numbers["of_peak"]  # as on a CPU
    results = [{"failed": "RuntimeError: no such kernel"}, numbers]
    names = ("row", "variant 0"), ("row", "variant 1")
    print_table([Running(*name, (), mock.Mock(), mock.Mock(), True, r) for name, r in zip(names, results, strict=True)])
    lines = capsys.readouterr().out.splitlines()
    assert "no such kernel" in lines[-2]
    cells = dict(zip(COLUMNS, lines[-1].split(" | ")[2:], strict=True))
    assert (cells["fixed_ms"], cells["graphs"], cells["of_peak"], cells["warm_s"]) == ("1.25", "2", "", "")


@pytest.mark.parametrize("lacks_memory", [True, False])
def test_what_lacked_memory_beside_others_is_tried_once_more_alone(lacks_memory, monkeypatch):
    """The second of two variants fails at first, and a third whenever it runs."""
    failed = {"failed": "no", "trace": "", "lacks_memory": lacks_memory}
    messages = {"glue": [[{"ready_s": 1.0}, {"loss": 2.0}]], "flex": [[failed], [{"ready_s": 2.0}, {"loss": 3.0}]]}
    messages["eager"] = [[failed], [failed]]
    started = []

    def start(function, schedule, caches, row, variant, *which):
        started.append(variant)
        ours, theirs = multiprocessing.Pipe()
        for message in messages[variant].pop(0):
            theirs.send(message)
        messages[f"end of {variant}"] = theirs  # open, as long as the test runs
        return mock.Mock(), ours

    monkeypatch.setattr(end_to_end, "started_process", start)
    given = of_arguments(steps=1, warm_up=1, fixed=True, limit=60.0, warm=False, kernels=0, compiler="inductor")
    found = run_all([("qwen3-bf16", variant) for variant in ("glue", "flex", "eager")], given, "caches")
    assert [each.variant for each in found] == ["glue", "flex", "eager"]
    assert started == ["glue", "flex", "eager"] + (["flex", "eager"] if lacks_memory else [])
    assert [each.result.get("loss") for each in found] == [2.0, 3.0 if lacks_memory else None, None]


def test_a_compile_that_lacked_memory_goes_on_where_it_was():
    """What else fails is an error."""
    schedule = end_to_end.Schedule(kinds=(False,))
    trainer = mock.Mock()
    trainer.steps.side_effect = [iter([Timed(3.0, 8, 1.0, 1.0)]), torch.OutOfMemoryError("full")]
    assert end_to_end.prepare(trainer, schedule) is None
    trainer.optimizer.zero_grad.assert_called_once()  # gradients are memory too
    trainer.optimizer.state.clear.assert_called_once()  # a state that is half made is an error in the next step
    trainer.steps.side_effect = [iter([Timed(2.0, 8, 1.0, 1.0)]), iter([])]
    assert end_to_end.prepare(trainer, schedule) == 2.0
    trainer.steps.side_effect = [ValueError("wrong")]
    with pytest.raises(ValueError, match="wrong"):
        end_to_end.prepare(trainer, schedule)


def test_numbers_are_of_the_middle_step_and_of_the_last_loss():
    def timed(seconds, tokens):
        return Timed(seconds, tokens, loss=seconds, flops=100.0)

    numbers = numbers_of([timed(2.0, 10), timed(8.0, 10), timed(4.0, 10)], [timed(1.0, 10), timed(1.0, 5)])
    assert (numbers["fixed_ms"], numbers["best_ms"], numbers["worst_ms"]) == (4000, 2000, 8000)
    assert (numbers["tokens_s"], numbers["flops_s"], numbers["loss"]) == (2.5, 25.0, 1.0)
    assert numbers["ratio"] == pytest.approx(0.15 / 0.4)
    assert numbers_of([timed(2.0, 10)], [])["loss"] == 2.0


@pytest.mark.parametrize("row", ["qwen3-bf16", "llama-lora", "gemma3-1b"])
def test_operations_are_those_of_a_step_of_one_document(row):
    """torch counts them while the step runs: with all pairs of a query and a key, and what is computed again."""
    if "lora" in row:
        pytest.importorskip("peft")
    if "-qlora" in row:
        pytest.importorskip("bitsandbytes")
    tokens = 24  # shorter than the window
    workload = ROWS[row].build(TINY, "cpu", "eager")
    for module in workload.model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = False
    if "-lora" in row:  # so that the first layer's input has a gradient, as is usually counted
        workload.model.enable_input_require_grads()
    ids = torch.randint(256, (1, tokens))
    with FlopCounterMode(display=False) as counted:
        workload.model(input_ids=ids, labels=ids).loss.backward()
    config = workload.config
    unseen = tokens * (tokens - 1) // 2
    heads = config.num_attention_heads * config.head_dim * config.num_hidden_layers
    expected = counted.get_total_flops() - 3 * 2 * 2 * heads * unseen
    assert step_flops(workload, [tokens]) == pytest.approx(expected, rel=0.02)


def test_operations_of_attention_are_those_that_documents_and_windows_show():
    workload = ROWS["gemma3-1b"].build(TINY, "meta", "sdpa")
    config = workload.config
    one, two = (step_flops(workload, lengths) for lengths in ([64], [32, 32]))
    pair = 3 * 2 * 2 * config.num_attention_heads * config.head_dim
    assert config.layer_types == ["sliding_attention", "full_attention"]
    # Of 64 tokens a window of 32 shows 32 * 33 / 2 + 32 * 32, and no window shows 64 * 65 / 2.
    assert one - two == pair * ((528 + 1024 + 2080) - 2 * (528 + 528))


def test_a_variant_that_plans_names_its_budget():
    assert variant_of("plan-9.6GiB-regions").options == (("memory_budget", "9.6GiB"),)
    assert dict(variant_of("plan-0.5-regions-dropped").options) == {"memory_budget": "0.5", "padding": "drop"}
    assert variant_of("glue") is VARIANTS["glue"]
    with pytest.raises(ValueError, match="no variant 'glu-layers'; did you mean 'glue-layers'"):
        variant_of("glu-layers")
