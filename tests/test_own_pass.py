"""Passes of the user's own: the one in docs/, options, entry points, contracts, the cache key."""

import json
import re
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

from glue_compiler import registry
from glue_compiler.errors import GlueContractError, GlueOptionError, GlueWarning
from glue_compiler.graph_pass import GraphPass, Numerics, PassResult
from glue_compiler.options import GlueOptions
from glue_compiler.pipeline import Pipeline
from glue_compiler.testing import assert_equivalent, assert_rewritten, assert_untouched, capture, run_pass

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture
def own_pass(tmp_path, monkeypatch):
    """The file of docs/own_pass.md, as a module that can be imported."""
    code = re.search(r"```python\n(# drop_contiguous.py\n.*?)```", (DOCS / "own_pass.md").read_text(), re.DOTALL)[1]
    assert code.count("\n") <= 40
    (tmp_path / "drop_contiguous.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.delitem(sys.modules, "drop_contiguous", raising=False)
    return "drop_contiguous:DropContiguous"


def fn(x):
    return (x.contiguous() * 2).sin() + x.t().contiguous()


def test_the_pass_of_the_docs_does_what_it_says(own_pass):
    x = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    (graph,) = capture(fn, x)
    result = run_pass(graph, own_pass)
    assert_rewritten(result, times=1)
    assert result.skip_reasons == ["its input is not known to be contiguous"]
    assert_equivalent(result.before, result.after, [x])
    (graph,) = capture(lambda x: x.contiguous(memory_format=torch.channels_last), torch.ones(1, 2, 3, 3))
    assert_untouched(run_pass(graph, own_pass), reason="memory format")


def test_it_gets_dumps_skips_verification_and_switches_for_free(own_pass, tmp_path, monkeypatch):
    x = torch.randn(3, 3, requires_grad=True)
    options = {"compiler": "aot_eager", "strict": True, "verify": True, "dump": str(tmp_path / "dump")}
    torch.compile(fn, backend="glue", options={**options, "extra_passes": [own_pass]})(x).sum().backward()
    summary = json.loads((tmp_path / "dump" / "summary.json").read_text())
    report = summary["graphs"][0]["passes"][-1]
    assert (report["name"], report["counts"], report["numerics"]) == ("drop_contiguous", {"dropped": 1}, "bitwise")
    assert [r["what"] for r in report["rewrites"]] == ["drop contiguous"]
    assert "test_own_pass.py" in report["skips"][0]["source"]
    assert (tmp_path / "dump" / "graph_000" / "01_drop_contiguous.after.py").exists()
    torch.compiler.reset()
    monkeypatch.setenv("GLUE_EXTRA_PASSES", own_pass)
    monkeypatch.setenv("GLUE_DISABLE", "drop_contiguous")
    torch.compile(fn, backend="glue", options=options)(x)
    summary = json.loads((tmp_path / "dump" / "summary.json").read_text())
    assert all(p["name"] != "drop_contiguous" for p in summary["graphs"][1]["passes"])


class Own(GraphPass):
    name, numerics = "own", Numerics.BITWISE

    def __init__(self, setting=None):
        self.setting = setting

    def run(self, graph, context):
        return PassResult(changed=False)


def names(*extra):
    return [p.name for p in registry.with_extra(registry.all_passes(), extra)]


def test_objects_classes_and_names_are_passes():
    for extra in (Own, Own(3), f"{__name__}:Own"):
        if isinstance(extra, str):
            sys.modules.setdefault(__name__, sys.modules[Own.__module__])
        assert names(extra)[-1] == "own"
    with pytest.raises(GlueContractError, match="two passes named 'own'"):
        names(Own, Own)


class Needs(Own):
    name = "needs"
    requires = frozenset({"metadata_unique"})


def test_contracts_hold_for_own_passes_too():
    passes = registry.with_extra(registry.all_passes(), [Needs])
    ordered = [p.name for p in Pipeline(passes, GlueOptions()).passes]
    assert ordered.index("needs") > ordered.index("hoist_metadata")
    with pytest.raises(GlueContractError, match="'hoist_metadata' provides it and is off"):
        Pipeline(passes, GlueOptions(passes={"hoist_metadata": False}))


def test_a_wrong_pass_is_an_error_before_anything_is_traced():
    with pytest.raises(GlueContractError, match="derive its class"):
        torch.compile(fn, backend="glue", options={"extra_passes": [3]})(torch.ones(2, 2))
    with pytest.raises(GlueOptionError, match="'extra_passes' is a list"):
        torch.compile(fn, backend="glue", options={"extra_passes": Own})(torch.ones(2, 2))
    with pytest.raises(GlueOptionError, match="did you mean 'own'"):
        torch.compile(fn, backend="glue", options={"extra_passes": [Own], "passes": {"ow": False}})(torch.ones(2, 2))


def test_installed_packages_register_passes_and_a_broken_one_is_left_out(own_pass, monkeypatch):
    found = [
        EntryPoint("broken", "no.such.module:Pass", registry.ENTRY_POINTS),
        EntryPoint("theirs", own_pass, registry.ENTRY_POINTS),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: found if group == registry.ENTRY_POINTS else [])
    with pytest.warns(GlueWarning, match="entry point 'broken'.*cannot be imported"):
        passes = registry.all_passes.__wrapped__()
    assert passes[-1].name == "drop_contiguous"


def uuid(*extra, **options):
    return Pipeline(registry.with_extra(registry.all_passes(), extra), GlueOptions(**options)).uuid()


def test_the_cache_key_knows_the_pass_and_what_it_was_made_with():
    assert uuid(Own(1)) == uuid(Own(1)) != uuid(Own(2))
    assert uuid(Own(1)) != uuid()
    assert uuid(fuel=3) is uuid(verify=True) is None  # what comes from a cache was not rewritten in this process
    with pytest.warns(GlueWarning, match="'own' nothing is cached"):
        assert uuid(Own(lambda: None)) is None


def test_a_class_without_a_file_is_not_cached():
    typed = type("Typed", (Own,), {"name": "typed", "__module__": "__main__made_up"})
    with pytest.warns(GlueWarning, match="'typed' nothing is cached"):
        assert uuid(typed()) is None
