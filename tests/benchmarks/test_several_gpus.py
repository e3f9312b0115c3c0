"""The benchmark of several GPUs, on two processes of a CPU: its table, and what it says of a line that fails."""

import json

import pytest

pytest.importorskip("transformers")

from benchmarks import step_streams
from benchmarks.end_to_end_rows import sized
from benchmarks.several_gpus import line, main
from benchmarks.several_gpus_ranks import Case

TINY = ["--device", "cpu", "--compiler", "aot_eager", "--steps", "1"]
CASE = Case("row", "ddp", "glue", 2)


def rows_of(capsys) -> list[list[str]]:
    lines = [each for each in capsys.readouterr().out.splitlines() if each.startswith("| qwen3")]
    return [[cell.strip() for cell in each.strip("|").split("|")] for each in lines]


@pytest.mark.slow
def test_a_line_for_each_engine_and_number_of_processes(capsys):
    cases = "qwen3-bf16@96:fsdp:glue-regions,qwen3-bf16@96:ddp:glue"
    main([*TINY, "--cases", cases, "--processes", "1", "--varying"])
    alone = rows_of(capsys)
    assert [each[1:4] for each in alone] == [["fsdp", "glue-regions", "1"], ["ddp", "glue", "1"]]
    main([*TINY, "--cases", "qwen3-bf16@96:ddp:eager", "--processes", "1,2"])
    one, two = rows_of(capsys)
    assert (one[3], one[8:]) == ("1", ["", ""])
    assert (two[3], two[9]) == ("2", "yes")
    assert float(two[8]) > 0


@pytest.mark.slow
def test_a_line_that_fails_says_why_and_the_next_one_is_measured(capsys):
    main([*TINY, "--cases", "qwen3-bf16@96:ddp:flex,qwen3-bf16@96:ddp:eager", "--processes", "1"])
    failed, measured = rows_of(capsys)
    assert len(failed) == 5
    assert "backward" in failed[4]  # flex_attention has none on a CPU
    assert float(measured[4]) > 0


@pytest.mark.slow
def test_a_process_that_runs_out_of_memory_ends_all_with_its_reason(capsys):
    main([*TINY, "--cases", "qwen3-bf16@96:fsdp:eager", "--processes", "2", "--exhaust", "--limit", "300"])
    ((*_, reason),) = rows_of(capsys)
    assert "allocate memory" in reason
    assert int(reason.partition("(after ")[2].partition(" s)")[0]) < 60


@pytest.mark.parametrize(
    ("case", "known"),
    [
        ("qwen3-bf16:fspd:glue", "there is no 'fspd'; known are fsdp, "),
        ("qwen3:ddp:glue", "there is no 'qwen3'; known are qwen3-bf16, "),
        ("qwen3-bf16:ddp:gleu", "did you mean 'glue'"),
        ("qwen3-bf16", "there is no ''; known are fsdp, "),
    ],
)
def test_an_unknown_name_is_an_error(case, known, capsys):
    with pytest.raises(SystemExit):
        main(["--cases", case])
    assert known in capsys.readouterr().err


def test_a_row_says_how_many_tokens_and_layers():
    found = [sized(row, "cuda")[1] for row in ("qwen3-moe", "qwen3-moe@2048", "qwen3-moe@2048x12")]
    assert [(size.tokens, size.layers) for size in found] == [(8192, 4), (2048, 4), (2048, 12)]


def test_scaling_is_of_one_process_and_unequal_weights_stand_out():
    found = {"ms": 20.0, "best_ms": 19.5, "peak_gib": 1.0, "ready_s": 2.0, "equal": False}
    assert line(CASE, found, {"ms": 19.0}) == "| row | ddp | glue | 2 | 20.0 | 19.5 | 1.0 | 2 | 0.950 | NO |"
    assert line(CASE, found, {"failed": "?"}).endswith("| 2 | 20.0 | 19.5 | 1.0 | 2 |  | NO |")


def kernel(name, start, end):
    return {"cat": "kernel", "name": name, "ts": start * 1e3, "dur": (end - start) * 1e3}


def test_a_step_of_several_streams_says_what_of_a_collective_is_hidden(tmp_path):
    events = [
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 9e9},
        kernel("ncclDevKernel_AllGather_RING_LL(x)", 10, 12),
        kernel("gemm", 11, 15),
        kernel("gemm", 15.01, 20),
        kernel("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)", 18, 20),
    ]
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"traceEvents": events}))
    found = step_streams.panel("two", file)
    assert found.title == (
        "two: 10.0 ms; compute 9.0; all-gather 2.0, 50% of it beside compute; "
        "reduce-scatter 2.0, 100% of it beside compute"
    )
    bars = {name: [(round(bar.start, 6), round(bar.end, 6)) for bar in spans] for name, spans in found.lanes}
    assert bars == {"compute": [(1.0, 10.0)], "all-gather": [(0.0, 2.0)], "reduce-scatter": [(8.0, 10.0)]}


def test_a_trace_without_a_device_is_an_error():
    with pytest.raises(ValueError, match="no work on a device"):
        step_streams.lanes_of([{"cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 1.0}])
