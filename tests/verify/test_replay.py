"""Dumped graphs run alone, and are compared with the graph before."""

import json
import re

import pytest
import torch

pytest.importorskip("typer")

from typer.testing import CliRunner

from glue_compiler.cli.main import app
from glue_compiler.errors import GlueGraphFileError
from glue_compiler.verify.replay import replay
from tests.passes.hoist_metadata.test_one_graph import layer_inputs, positions_of, two_layers
from tests.verify.wrong_passes import DropNegations, RenameFunctions, cosine, inputs, model


def dump(fn, folder, *args, **options):
    options = {"compiler": "aot_eager", "dump": str(folder), "strict": True, **options}
    torch.compile(fn, backend="glue", options=options)(*args)
    return folder / "graph_000"


def tensor_metadata(x, positions):
    return x * positions.cumsum(0) + positions.cumsum(0).sum()


def test_right_rewrites_agree(tmp_path):
    x, positions = torch.randn(5, requires_grad=True), torch.arange(5)
    folder = dump(tensor_metadata, tmp_path, x, positions, passes={"memoize_metadata": False})
    (found,) = replay(folder / "01_hoist_metadata.after.py")
    assert found.differences == {}
    assert found.is_compared


def test_a_split_graph_runs_with_its_prologue(tmp_path):
    x, positions = torch.randn(600, requires_grad=True), torch.arange(600)
    folder = dump(tensor_metadata, tmp_path, x, positions, memoize_threshold=0)
    (found,) = replay(next(folder.glob("*_memoize_metadata.after.py")))
    assert found.differences == {}


@pytest.mark.parametrize(
    ("fn", "wrong", "output"), [(model, RenameFunctions, "output 0"), (cosine, DropNegations, "output 1")]
)
def test_wrong_rewrites_differ_at_each_stage(fn, wrong, output, tmp_path):
    folder = dump(fn, tmp_path, *inputs(), extra_passes=[wrong])
    path = folder / f"01_{wrong.name}.after.py"
    (found,) = replay(path)
    assert "differs by up to" in found.differences[output]
    result = CliRunner().invoke(app, ["replay", str(path)])
    assert result.exit_code == 1
    assert "before and after differ" in result.output


def test_a_pass_that_is_close_may_round(tmp_path):
    folder = dump(model, tmp_path, *inputs(), extra_passes=[RenameFunctions])
    for moment in ("before", "after"):
        path = folder / f"01_rename_functions.{moment}.py"
        scale = {"before": "1.0", "after": "1.0000000000000002"}[moment]
        text = path.read_text().replace("torch.cos(", "torch.sin(")
        path.write_text(re.sub(r"return \((\w+),\)", rf"return (\1 * {scale},)", text))
    assert replay(folder / "01_rename_functions.after.py")[0].differences
    summary = json.loads((tmp_path / "summary.json").read_text())
    next(p for p in summary["graphs"][0]["passes"] if p["name"] == "rename_functions")["numerics"] = "close"
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert not replay(folder / "01_rename_functions.after.py")[0].differences


def test_a_graph_without_another_to_compare_with_runs(tmp_path):
    folder = dump(lambda x: x * 2, tmp_path, torch.ones(3))
    result = CliRunner().invoke(app, ["replay", str(folder / "00_unchanged.py")])
    assert result.exit_code == 0
    assert "agree" not in result.output


def test_what_is_no_graph_is_an_error(tmp_path):
    with pytest.raises(GlueGraphFileError, match="there is no file"):
        replay(tmp_path / "missing.py")
    with pytest.raises(GlueGraphFileError, match="holds no replay.py"):
        replay(tmp_path)
    (tmp_path / "other.py").write_text("x = 1")
    with pytest.raises(GlueGraphFileError, match="no graph that glue wrote"):
        replay(tmp_path / "other.py")


def test_data_dependent_graphs_dump_whole_files_that_load(tmp_path):
    x, *weights = layer_inputs()
    folder = dump(two_layers, tmp_path, x, positions_of(5, 7), *weights)
    assert (folder / "02_memoize_metadata.whole.py").exists()


def test_the_folder_of_a_dump_is_none_of_a_failed_verification(tmp_path):
    (tmp_path / "graph_000").mkdir()
    (tmp_path / "graph_000" / "01_mine.after.py").touch()
    with pytest.raises(GlueGraphFileError, match="is a dump: name one of its graphs"):
        replay(tmp_path)
