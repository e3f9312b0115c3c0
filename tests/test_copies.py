"""Copies of what ``torch.compile`` returns: deepcopy, pickle and torch.save work as they do for other backends."""

import copy
import io
import json
import pickle
import subprocess
import sys

import pytest
import torch

from glue_compiler.backend import GlueBackend
from glue_compiler.report.session import Session


def through_pickle(module):
    return pickle.loads(pickle.dumps(module))


def through_torch_save(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def by_torch_compile(backend, options):
    return torch.compile(model(), backend=backend, options=options)


def by_module_compile(backend, options):
    module = model()
    module.compile(backend=backend, options=options)
    return module


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()).double()


def outcome(module):
    module.zero_grad()
    out = module(torch.arange(8, dtype=torch.float64).view(2, 4))
    out.square().sum().backward()
    return [out.detach(), *(parameter.grad.clone() for parameter in module.parameters())]


def assert_equal(got, want):
    assert len(got) == len(want) == 3
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("called", [False, True], ids=["", "called"])
@pytest.mark.parametrize("compiled", [by_torch_compile, by_module_compile])
@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle, through_torch_save])
def test_a_compiled_module_is_copied(copied, compiled, called, tmp_path):
    module = compiled("glue", {"compiler": "aot_eager", "dump": str(tmp_path)})
    if called:
        outcome(module)
    torch._dynamo.reset()
    before = graphs_in(tmp_path)
    other = copied(module)
    # .compile() leaves no trace in a copy, whatever the backend (Module.__getstate__).
    assert type(other) is type(module)
    assert_equal(outcome(other), outcome(model()))
    assert graphs_in(tmp_path) - before == (compiled is by_torch_compile)
    with torch.no_grad():
        next(module.parameters()).zero_()
    assert_equal(outcome(other), outcome(model()))


def graphs_in(folder):
    """Of all processes: each writes a folder of its own."""
    return sum(len(json.loads(summary.read_text())["graphs"]) for summary in folder.rglob("summary.json"))


@pytest.mark.slow
def test_another_process_loads_what_was_saved_before_and_after_the_first_call(tmp_path):
    dump = tmp_path / "dump"
    module = by_torch_compile("glue", {"compiler": "aot_eager", "dump": str(dump)})
    torch.save(module, tmp_path / "before")
    torch.save(outcome(model()), tmp_path / "expected")
    expected = outcome(module)
    assert_equal(expected, outcome(model()))
    torch.save(module, tmp_path / "after")
    script = (
        "import torch; from tests.test_copies import *; from pathlib import Path\n"
        f"folder = Path({str(tmp_path)!r}); expected = torch.load(folder / 'expected')\n"
        "for name in ('before', 'after'):\n"
        "    torch._dynamo.reset()\n"
        "    assert_equal(outcome(torch.load(folder / name, weights_only=False)), expected)\n"
        "    print(graphs_in(folder / 'dump'))\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["2", "3"]  # with the one of this process


def test_the_backend_of_a_process_is_itself_and_another_one_keeps_its_parts():
    from glue_compiler.backend import glue

    for copied in (copy.copy, copy.deepcopy, through_pickle):
        assert copied(glue) is glue
    session = Session()
    other = copy.copy(GlueBackend(session=session))
    assert other is not glue
    assert other._session is session
    assert copy.deepcopy({"backend": other})["backend"] is other  # Lightning does so with what torch.compile was given
