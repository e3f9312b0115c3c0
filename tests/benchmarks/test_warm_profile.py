"""The parts of a first step that benchmarks.warm_profile tells apart are functions that exist."""

import cProfile
import importlib.util
import pstats
from pathlib import Path

import pytest
import torch

import glue_compiler
from benchmarks.warm_profile import PARTS, parts_of
from glue_compiler.pipeline.run import Pipeline

ROOTS = [Path(torch.__file__).parent, Path(glue_compiler.__file__).parent]


@pytest.mark.parametrize("name", PARTS)
def test_a_part_is_a_function_of_torchs_or_glues(name):
    file, function = PARTS[name]
    if file.endswith(">"):
        assert hasattr(importlib._bootstrap, function)
        return
    if file.startswith("triton"):
        pytest.importorskip("triton")
        roots = [Path(importlib.util.find_spec("triton").origin).parent]
    else:
        roots = ROOTS
    found = [path for root in roots for path in root.rglob(Path(file).name) if path.as_posix().endswith(file)]
    assert found
    assert all(f"def {function}(" in path.read_text() for path in found)


def test_a_part_has_the_time_that_is_spent_in_it():
    from glue_compiler.options import GlueOptions

    profile = cProfile.Profile()
    pipeline = Pipeline([], GlueOptions())
    profile.runcall(pipeline.uuid)
    (part,) = parts_of(pstats.Stats(profile))
    assert part[0] == "glue, key"
    assert part[1] > 0
