"""Bisection: which pass, which rewrite, and a file that fails alone."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")

from typer.testing import CliRunner

from glue_compiler.cli.main import app
from glue_compiler.errors import GlueOptionError
from glue_compiler.verify.bisection import NothingToFind, bisect, bisect_with_torch
from tests.verify.wrong_passes import RenameFunctions, inputs, model

# Behaves like a program that glue compiles, without the time that torch takes to start: its passes make so many
# rewrites each, over two graphs in turn; HARM says with which rewrite, or pass, it fails.
FAKE = """
import json, os, pathlib, sys
fuel, off = int(os.environ["GLUE_FUEL"]), os.environ["GLUE_DISABLE"].split(",")
done, graphs = 0, []
for graph in range(2):
    passes = []
    for name, rewrites in REWRITES.items():
        if name in off:
            continue
        made = [{"number": done + i + 1, "what": f"{name} {graph} {i + 1}"} for i in range(min(rewrites, fuel - done))]
        done += len(made)
        changed = bool(made) or name == "stubborn"
        passes.append({"name": name, "changed": changed, "rewrites": made, "numerics": "bitwise", "stage": "captured"})
    graphs.append({"id": graph, "passes": passes})
whats = [r["what"] for g in graphs for p in g["passes"] for r in p["rewrites"]]
whats += [p["name"] for p in graphs[0]["passes"]]
pathlib.Path(os.environ["GLUE_DUMP"], "summary.json").write_text(
    json.dumps({"torch": "", "graphs": graphs, "capture": [], "files": []})
)
print("loss", 0.9)
print("loss", 1.0 + (0.5 if HARM in whats else 0.001 * len(whats)))
sys.exit(HARM in whats if EXIT else 0)
"""


@pytest.fixture
def program(tmp_path):
    def write(harm, by_exit=True, **rewrites):
        text = FAKE.replace("REWRITES", repr(rewrites)).replace("HARM", repr(harm)).replace("EXIT", str(by_exit))
        (tmp_path / "program.py").write_text(text)
        return [sys.executable, str(tmp_path / "program.py")]

    return write


@pytest.mark.parametrize("harm", ["first 0 1", "first 0 40", "second 0 17", "second 1 30", "first 1 33"])
def test_every_rewrite_is_found_in_few_runs(program, harm, tmp_path):
    found = bisect(program(harm, first=40, second=30), folder=tmp_path / "out", say=lambda _: None)
    name, graph, _ = harm.split()
    assert (found.pass_name, found.graph, found.what) == (name, int(graph), harm)
    assert found.runs <= 4 + 1 + 8 + 1  # log2(2) passes, log2(140) rewrites, and one to save inputs


def test_a_printed_number_is_compared_with_the_run_without_passes(program, tmp_path):
    command = program("second 1 2", by_exit=False, first=3, second=4)
    found = bisect(command, metric=r"loss (\S+)", tolerance=0.1, folder=tmp_path / "out", say=lambda _: None)
    assert found.what == "second 1 2"
    with pytest.raises(NothingToFind, match="does not fail"):
        bisect(command, metric=r"loss (\S+)", tolerance=1.0, folder=tmp_path / "out", say=lambda _: None)
    with pytest.raises(NothingToFind, match="prints nothing that matches"):
        bisect(command, metric=r"perplexity (\S+)", folder=tmp_path / "out", say=lambda _: None)


def test_a_pass_that_does_not_number_its_rewrites_is_named(program, tmp_path):
    found = bisect(program("stubborn", first=3, stubborn=0), folder=tmp_path / "out", say=lambda _: None)
    assert (found.pass_name, found.rewrite) == ("stubborn", None)
    assert "context.fuel" in found.what


def test_what_fails_without_glue_too_is_not_ours(tmp_path):
    failing = [sys.executable, "-c", "import sys; sys.exit(1)"]
    with pytest.raises(NothingToFind, match="no pass of glue changed a graph"):
        bisect(failing, folder=tmp_path / "out", say=lambda _: None)


def test_a_program_that_fails_anyway_says_where_to_search(program, tmp_path):
    command = program("nothing", by_exit=False, first=3)
    text = (tmp_path / "program.py").read_text()
    (tmp_path / "program.py").write_text(text.replace("sys.exit(", "sys.exit(1)  # "))
    result = CliRunner().invoke(app, ["bisect", "--folder", str(tmp_path / "out"), "--", *command])
    assert result.exit_code == 2
    assert "torch._inductor.compiler_bisector" in result.output


@pytest.mark.slow
def test_a_program_that_hangs_fails_and_its_rewrite_is_found(program, tmp_path):
    command = program("first 0 2", first=3)
    text = (tmp_path / "program.py").read_text()
    text = text.replace("sys.exit(", "import time; HANGS and time.sleep(600)  # ").replace(
        "HANGS", "'first 0 2' in whats"
    )
    (tmp_path / "program.py").write_text(text)
    said = []
    found = bisect(command, limit=2.0, folder=tmp_path / "out", say=said.append)
    assert found.what == "first 0 2"
    assert "ended after 2 s" in said[0]


def test_other_files_in_the_folder_stay(program, tmp_path):
    notes = tmp_path / "out" / "notes.txt"
    notes.parent.mkdir()
    notes.write_text("mine")
    for _ in range(2):
        bisect(program("first 0 1", first=1), folder=notes.parent, say=lambda _: None)
    assert notes.read_text() == "mine"


def test_wrong_calls():
    with pytest.raises(GlueOptionError, match="needs a command"):
        bisect([])
    with pytest.raises(GlueOptionError, match="has no group"):
        bisect(["true"], metric="loss")


PROGRAM = """
import sys
import torch
sys.path.insert(0, {root!r})
from tests.verify.wrong_passes import {fn}, inputs
call = torch.compile({fn}, backend="glue", options={{"compiler": "aot_eager"}})
x, weight = inputs()
call(x, weight).square().sum().backward()
print("gradient", weight.grad.sum().item())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fn", "wrong", "what"),
    [("model", "RenameFunctions", "rename x_1"), ("cosine", "DropNegations", "drop neg")],
    ids=["captured", "partitioned"],
)
def test_a_planted_wrong_rewrite_ends_in_a_file_that_fails_alone(fn, wrong, what, tmp_path, monkeypatch):
    root = str(Path(__file__).parents[2])
    (tmp_path / "train.py").write_text(PROGRAM.format(root=root, fn=fn))
    monkeypatch.setenv("GLUE_EXTRA_PASSES", f"tests.verify.wrong_passes:{wrong}")
    monkeypatch.setenv("PYTHONPATH", root)
    command = [sys.executable, str(tmp_path / "train.py")]
    options = ["--metric", r"gradient (\S+)", "--tolerance", "1e-9", "--folder", str(tmp_path / "out")]
    result = CliRunner().invoke(app, ["bisect", *options, "--", *command])
    assert result.exit_code == 0, result.output
    assert f"graph 0: {what}" in result.output
    alone = [sys.executable, str(tmp_path / "out" / "replay.py")]
    result = subprocess.run(alone, capture_output=True, text=True, timeout=120, env={})
    assert result.returncode == 1, result.stderr
    assert "before and after differ" in result.stdout


@pytest.mark.slow
def test_torchs_bisector_finds_the_rewrite_in_glue():
    x, weight = inputs()
    expected = model(x, weight)

    def works():
        torch.compiler.reset()
        options = {"compiler": "aot_eager", "extra_passes": [RenameFunctions]} if is_searched_in_glue() else None
        return torch.allclose(torch.compile(model, backend="glue", options=options)(x, weight), expected)

    def is_searched_in_glue():
        return torch._inductor.compiler_bisector.CompilerBisector.get_backend() == "glue"

    from torch._inductor import compiler_bisector

    with pytest.MonkeyPatch.context() as patch:  # most of torch's own backends are not under test, and take long
        for name in list(compiler_bisector.BACKENDS):
            if name not in ("eager", "inductor"):
                patch.delitem(compiler_bisector.BACKENDS, name)
        found = bisect_with_torch(works)
    assert (found.backend, found.subsystem) == ("glue", "rewrites")
    assert found.debug_info == "rename x_1"
    assert "glue" not in compiler_bisector.BACKENDS


@pytest.mark.slow
def test_torchs_variables_count_single_rewrites(tmp_path):
    script = f"""
    import torch
    options = {{"compiler": "aot_eager", "dump": {str(tmp_path)!r}}}
    torch.compile(lambda x: sum(x.cumsum(0) * i for i in range(5)), backend="glue", options=options)(torch.arange(3))
    """
    environment = {
        "TORCH_BISECT_BACKEND": "glue",
        "TORCH_BISECT_SUBSYSTEM": "rewrites",
        "TORCH_BISECT_MAX": "1",  # the first two
    }
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )
    assert result.returncode == 0, result.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    made = [r["what"] for p in summary["graphs"][0]["passes"] for r in p["rewrites"]]
    assert made == ["merge cumsum_1 into cumsum", "merge cumsum_2 into cumsum"]


@pytest.mark.parametrize("limit", [0, 1, 2, 3, None])
def test_fuel_stops_after_the_nth_rewrite_and_numbers_go_over_all_graphs(limit, tmp_path):
    def fn(x):
        y = x.cumsum(0) * 2 + x.cumsum(0) * 3 + x.cumsum(0)
        torch._dynamo.graph_break()
        return y.cumsum(0) * 2 + y.cumsum(0) * 3

    options = {"compiler": "aot_eager", "dump": str(tmp_path), "strict": True, "fuel": limit}
    x = torch.arange(4)
    assert torch.equal(torch.compile(fn, backend="glue", options=options)(x), fn(x))
    summary = json.loads((tmp_path / "summary.json").read_text())
    numbers = [r["number"] for graph in summary["graphs"] for p in graph["passes"] for r in p["rewrites"]]
    assert numbers == list(range(1, 1 + (3 if limit is None else limit)))
