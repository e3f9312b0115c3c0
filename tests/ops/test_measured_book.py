"""Measured numbers are kept in a file that processes share, whatever is in it."""

from __future__ import annotations

import json
import multiprocessing
import sys
from pathlib import Path

import pytest

from glue_compiler.ops.measured_book import MeasuredBook


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "rates.json"


def never():
    raise AssertionError("it is known")


@pytest.mark.parametrize("measured", [0.5, [0.5, 2], (0.5, 2)], ids=["number", "list", "tuple"])
def test_what_was_measured_is_known_to_the_next_process(path, measured):
    assert MeasuredBook(path).remembered("mm", lambda: measured) == measured
    assert MeasuredBook(path).remembered("mm", never) == (list(measured) if isinstance(measured, tuple) else measured)


def test_the_file_is_read_once_for_all_that_is_known(path, monkeypatch):
    for name in "abc":
        MeasuredBook(path).remembered(name, lambda: [1.0, 2.0, 3.0])
    book, reads = MeasuredBook(path), []
    own = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda self, **how: reads.append(self) or own(self, **how))
    assert [book.remembered(name, never) for name in "abcab"] == [[1.0, 2.0, 3.0]] * 5
    assert reads == [path]


def test_what_another_process_has_measured_since_is_neither_measured_again_nor_lost(path):
    one, other = MeasuredBook(path), MeasuredBook(path)
    one.remembered("a", lambda: 1.0)
    other.remembered("b", lambda: 2.0)
    assert one.remembered("b", never) == 2.0
    one.remembered("c", lambda: 3.0)
    assert json.loads(path.read_text()) == {"a": 1.0, "b": 2.0, "c": 3.0}
    assert sorted(file.name for file in path.parent.iterdir()) == ["rates.json", "rates.lock"]


@pytest.mark.parametrize(
    "text", ["", "{", '{"mm": ', "[1]", "null", '{"mm": "fast"}', '{"mm": -1}', '{"mm": [1, NaN]}', "\0"]
)
def test_a_file_that_makes_no_sense_is_measured_again(path, text):
    path.parent.mkdir()
    path.write_text(text)
    assert MeasuredBook(path).remembered("mm", lambda: 0.25) == 0.25
    assert json.loads(path.read_text()) == {"mm": 0.25}


def test_a_failure_is_known_to_this_process_alone(path):
    book = MeasuredBook(path)
    assert book.remembered("mm", lambda: None) is None
    assert book.remembered("mm", never) is None
    assert MeasuredBook(path).remembered("mm", lambda: 1.0) == 1.0


def test_without_a_folder_to_write_to_it_is_measured(tmp_path):
    (tmp_path / "folder").write_text("a file")
    book = MeasuredBook(tmp_path / "folder" / "rates.json")
    assert book.remembered("mm", lambda: 1.0) == 1.0
    assert book.remembered("mm", never) == 1.0


def _measure_some(path, number):
    for name in range(20):
        MeasuredBook(path).remembered(f"{name % 7}", lambda: float(number + 1))
        MeasuredBook(path).remembered(f"own {number} {name}", lambda: 1.0)


@pytest.mark.skipif(sys.platform == "win32", reason="files are locked on POSIX alone")
def test_processes_at_the_same_time_lose_nothing(path):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_measure_some, args=(path, number)) for number in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    found = json.loads(path.read_text())
    assert {f"own {number} {name}" for number in range(4) for name in range(20)} < found.keys()
