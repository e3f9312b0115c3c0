"""The pytest plugin: fixtures, and graphs in the report of a test that fails."""

import subprocess
import sys

import pytest

TEST = """
import torch
from glue_compiler.testing import assert_untouched

def test_two_sums(glue_capture, glue_run_pass):
    (graph,) = glue_capture(lambda x: x.cumsum(0) * 2 + x.cumsum(0) * 3, torch.arange(3))
    assert_untouched(glue_run_pass(graph, "hoist_metadata"))

def test_what_was_merged(glue_capture, glue_run_pass):
    (graph,) = glue_capture(lambda x: x.cumsum(0) * 2 + x.cumsum(0) * 3, torch.arange(3))
    assert glue_run_pass(graph, "hoist_metadata").rewrites == ["merge cumsum_1 into cumsum"]
"""


@pytest.mark.slow
def test_a_failure_shows_the_difference_of_the_graphs(tmp_path):
    (tmp_path / "test_it.py").write_text(TEST)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "glue_compiler.testing.pytest_plugin",
        "-p",
        "no:cacheprovider",
    ]
    result = subprocess.run([*command, "."], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert "1 failed, 1 passed" in result.stdout, result.stdout + result.stderr
    shown = result.stdout.partition("glue: graph before and after")[2]
    assert "--- before" in shown
    assert any(line.startswith("-") and "cumsum_1" in line for line in shown.splitlines())


def test_loading_the_plugin_imports_no_torch():
    script = "import sys, glue_compiler.testing.pytest_plugin as p; assert 'torch' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
