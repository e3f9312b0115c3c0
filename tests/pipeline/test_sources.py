"""The cache key of a pass covers all of the user's code that decides what it does."""

import importlib
import sys
from pathlib import Path

import pytest

from glue_compiler.errors import GlueWarning
from glue_compiler.options import GlueOptions
from glue_compiler.pipeline import registry, run, sources
from glue_compiler.pipeline.run import Pipeline, pass_uuid

PASS = """
import json, torch
from glue_compiler.pipeline.graph_pass import GraphPass, PassResult
from glue_compiler.pipeline.results import Numerics
{imports}

class Own(GraphPass):
    name, numerics = "own", Numerics.BITWISE
    def run(self, graph, context):
        {inside}
        return PassResult(changed=False)
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes modules, and gives the pass in ``module`` as a new process would import it."""
    monkeypatch.syspath_prepend(tmp_path)
    names = []

    def write(module, imports="", inside="pass", **files):
        for name, text in {module: PASS.format(imports=imports, inside=inside), **files}.items():
            path = tmp_path / f"{name.replace('.', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            names.append(name)
        forget(names)
        return importlib.import_module(module).Own()

    yield write
    forget(names)


def forget(names):
    for name in list(sys.modules):
        if any(name == known or name == known.partition(".")[0] for known in names):
            del sys.modules[name]
    sources._imports_of.cache_clear()
    importlib.invalidate_caches()


CASES = {
    "a module beside it": {"module": "own_pass", "imports": "import own_helper", "own_helper": "a = {}"},
    "a relative import": {
        "module": "own_package.own_pass",
        "imports": "from .own_helper import a",
        "own_package.own_helper": "a = {}",
    },
    "through another module": {
        "module": "own_pass",
        "imports": "from own_package import own_middle",
        "own_package.own_middle": "from . import own_helper",
        "own_package.own_helper": "a = {}",
    },
    "the package itself": {"module": "own_package.own_pass", "own_package.__init__": "a = {}"},
    "inside of a method": {"module": "own_pass", "inside": "import own_helper", "own_helper": "a = {}"},
    "by import_module": {
        "module": "own_pass",
        "imports": "from importlib import import_module",
        "inside": "import_module('own_helper')",
        "own_helper": "a = {}",
    },
}


@pytest.mark.parametrize("files", CASES.values(), ids=CASES.keys())
def test_a_change_of_what_a_pass_imports_changes_its_uuid(files, write):
    files = {"own_other": "a = {}", **files}

    def uuid(**values):
        return pass_uuid(write(**{name: text.format(values.get(name, 0)) for name, text in files.items()}))

    (changed,) = (name for name in files if "{}" in files[name] and name != "own_other")
    before = uuid()
    assert uuid(**{changed: 1}) != before
    assert uuid(own_other=1) == uuid() == before  # which nobody imports


def test_a_computed_name_is_not_cached(write):
    own = write("own_pass", imports="from importlib import import_module", inside="import_module(graph.name)")
    with pytest.warns(GlueWarning, match="'own' nothing is cached .*names that are computed"):
        assert Pipeline([own], GlueOptions()).uuid() is None


def test_torch_and_python_are_known_by_their_version(write):
    (file,) = sources.sources_of(type(write("own_pass", imports="import numpy, typing")))
    assert file.stem == "own_pass"


def test_all_of_glue_is_in_the_uuid_of_each_pass(tmp_path, monkeypatch):
    (graph_pass, *_) = registry.all_passes()
    loaded = {Path(m.__file__) for name, m in sys.modules.items() if name.partition(".")[0] == "glue_compiler"}
    assert {path.stem for path in loaded} > {"analysis", "document_blocks", "outputs", "effects", "inductor"}
    assert loaded <= set(sources.sources_of_glue())
    assert not sources.sources_of(type(graph_pass))  # they are not read again

    source = tmp_path / "some_module.py"
    monkeypatch.setattr(run, "sources_of_glue", lambda: [source])

    def uuid(text):
        source.write_text(text)
        run._hash_of_glue.cache_clear()
        return pass_uuid(graph_pass)

    try:
        assert uuid("a = 1") == uuid("a = 1") != uuid("a = 2")
    finally:
        run._hash_of_glue.cache_clear()
