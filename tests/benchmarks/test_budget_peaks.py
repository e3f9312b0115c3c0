"""The benchmark of memory budgets, on a CPU: its table, and what it counts."""

import pytest

pytest.importorskip("transformers")

from benchmarks.budget_peaks import GIB, line, main


def found(budget, *peaks):
    return {"budget": int(budget * GIB), "peaks": [int(peak * GIB) for peak in peaks], "seconds": 1.0}


def test_a_step_above_its_budget_is_counted_and_shares_are_of_steps_that_were_planned():
    lines = line("a row", [found(10, 9.9, 9.9, 9.5, 9.0), found(12, 5, 5, 12.5, 11), found(16, 5, 5, 12, 13)])
    assert lines == "| a row | 3 | 10.00 to 16.00 | 12 | 1 | 0.812 | 0.950 |"


def test_a_row_that_was_not_ready_says_so():
    assert line("a row", []) == "| a row | nothing was measured in time |"


def test_an_unknown_row_is_an_error(capsys):
    with pytest.raises(SystemExit):
        main(["--rows", "qwen3@64"])
    assert "there is no row 'qwen3@64'; known are qwen3-bf16, " in capsys.readouterr().err


@pytest.mark.slow
def test_a_line_for_each_row(capsys):
    rows = ["--rows", "qwen3-8b-lora@128x5"]
    main(["--device", "cpu", "--compiler", "aot_eager", "--budgets", "1", "--steps", "3", *rows])
    (row,) = [each for each in capsys.readouterr().out.splitlines() if each.startswith("| qwen3")]
    assert row == "| qwen3-8b-lora@128x5 | 1 | 1.00 to 1.00 | 3 | 0 | 0.000 | 0.000 |"
