"""The benchmark of thousands of steps, on a CPU: what its lines are made of, and a short one with its kills."""

import json

import pytest

pytest.importorskip("transformers")

from benchmarks.long_run import Batches, compiled_late, line, main, steps_of


def written(folder, lines):
    text = "".join(json.dumps({"host": 1.0, "device": 2.0, "seconds": 0.01, **each}) + "\n" for each in lines)
    (folder / "steps.jsonl").write_text(text)


def test_what_was_done_again_counts_once_and_a_late_compile_is_seen(tmp_path):
    first = [{"step": step, "of_process": step, "graphs": 5} for step in range(40)]
    again = [{"step": step, "of_process": step - 20, "graphs": 5 if step < 55 else 6} for step in range(20, 60)]
    written(tmp_path, [*first, *again])
    assert [each["step"] for each in steps_of(tmp_path)] == list(range(60))
    assert compiled_late(tmp_path) == 1


def test_a_line_has_memory_of_the_last_process_and_the_distance_of_losses(tmp_path):
    def steps(loss):
        made = [{"step": step, "of_process": step - 10, "graphs": 1, "loss": loss} for step in range(10, 30)]
        written(tmp_path, [{"step": step, "of_process": step, "graphs": 1} for step in range(10)] + made)
        return steps_of(tmp_path)

    assert line("glue:0", steps(2.0), 0, steps(2.5)) == (
        "| glue:0 | 30 | 10.0 | 1.000 | 1.000 | 2.000 | 2.000 | 0 | 2.0000 | 0.5000 |"
    )
    assert line("glue:0", [], 0, []) == "| glue:0 | did not train |"


def test_a_batch_is_the_same_in_each_process_and_held_out_text_is_no_part_of_it():
    first, second = (Batches(3, 64, "cpu") for _ in range(2))
    for number in range(8):
        batch = first.batch(number)
        assert batch["input_ids"].equal(second.batch(number)["input_ids"])
        assert 40 <= batch["input_ids"].numel() <= 64
        assert ((batch["position_ids"] == 0) == (batch["labels"] == -100)).all()
    assert not first.batch(0)["input_ids"].equal(first.batch(1)["input_ids"])
    assert Batches(4, 64, "cpu").batch(0, True)["input_ids"].equal(first.batch(0, True)["input_ids"])


@pytest.mark.slow
def test_a_run_that_is_killed_twice_goes_on(capsys):
    main(["--device", "cpu", "--steps", "50", "--tokens", "96", "--layers", "5", "--runs", "glue:0,eager:0"])
    glue, eager = (
        [cell.strip() for cell in each.strip("|").split("|")]
        for each in capsys.readouterr().out.splitlines()
        if each.startswith(("| glue", "| eager"))
    )
    assert glue[1] == eager[1] == "50"
    assert glue[7] == "0"  # nothing is compiled late
    assert float(glue[9]) < 0.05
