"""Passes of the user's own: the one in docs/, options, entry points, the cache key."""

import json
import re
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from glue_compiler.errors import GlueContractError, GlueOptionError, GlueWarning
from glue_compiler.options import GlueOptions
from glue_compiler.pipeline import registry
from glue_compiler.pipeline.graph_pass import GraphPass, PassResult
from glue_compiler.pipeline.results import Numerics
from glue_compiler.pipeline.run import Pipeline
from glue_compiler.testing import (
    assert_equivalent,
    assert_rewritten,
    assert_untouched,
    capture,
    find,
    operators_of,
    run_pass,
)

PAGE = (Path(__file__).parents[1] / "docs" / "own_pass.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def own_pass(tmp_path, monkeypatch):
    """The file of docs/own_pass.md, as a module that can be imported."""
    (tmp_path / "narrow_softmax.py").write_text(BLOCKS[0])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.delitem(sys.modules, "narrow_softmax", raising=False)
    return "narrow_softmax:NarrowSoftmax"


def softmax_of(x):
    return x.float().softmax(-1).to(x.dtype)


def under_autocast(x):
    with torch.autocast("cpu", torch.bfloat16):
        return softmax_of(x @ x)


def autocast_around_softmax(x):
    y = x.float()
    with torch.autocast("cpu", torch.bfloat16):
        y = y.softmax(-1)
    return y.to(x.dtype)


def read_twice(x):
    weights = x.float().softmax(-1)
    return weights.to(x.dtype) * weights.sum().to(x.dtype)


def converted_twice(x):
    weights = x.float().softmax(-1)
    return weights.to(x.dtype) * weights.to(x.dtype)


def input_written(x):
    y = x * 1
    wide = y.float()
    y.mul_(2)
    return wide.softmax(-1).to(x.dtype) + y


def input_written_later(x):
    y = x * 1
    weights = softmax_of(y)
    y.mul_(2)
    return weights + y


def softmax_written(x):
    with torch.no_grad():
        weights = x.float().softmax(-1)
        weights.mul_(2)
        return weights.to(x.dtype)


def result_written(x):
    weights = softmax_of(x)
    weights.mul_(2)
    return weights * 1


def without_gradients_inside(x):
    with torch.no_grad():
        wide = x.float()
    return wide.softmax(-1).to(x.dtype) * x


REWRITTEN = {
    "the methods": softmax_of,
    "functions, and the input by name": lambda x: F.softmax(input=x.to(torch.float32), dim=1).type_as(x),
    "a dtype for softmax": lambda x: F.softmax(x, -1, dtype=torch.float32).to(torch.bfloat16),
    "in double precision, over another dimension": lambda x: torch.softmax(x.double(), 0).bfloat16(),
    "widened twice": lambda x: x.float().double().softmax(-1).to(x.dtype),
    "in a checkpoint": lambda x: checkpoint(lambda y: softmax_of(y) * 2, x, use_reentrant=False),
    "under autocast": under_autocast,
    "without gradients": torch.no_grad()(softmax_of),
    "its result is written later": result_written,
    "converted to the dtype that it has": lambda x: softmax_of(x).to(torch.bfloat16),
    "the narrow result is widened again": lambda x: softmax_of(x).float() * 3,
}
LEFT = {
    "the softmax is used in torch.float32": [
        lambda x: x.float().softmax(-1).to(torch.float16),
        lambda x: x.float().softmax(-1).sum(),
        lambda x: (x.float().softmax(-1) * 2).to(x.dtype),
        lambda x: x.float().softmax(-1).T.to(x.dtype),
        softmax_written,
        read_twice,
    ],
    "used elsewhere too": [read_twice, converted_twice],
    "written in place before": [input_written],
    "written in place later, and backward": [input_written_later],
    "gradients are switched off": [without_gradients_inside],
    "autocast is switched": [autocast_around_softmax],
}
NO_CANDIDATES = [
    lambda x: x.softmax(-1),
    lambda x: x.float().log_softmax(-1).to(x.dtype),
    lambda x: x.half().softmax(-1).to(x.dtype),  # half holds other numbers than bfloat16
    lambda x: x.float().sum(-1).to(x.dtype),
]


def run_on(fn, own_pass):
    x = torch.randn(4, 4, dtype=torch.bfloat16, requires_grad=True)
    (graph,) = capture(fn, x)
    result = run_pass(graph, own_pass)
    assert_equivalent(result.before, result.after, [x], numerics=Numerics.CLOSE)
    return result


@pytest.mark.parametrize("fn", REWRITTEN.values(), ids=REWRITTEN)
def test_the_pass_of_the_docs_rewrites_every_spelling(fn, own_pass):
    result = run_on(fn, own_pass)
    assert_rewritten(result, times=1)
    assert not result.skip_reasons
    assert find(result.after, torch.ops.aten._softmax.default)
    assert sum("aten.softmax" in line for line in operators_of(result.after)) == 1


@pytest.mark.parametrize(("reason", "fn"), [(reason, fn) for reason, fns in LEFT.items() for fn in fns])
def test_the_pass_of_the_docs_says_why_it_leaves_a_near_miss(fn, reason, own_pass):
    assert_untouched(run_on(fn, own_pass), reason=reason)


@pytest.mark.parametrize("fn", NO_CANDIDATES)
def test_what_is_no_candidate_needs_no_reason(fn, own_pass):
    result = run_on(fn, own_pass)
    assert_untouched(result)
    assert not result.skip_reasons


def test_the_pass_of_the_docs_is_short_and_the_page_too():
    lines = [line for line in BLOCKS[0].splitlines() if line.strip() and not re.match("# |from |import ", line)]
    assert len(lines) <= 27
    assert len(PAGE.split()) < 1200


def test_the_other_code_of_the_page_runs(own_pass, capsys):
    _, operators, tests, switching = BLOCKS
    exec(compile(operators, "docs/own_pass.md", "exec"), {})
    shown = [line.removeprefix("# ") for line in operators.splitlines() if line.startswith("# ") and "..." not in line]
    printed = capsys.readouterr().out.splitlines()
    assert shown
    assert all(line in printed for line in shown)
    names = {}
    exec(compile(tests, "docs/own_pass.md", "exec"), names)
    found = [test for name, test in names.items() if name.startswith("test_")]
    assert len(found) == 2
    for test in found:
        test()
    exec(compile(switching, "docs/own_pass.md", "exec"), {**names, "model": torch.nn.Linear(2, 2)})


def fn(x):
    return (x.float().softmax(-1).to(x.dtype) * 2).sin() + x.float().softmax(-1).to(torch.float16)


def test_it_gets_dumps_skips_verification_and_switches_for_free(own_pass, tmp_path, monkeypatch):
    x = torch.randn(3, 3, dtype=torch.bfloat16, requires_grad=True)
    options = {"compiler": "aot_eager", "strict": True, "verify": True, "dump": str(tmp_path / "dump")}
    torch.compile(fn, backend="glue", options={**options, "extra_passes": [own_pass]})(x).sum().backward()
    summary = json.loads((tmp_path / "dump" / "summary.json").read_text())
    report = summary["graphs"][0]["passes"][-1]
    assert (report["name"], report["counts"]["rewritten"], report["numerics"]) == ("narrow_softmax", 1, "close")
    assert [r["what"] for r in report["rewrites"]] == ["write to as _softmax.default"]
    assert "test_own_pass.py" in report["skips"][0]["source"]
    assert (tmp_path / "dump" / "graph_000" / "01_narrow_softmax.after.py").exists()
    torch.compiler.reset()
    monkeypatch.setenv("GLUE_EXTRA_PASSES", own_pass)
    monkeypatch.setenv("GLUE_DISABLE", "narrow_softmax")
    torch.compile(fn, backend="glue", options=options)(x)
    summary = json.loads((tmp_path / "dump" / "summary.json").read_text())
    assert all(p["name"] != "narrow_softmax" for p in summary["graphs"][1]["passes"])


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
    assert passes[-1].name == "narrow_softmax"


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
