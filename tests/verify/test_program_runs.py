"""Programs that run again and again."""

import os
import sys

import pytest

from glue_compiler.verify.program_runs import ProgramRuns, SharedInput

ECHO = "import sys; sys.stdout.write(sys.stdin.read())"
FIRST_LINE = "import sys; print(sys.stdin.readline())"


def run(program, tmp_path, **how):
    runs = ProgramRuns([sys.executable, "-c", program], **how)
    return [runs.run(dict(os.environ), tmp_path / "output.txt") for _ in range(2)]


@pytest.fixture
def pipe():
    """Our standard input, and its other end."""
    ends = os.pipe()
    with open(ends[0], "rb") as source, open(ends[1], "wb", buffering=0) as other:
        yield source.fileno(), other


def test_each_run_gets_the_same_input(pipe, tmp_path):
    source, other = pipe
    other.write(b"5\n6\n")
    other.close()
    assert [found.output for found in run(ECHO, tmp_path, given=SharedInput(source))] == ["5\n6\n"] * 2


def test_an_input_that_does_not_end_is_not_waited_for(pipe, tmp_path):
    source, other = pipe
    other.write(b"5\n6\n")
    assert [found.output for found in run(FIRST_LINE, tmp_path, given=SharedInput(source))] == ["5\n\n"] * 2
    assert [found.code for found in run("pass", tmp_path, given=SharedInput(source))] == [0, 0]


def test_without_an_input_a_program_reads_its_end(tmp_path):
    assert [found.output for found in run(ECHO, tmp_path, given=SharedInput(None))] == ["", ""]


def test_output_that_is_no_text(tmp_path):
    found, _ = run("import sys; sys.stdout.buffer.write(b'loss \\xff 1.0')", tmp_path)
    assert found.output == r"loss \xff 1.0"
    assert (tmp_path / "output.txt").read_bytes() == b"loss \xff 1.0"


def test_a_run_that_takes_too_long_is_ended_with_its_children(tmp_path):
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    found, _ = run(program, tmp_path, limit=0.5)
    assert found.code is None
    assert found.seconds < 60
