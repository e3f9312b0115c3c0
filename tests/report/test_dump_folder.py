"""Where a process writes its dump: beside others, again, and where nothing can be written."""

import errno
import json
import os
import warnings
from pathlib import Path

import pytest
import torch

from glue_compiler.errors import GlueWarning
from glue_compiler.report.dump_folder import DumpFolder
from glue_compiler.report.recorded import read_folder
from glue_compiler.report.session import Session, session_for


def dump(path):
    """A dump of one file, as a process would write it; two in one process are as two processes."""
    folder = DumpFolder(path)
    folder.write("graph_000/00_unchanged.py", "graph = 1")
    folder.write_summary(json.dumps({**Session(folder).summary(), "capture": [{"who": id(folder)}]}))
    return folder


def owner(path):
    return json.loads((path / "summary.json").read_text())["capture"][0]["who"]


def test_processes_that_run_at_the_same_time_have_a_folder_each(tmp_path):
    first, second, third = dump(tmp_path), dump(tmp_path), dump(tmp_path)
    assert first.path == tmp_path
    assert [folder.path.parent for folder in (second, third)] == [tmp_path, tmp_path]
    assert len({first.path, second.path, third.path}) == 3
    for folder in (first, second, third):
        assert owner(folder.path) == id(folder)
        assert (folder.path / "graph_000" / "00_unchanged.py").exists()
    assert "2 other processes wrote dumps of their own" in read_folder(tmp_path).warnings[0]


def test_a_later_process_replaces_the_dumps_of_ended_ones_and_keeps_other_files(tmp_path):
    first, second, alive = dump(tmp_path), dump(tmp_path), dump(tmp_path)
    notes = written(tmp_path / "graph_000" / "notes.txt")
    ended = second.path
    del first, second
    later = dump(tmp_path)
    assert owner(tmp_path) == id(later)
    assert notes.read_text() == "mine"
    assert not ended.exists()
    assert owner(alive.path) == id(alive)


def written(path):
    path.write_text("mine")
    return path


def test_a_forked_process_writes_beside_its_parent(tmp_path):
    mine = session_for(str(tmp_path))
    mine.folder.write_summary("{}")
    child = os.fork()
    if child == 0:
        found = session_for(str(tmp_path))
        found.folder.write_summary(json.dumps(found.summary()))
        os._exit(0)
    os.waitpid(child, 0)
    assert (tmp_path / "summary.json").read_text() == "{}"
    assert (tmp_path / f"process_{child}" / "summary.json").exists()


def test_each_rank_of_a_distributed_job_has_its_own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    assert session_for(str(tmp_path / "dump")).folder.path == tmp_path / "dump" / "rank_3"


def test_files_that_are_gone_are_named(tmp_path):
    folder = dump(tmp_path)
    assert read_folder(tmp_path).warnings == ()
    (tmp_path / folder.files[0]).unlink()
    assert "1 of the dump's 1 files are not there" in read_folder(tmp_path).warnings[0]


def train(folder):
    """Two graphs, forward and backward."""
    x = torch.ones(3, requires_grad=True)
    for fn in (lambda x: x * 2, lambda x: x * 3):
        call = torch.compile(fn, backend="glue", options={"compiler": "aot_eager", "dump": str(folder)})
        call(x).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 5.0))


def test_a_path_that_is_a_file_is_one_warning_and_training_goes_on(tmp_path):
    with pytest.warns(GlueWarning, match="the dump in .* ends here.*option 'dump', or GLUE_DUMP") as caught:
        train(written(tmp_path / "file"))
    assert sum(each.category is GlueWarning for each in caught) == 1
    with warnings.catch_warnings():  # the near miss: a folder
        warnings.simplefilter("error", GlueWarning)
        train(tmp_path / "folder")


@pytest.mark.parametrize("room", [0, 1, 2, 3])
def test_a_full_disk_is_one_warning_and_leaves_complete_files(room, tmp_path, monkeypatch):
    left, write = [room], Path.write_text

    def write_text(self, text, **how):
        left[0] -= 1
        if left[0] >= 0:
            return write(self, text, **how)
        write(self, text[:10], **how)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", write_text)
        with pytest.warns(GlueWarning, match="No space left on device") as caught:
            train(tmp_path)
    assert sum(each.category is GlueWarning for each in caught) == 1
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != ".glue_lock"]
    assert len(files) == room
    if room >= 2:
        assert len(read_folder(tmp_path).graphs) == 1


def test_file_names_that_are_no_utf8_are_written(tmp_path):
    folder = DumpFolder(tmp_path)
    folder.write("graph.py", "# File: \udcff.py")
    assert "udcff" in (tmp_path / "graph.py").read_text(encoding="utf-8")
