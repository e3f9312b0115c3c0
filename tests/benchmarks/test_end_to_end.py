"""The whole-step benchmark: totals that vary, the same batches for all variants, a table in spite of failures."""

from unittest import mock

import pytest

pytest.importorskip("transformers")

from benchmarks.end_to_end import Running, Size, Trainer, print_table

TINY = Size(tokens=160, least=100, layers=1, is_tiny=True)


def test_totals_vary_and_all_variants_see_the_same_batches():
    steps = {
        row: [list(Trainer(row, "eager", TINY, "cpu", "aot_eager").steps(3, varies)) for varies in (False, True)]
        for row in ("qwen3-bf16", "qwen3-autocast")
    }
    for fixed, varying in steps.values():
        assert [step.tokens for step in fixed] == [160] * 3
        assert len({step.tokens for step in varying}) > 1
        assert all(100 <= step.tokens < 160 for step in varying)
    one, other = steps.values()
    assert [step.tokens for step in one[1]] == [step.tokens for step in other[1]]
    assert [step.loss for step in one[1]] == pytest.approx([step.loss for step in other[1]], rel=0.01)


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
