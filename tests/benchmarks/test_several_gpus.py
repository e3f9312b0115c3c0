"""The benchmark of several GPUs, on two processes of a CPU: its table, and what it says of a line that fails."""

import pytest

pytest.importorskip("transformers")

from benchmarks.several_gpus import ENGINES, line, main

TINY = ["--device", "cpu", "--compiler", "aot_eager", "--tokens", "96", "--steps", "1"]


def rows_of(capsys) -> list[list[str]]:
    lines = [each for each in capsys.readouterr().out.splitlines() if each.startswith("| qwen3")]
    return [[cell.strip() for cell in each.strip("|").split("|")] for each in lines]


@pytest.mark.slow
def test_a_line_for_each_engine_and_number_of_processes(capsys):
    main([*TINY, "--rows", "qwen3-bf16", "--variants", "glue", "--engines", "fsdp-layers,ddp", "--varying"])
    alone = rows_of(capsys)
    assert [each[1:4] for each in alone] == [["fsdp-layers", "glue", "1"], ["ddp", "glue", "1"]]
    main([*TINY, "--rows", "qwen3-bf16", "--variants", "eager", "--engines", "ddp", "--processes", "1,2"])
    one, two = rows_of(capsys)
    assert (one[3], one[7:]) == ("1", ["", ""])
    assert (two[3], two[8]) == ("2", "yes")
    assert float(two[7]) > 0


@pytest.mark.slow
def test_a_line_that_fails_says_why_and_the_next_one_is_measured(capsys):
    main([*TINY, "--rows", "qwen3-bf16", "--variants", "flex,eager", "--engines", "ddp"])
    failed, measured = rows_of(capsys)
    assert len(failed) == 5
    assert "backward" in failed[4]  # flex_attention has none on a CPU
    assert float(measured[4]) > 0


def test_an_unknown_name_is_an_error(capsys):
    with pytest.raises(SystemExit):
        main(["--engines", "ddp,fsdp"])
    assert f"unknown: fsdp; known are {', '.join(ENGINES)}" in capsys.readouterr().err


def test_scaling_is_of_one_process_and_unequal_weights_stand_out():
    found = {"ms": 20.0, "peak_gib": 1.0, "ready_s": 2.0, "equal": False}
    assert (
        line(2, ("row", "ddp", "glue"), found, {"ms": 19.0}) == "| row | ddp | glue | 2 | 20.0 | 1.0 | 2 | 0.950 | NO |"
    )
    assert line(2, ("row", "ddp", "glue"), found, {"failed": "?"}).endswith("| 2 | 20.0 | 1.0 | 2 |  | NO |")
