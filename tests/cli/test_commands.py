"""The commands of ``glue``, called as a user calls them."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

pytest.importorskip("typer")

from typer.testing import CliRunner

from glue_compiler.cli.explain import TargetError, call_of, find
from glue_compiler.cli.main import app
from glue_compiler.errors import GlueGraphFileError, GlueOptionError
from glue_compiler.options import GlueOptions, parse_options
from glue_compiler.pipeline import registry
from glue_compiler.report.environment import pass_states
from glue_compiler.report.graph_text import DumpError
from glue_compiler.verify import bisection
from tests.report.test_dump import compile_and_call

MODEL = """
import torch

def repeated(x):
    return x.cumsum(0) * x.cumsum(0)

def build():
    return repeated, (torch.arange(4),), {}

def plain():
    return torch.arange(3).nonzero()

def nothing():
    return None

def needs(x):
    return x

number = 3
"""


OWN_PASS = """
from glue_compiler.pipeline.graph_pass import GraphPass, PassResult
from glue_compiler.pipeline.results import Numerics

class Own(GraphPass):
    name = "my_own_pass"
    numerics = Numerics.BITWISE

    def run(self, graph, context):
        return PassResult(changed=False)
"""


def twice(x):
    return x.cumsum(0) * 2 + x.cumsum(0) * 3, torch.rand_like(x.float()), torch.rand_like(x.float())


def run(*arguments):
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


@pytest.fixture
def dump(tmp_path):
    compile_and_call(twice, tmp_path, torch.arange(4))
    return tmp_path


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "of_the_user.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "of_the_user"
    sys.modules.pop("of_the_user", None)


def test_help_names_every_command():
    result = run("--help")
    assert result.exit_code == 0
    for command in ("doctor", "explain", "diff", "view", "replay", "bisect"):
        assert command in result.output
        assert run(command, "--help").exit_code == 0


def test_without_its_libraries_the_command_says_what_to_install():
    script = (
        "import sys; sys.modules['typer'] = None; from glue_compiler.cli import entry_point\n"
        "sys.argv = ['glue', 'doctor']; entry_point()"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert result.returncode == 1
    assert "pip install -e '.[cli]'" in result.stderr


@pytest.mark.slow
def test_an_error_of_glue_is_one_message_without_a_traceback(tmp_path):
    script = (
        "import sys; from glue_compiler.cli import entry_point\n"
        f"sys.argv = ['glue', 'view', {str(tmp_path)!r}]; entry_point()"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert result.returncode == 2
    assert "DumpError" in result.stderr
    assert "Traceback" not in result.stderr


# -- doctor


def test_doctor_names_torch_and_every_pass():
    result = run("doctor")
    assert result.exit_code == 0, result.output
    assert torch.__version__ in result.output
    for name in registry.pass_names():
        assert name in result.output


def states(options):
    return {state.name: (state.runs, state.reason) for state in pass_states(options)}


def test_doctor_says_why_a_pass_is_on_or_off():
    found = states(GlueOptions())
    assert found["hoist_metadata"] == found["share_layers"] == (True, "on by default")
    assert not found["overlap_offload"][0]
    assert states(GlueOptions(offload="checkpoints"))["overlap_offload"][0]
    with torch._functorch.config.patch(enable_activation_offloading=True):
        assert states(GlueOptions())["overlap_offload"][0]


def test_doctor_sees_what_the_environment_switches_off():
    options = parse_options(None, None, registry.pass_names(), {"GLUE_DISABLE": "hoist_metadata"})
    assert states(options)["hoist_metadata"] == (False, "GLUE_DISABLE")
    assert states(options)["memoize_metadata"][0]


def test_doctor_sees_what_torch_switches_off():
    with torch._inductor.config.patch(disabled_passes="other,hoist_metadata"):
        found = states(GlueOptions())
    assert found["hoist_metadata"] == (False, "torch._inductor.config.disabled_passes")
    assert found["memoize_metadata"][0]


def test_doctor_fails_on_a_wrong_variable(monkeypatch):
    monkeypatch.setenv("GLUE_DISABLE", "hoist")
    result = run("doctor")
    assert result.exit_code == 1
    assert "hoist_metadata" in result.output


@pytest.mark.parametrize(
    ("card", "words"),
    [
        ("sm_75", ["64 KiB", "compute capability 8.0", "expert by expert", "use fp16"]),
        ("RTX 4090", ["sm_89", "99 KiB", "flex_attention"]),
        ("sm_90", ["cuDNN", "flash-attn-4", "quack-kernels"]),
    ],
)
def test_doctor_says_what_runs_on_a_card(monkeypatch, card, words):
    monkeypatch.setenv("COLUMNS", "300")
    result = run("doctor", "--card", card)
    assert result.exit_code == 0
    assert all(word in result.output for word in words), result.output


def test_doctor_names_the_nearest_of_cards_that_it_does_not_know():
    with pytest.raises(GlueOptionError, match="did you mean 'sm_89'"):
        run("doctor", "--card", "sm_88")


def test_doctor_shows_passes_of_the_users_own(module, tmp_path, monkeypatch):
    (tmp_path / "of_the_user.py").write_text(OWN_PASS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("GLUE_EXTRA_PASSES", "of_the_user:Own")
    assert "my_own_pass" in run("doctor").output
    monkeypatch.setenv("GLUE_EXTRA_PASSES", "of_the_user:Onw")
    result = run("doctor")
    assert result.exit_code == 1
    assert "Onw" in result.output


# -- explain


def test_explain_runs_on_what_the_function_returns(module):
    result = run("explain", f"{module}:build", "--option", "compiler=aot_eager")
    assert result.exit_code == 0, result.output
    assert "hoist_metadata: merged 1" in result.output


def test_explain_runs_on_the_function_itself(module):
    result = run("explain", f"{module}:plain")
    assert "host sync" in result.output
    assert "nonzero" in result.output


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("of_the_user", "MODULE:FUNCTION"),
        ("of_the_user:buidl", "did you mean 'build'"),
        ("not_there:f", "no module 'not_there'"),
        ("of_the_user:needs", "takes arguments .*'x'"),
        ("of_the_user:number", "not a function"),
    ],
)
def test_a_wrong_target_says_what_to_write(module, target, says):
    with pytest.raises(TargetError, match=says):
        find(target)


@pytest.mark.parametrize("returned", [(torch.ones(1), torch.ones(1)), (3,), (max, 3), (3, (), {}), None])
def test_what_is_no_call_leaves_the_function_itself(returned):
    def function():
        return returned

    assert call_of(function) == (function, (), {})


@pytest.mark.parametrize(
    ("returned", "call"),
    [
        ((max,), (max, (), {})),
        ((max, [1, 2]), (max, (1, 2), {})),
        ((max, {"key": abs}), (max, (), {"key": abs})),
        ((max, (), {"key": abs}), (max, (), {"key": abs})),
    ],
)
def test_a_returned_call_is_explained(returned, call):
    assert call_of(lambda: returned) == call


@pytest.mark.parametrize(
    ("returned", "shown"),
    [
        (torch.nn.Linear(1, 1), "a Linear alone"),
        ((torch.nn.Linear(1, 1), torch.ones(1)), "(Linear, Tensor)"),
        ((torch.nn.Linear(1, 1), None, {}), "(Linear, NoneType, dict)"),
    ],
)
def test_a_model_that_is_returned_in_another_way_says_what_to_return(returned, shown):
    with pytest.raises(TargetError, match=re.escape(shown) + r".*return \(model, args, kwargs\)"):
        call_of(lambda: returned)


def test_a_function_without_tensors_says_what_to_return(module):
    with pytest.raises(TargetError, match=r"computes nothing with tensors.*return \(model, args, kwargs\)"):
        run("explain", f"{module}:nothing")


# -- replay and bisect


def test_replay_runs_a_dumped_graph_against_the_one_before(dump):
    result = run("replay", str(dump / "graph_000" / "01_hoist_metadata.after.py"))
    assert result.exit_code == 0
    assert "after.py" in result.output


def test_replay_of_what_is_not_there_is_a_mistake(tmp_path):
    assert run("replay", str(tmp_path / "nothing.py")).exit_code == 2


def test_bisect_takes_the_whole_command_after_two_dashes(monkeypatch, tmp_path):
    calls = []

    def find(command, **rest):
        calls.append((command, rest))
        raise bisection.NothingToFind("nothing")

    monkeypatch.setattr(bisection, "bisect", find)
    result = run(
        "bisect", "--metric", r"loss (\S+)", "--folder", str(tmp_path), "--", "python", "t.py", "--metric", "x"
    )
    assert result.exit_code == 2
    expected = {"metric": r"loss (\S+)", "tolerance": 0.0, "limit": None, "folder": tmp_path}
    assert calls == [(["python", "t.py", "--metric", "x"], expected)]


# -- diff and view


def test_diff_shows_what_was_removed_and_its_source_line(dump):
    result = run("diff", str(dump), "--graph", "0", "--pass", "hoist_metadata")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert any(line.startswith("-") and "cumsum" in line for line in lines)
    assert "test_commands.py:" in result.output
    assert any(line.startswith("+") and "mul" in line for line in lines)
    assert "make_inputs" not in result.output


def test_diff_leaves_out_what_is_equal_and_far_away(dump):
    few, more = (run("diff", str(dump), "--context", number).output.splitlines() for number in ("0", "20"))
    assert not any(line.startswith(" ") for line in few)
    assert any(line.startswith(" ") for line in more)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--graph", "3"], "no graph 3; graphs: 0"),
        (["--pass", "memoize_metadata"], "did not change graph 0; those that did: hoist_metadata"),
        (["--pass", "hoist_metdata"], "did you mean 'hoist_metadata'"),
    ],
)
def test_diff_of_what_is_not_there_names_what_is(dump, arguments, says):
    with pytest.raises(DumpError, match=says):
        run("diff", str(dump), *arguments)


def test_view_writes_one_page_that_loads_nothing(dump):
    result = run("view", str(dump))
    assert result.exit_code == 0, result.output
    page = (dump / "view.html").read_text()
    assert "hoist_metadata" in page
    for fetching in ("src=", "@import", "url(", '<link rel="stylesheet', "fetch("):
        assert fetching not in page
    assert "default-src 'none'" in page


def test_a_page_survives_code_that_looks_like_html(tmp_path):
    compile_and_call(lambda x: x + len("</script><b>"), tmp_path, torch.ones(2))
    target = tmp_path / "elsewhere.html"
    assert run("view", str(tmp_path), "-o", str(target)).exit_code == 0
    assert "</script><b>" not in target.read_text()


@pytest.mark.parametrize("content", [b"\xff\xfe", b"{}", b'{"graphs": 3}'])
def test_a_summary_that_is_none_is_one_line_and_exit_code_2(content, tmp_path):
    (tmp_path / "summary.json").write_bytes(content)
    with pytest.raises(DumpError, match="is not a summary of glue"):
        run("view", str(tmp_path))


def test_graphs_that_cannot_be_read_are_one_line(tmp_path):
    compile_and_call(lambda x: x + 1, tmp_path, torch.ones(3))
    file = tmp_path / "graph_000" / "00_unchanged.py"
    file.write_bytes(b"x = '\xff'\n")
    with pytest.raises(DumpError, match="00_unchanged.py"):
        run("view", str(tmp_path))
    with pytest.raises(GlueGraphFileError, match="00_unchanged.py does not run here"):
        run("replay", str(file))
    file.with_name("01_own.after.py").write_bytes(b"x = '\xff'\n")
    with pytest.raises(GlueGraphFileError, match=r"compared with 01_own.before.py beside it, which is not there"):
        run("replay", str(file.with_name("01_own.after.py")))


def test_a_file_that_is_gone_is_said(tmp_path):
    compile_and_call(lambda x: x + 1, tmp_path, torch.ones(3))
    assert "are not there" not in run("view", str(tmp_path)).stderr
    (tmp_path / "graph_000" / "00_unchanged.py").unlink()
    assert "1 of the dump's 1 files are not there" in run("view", str(tmp_path)).stderr
