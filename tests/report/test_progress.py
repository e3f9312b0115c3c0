"""Long compiles show a line on a terminal, and nowhere else."""

import io
import sys

import pytest

from glue_compiler.report import progress
from tests.captured import compile_with_glue
from tests.passes.share_layers.models import Layers, ids, layers


class Terminal(io.StringIO):
    def isatty(self):
        return True


def written(monkeypatch, stream, long):
    monkeypatch.setattr(progress, "LONG", long)
    monkeypatch.setattr(sys, "stderr", stream)
    run = compile_with_glue(Layers(layers(16)))
    run.call(ids()).sum().backward()
    return stream.getvalue()


@pytest.fixture(autouse=True)
def terminal_of_one_process(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("LOCAL_RANK", raising=False)


@pytest.mark.slow
def test_a_long_compile_says_where_it_is_and_leaves_nothing(monkeypatch):
    text = written(monkeypatch, Terminal(), long=1)
    stages = ["captured", "traced for forward and backward", "passes run on forward", "kinds of layers"]
    places = [text.find(stage) for stage in stages]
    assert -1 not in places
    assert places == sorted(places)
    assert text.endswith("\r\x1b[K")
    assert "\n" not in text


@pytest.mark.slow
def test_a_short_compile_says_nothing(monkeypatch):
    assert written(monkeypatch, Terminal(), long=10_000) == ""


@pytest.mark.slow
def test_no_line_where_nobody_looks(monkeypatch):
    assert written(monkeypatch, io.StringIO(), long=1) == ""


@pytest.mark.parametrize(("name", "value"), [("LOCAL_RANK", "1"), ("TERM", "dumb")])
def test_no_line_from_other_processes_nor_on_a_terminal_that_cannot_erase_it(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert progress.terminal() is None
