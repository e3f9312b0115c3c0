"""The page and the plot of whole-step runs."""

import json
from xml.etree import ElementTree

import pytest

pytest.importorskip("transformers")

from benchmarks.end_to_end_page import Run, page, plot

MEASURED = {"fixed_ms": 50.0, "peak_gib": 4.0, "tokens_s": 163_840.0, "graphs": 2}


@pytest.fixture
def run(tmp_path):
    results = [
        {"row": "one", "variant": "glue", **MEASURED},
        {"row": "one", "variant": "inductor", **MEASURED, "fixed_ms": 100.0},
        {"row": "one", "variant": "fa2", "failed": "ImportError: no a|b\nhere"},
        {"row": "two", "variant": "glue", **MEASURED},
    ]
    made = {"date": "2026-01-02", "device": "a card", "torch": "2.11.0", "command": "python -m benchmarks.end_to_end"}
    made["packages"] = {"flash-attn-4": "4.0"}
    (tmp_path / "run.json").write_text(json.dumps({**made, "results": results}))
    return Run.read(tmp_path / "run.json")


def test_each_row_has_a_table_of_what_was_measured_or_why_not(run):
    lines = page([run]).splitlines()
    assert "`python -m benchmarks.end_to_end` (a card, torch 2.11.0, 2026-01-02)" in lines
    assert "- 2026-01-02: flash-attn-4 4.0" in lines
    assert "| | step ms | tokens/s | GiB |" in lines
    assert "| inductor | 100 | 163840 | 4 |" in lines
    assert "| fa2 | ImportError: no a/b here |  |  |" in lines
    assert [line for line in lines if line.startswith("## ")] == ["## one", "## two", "## Packages"]


def test_a_row_in_which_nothing_could_be_measured_has_a_table_too(run):
    alone = Run(run.date, run.device, run.torch, run.command, (run.results[2],))
    lines = page([alone]).splitlines()
    place = lines.index("| | step ms |")
    assert lines[place + 2] == "| fa2 | ImportError: no a/b here |"


def test_the_last_run_that_compares_comes_first(run):
    later = tuple({**result, "fixed_ms": 40.0, "varying_us": 6.0} for result in run.results[:2])
    lines = page([run, Run("2026-02-03", run.device, run.torch, run.command, later)]).splitlines()
    assert "| one | **40**, 4 | inductor 40, 4 | 6 for 6 | inductor 4 | 2026-02-03 |" in lines


def test_an_older_run_is_shown_for_what_no_later_one_measured(run):
    only_glue = Run("2026-02-03", run.device, run.torch, "later", run.results[:1])
    text = page([run, only_glue])
    assert text.index("`later`") < text.index("`python -m benchmarks.end_to_end`")
    assert "| inductor |" in text
    both = Run("2026-02-03", run.device, run.torch, "later", run.results[:2])
    assert "| one | **50**" in page([run, both])
    assert "2026-01-02)" not in page([run, both]).split("## two")[0]


def test_a_peer_that_is_ahead_is_named(run):
    assert "nowhere." in page([run])
    slower = tuple({**result, "peak_gib": gib} for result, gib in zip(run.results[:2], (5.0, 4.0), strict=True))
    assert "| one | GiB | inductor 4 | glue 5 |" in page([Run(run.date, run.device, run.torch, run.command, slower)])


def test_the_plot_has_rows_in_which_something_is_compared(run):
    found = list(ElementTree.fromstring(plot([run])).iter())
    texts = [each.text for each in found if each.text and each.text.strip()]
    assert "one" in texts
    assert "two" not in texts
    assert "50.0 ms, 4.0 GiB" in texts
    widths = [
        float(each.get("width")) for each in ElementTree.fromstring(plot([run])).iter() if each.get("height") == "16"
    ]
    assert widths[1] == 2 * widths[0]


def test_glue_beside_its_own_variants_is_no_comparison(run):
    own = tuple({**run.results[0], "variant": name} for name in ("glue", "glue-none"))
    assert "glue-none" not in plot([Run(run.date, run.device, run.torch, run.command, own)])
    assert "inductor" in plot([run, Run(run.date, run.device, run.torch, run.command, own)])


def test_of_a_row_that_was_run_twice_the_plot_has_the_last(run):
    later = Run(run.date, run.device, run.torch, run.command, tuple({**r, "fixed_ms": 25.0} for r in run.results[:2]))
    assert "25.0 ms" in plot([run, later])
    assert "50.0 ms" not in plot([run, later])
