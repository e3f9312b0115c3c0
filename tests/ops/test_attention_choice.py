"""Which kernel serves an attention call, and why none does."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from glue_compiler.ops import flash_attn4
from glue_compiler.ops.attention_choice import AttentionCall, choose, sdpa_shares_heads, unsupported

HOPPER = AttentionCall("cuda", (9, 0), torch.bfloat16, 128, 128, 32, 8, 1, 8192)
CPU = AttentionCall.of(*(torch.zeros(1, heads, 10, 16) for heads in (4, 2, 2)))


def test_inductor_gets_flex_and_other_compilers_flash():
    assert choose(HOPPER, "inductor") == "flex"
    assert choose(HOPPER, "aot_eager") == "varlen"
    assert choose(CPU, "aot_eager") == "varlen"
    assert choose(CPU, "inductor") is None
    assert "is a reference" in unsupported(CPU, "inductor")


def test_fp32_on_a_gpu_is_served_by_flex_alone():
    call = dataclasses.replace(HOPPER, dtype=torch.float32)
    assert choose(call, "inductor") == "flex"
    assert choose(call, "aot_eager") is None
    assert "use bf16 or fp16, or compiler='inductor'" in unsupported(call, "aot_eager")


@pytest.mark.parametrize("compiler", ["inductor", "aot_eager"])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dropout": 0.1}, "attention dropout is 0.1"),
        ({"value_size": 64}, "values have size 64 and keys 128"),
        ({"key_heads": 5}, "5 key heads do not divide 32"),
        ({"device": "xpu"}, "no packed kernel for device 'xpu'"),
        ({"dtype": torch.int32}, "no packed kernel for torch.int32"),
        ({"dtype": torch.float64}, "no kernel for torch.float64"),
        ({"head_size": 512, "value_size": 512}, "head size 512"),
        ({"capability": (7, 5)}, "compute capability 8.0"),
    ],
)
def test_a_reason_says_why_none_serves(change, reason, compiler):
    call = dataclasses.replace(HOPPER, **change)
    assert choose(call, compiler) is None
    assert reason in unsupported(call, compiler)
    assert unsupported(HOPPER, compiler) is None


def test_small_heads_are_served_by_one_kernel_each():
    of_size = [dataclasses.replace(HOPPER, head_size=size, value_size=size) for size in (8, 20)]
    assert [choose(call, "inductor") for call in of_size] == ["varlen", "flex"]
    assert [choose(call, "aot_eager") for call in of_size] == ["varlen", None]


def test_several_rows_go_to_flex_and_unknown_sizes_to_flash():
    assert choose(dataclasses.replace(HOPPER, rows=2), "inductor") == "flex"
    for unknown in ({"rows": None}, {"length": None}):
        call = dataclasses.replace(HOPPER, **unknown)
        assert choose(call, "inductor") == "varlen"
        assert "static sizes" in unsupported(dataclasses.replace(call, dtype=torch.float32), "inductor")


def test_only_flex_leaves_single_keys_out():
    padded, on_cpu = (dataclasses.replace(call, hides_keys=True) for call in (HOPPER, CPU))
    assert choose(padded, "inductor") == choose(on_cpu, "aot_eager") == "flex"
    assert choose(dataclasses.replace(padded, rows=None, length=None), "inductor") == "flex"
    assert choose(padded, "aot_eager") is None
    assert "only compiler='inductor'" in unsupported(padded, "aot_eager")
    assert choose(on_cpu, "inductor") is None
    assert "is a reference" in unsupported(on_cpu, "inductor")
    assert choose(dataclasses.replace(padded, head_size=8, value_size=8), "inductor") is None


def test_autocast_decides_the_dtype():
    inputs = [torch.zeros(1, 2, 10, 16)] * 3
    with torch.autocast("cpu", torch.bfloat16):
        assert AttentionCall.of(*inputs).dtype == torch.bfloat16
    assert AttentionCall.of(*inputs).dtype == torch.float32


@pytest.fixture
def with_flash4(monkeypatch):
    monkeypatch.setattr(flash_attn4, "is_installed", lambda: True)


@pytest.mark.usefixtures("with_flash4")
@pytest.mark.parametrize("compiler", ["inductor", "aot_eager"])
@pytest.mark.parametrize(
    "change", [{}, {"length": None}, {"rows": None}, {"head_size": 256, "value_size": 256}], ids=str
)
def test_flash_attention_4_is_taken_where_it_is_installed(compiler, change):
    assert choose(dataclasses.replace(HOPPER, **change), compiler) == "flash4"


@pytest.mark.usefixtures("with_flash4")
@pytest.mark.parametrize(
    "change",
    [
        {"kernels": "torch"},
        {"hides_keys": True},
        {"capability": (8, 0)},
        {"length": 512},
        {"dtype": torch.float32},
        {"head_size": 20, "value_size": 20},
        {"device": "cpu", "capability": None},
    ],
    ids=str,
)
def test_what_flash_attention_4_does_not_serve_is_as_without_it(monkeypatch, change):
    call = dataclasses.replace(HOPPER, **change)
    chosen = [choose(call, compiler) for compiler in ("inductor", "aot_eager")]
    assert "flash4" not in chosen
    monkeypatch.setattr(flash_attn4, "is_installed", lambda: False)
    assert [choose(call, compiler) for compiler in ("inductor", "aot_eager")] == chosen


@pytest.mark.usefixtures("with_flash4")
@pytest.mark.parametrize("capability", [(10, 0), (12, 0)], ids=str)
def test_flash_attention_4_is_taken_on_blackwell_for_heads_that_it_serves(capability):
    for size, kernel in ((64, "flash4"), (128, "flash4"), (192, "flex"), (256, "flex")):
        call = dataclasses.replace(HOPPER, capability=capability, head_size=size, value_size=size)
        assert choose(call, "inductor") == kernel


@pytest.mark.usefixtures("with_flash4")
def test_deterministic_algorithms_do_without_flash_attention_4():
    torch.use_deterministic_algorithms(True)
    try:
        assert choose(HOPPER, "inductor") == "flex"
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("change", "shares"),
    [
        ({}, True),
        ({"head_size": 256, "value_size": 256}, True),
        ({"capability": (8, 0), "dtype": torch.float16}, True),
        ({"capability": None, "dtype": torch.float32}, True),  # off NVIDIA's cards it is as torch has it
        ({"capability": (7, 5), "dtype": torch.float16}, False),
        ({"dtype": torch.float32}, False),
        ({"head_size": 264, "value_size": 264}, False),
        ({"value_size": 64}, False),
    ],
)
def test_who_takes_fewer_key_heads_in_sdpa(change, shares):
    assert sdpa_shares_heads(dataclasses.replace(HOPPER, **change)) is shares
