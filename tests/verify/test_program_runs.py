"""Programs that run again and again."""

import os
import sys

from glue_compiler.verify.program_runs import ProgramRuns

ECHO = "import sys; sys.stdout.write(sys.stdin.read())"


def run(program, tmp_path, **how):
    runs = ProgramRuns([sys.executable, "-c", program], **how)
    return [runs.run(dict(os.environ), tmp_path / "output.txt") for _ in range(2)]


def test_a_program_has_no_input(tmp_path):
    assert [found.output for found in run(ECHO, tmp_path)] == ["", ""]


def test_output_that_is_no_text(tmp_path):
    found, _ = run("import sys; sys.stdout.buffer.write(b'loss \\xff 1.0')", tmp_path)
    assert found.output == r"loss \xff 1.0"
    assert (tmp_path / "output.txt").read_bytes() == b"loss \xff 1.0"


def test_a_run_that_takes_too_long_is_ended_with_its_children(tmp_path):
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    found, _ = run(program, tmp_path, limit=0.5)
    assert found.code is None
    assert found.seconds < 60
