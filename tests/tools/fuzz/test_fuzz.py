"""The fuzzer: what it draws is programs, what is planted is found and made small, and a script of it runs alone."""

import contextlib
import dataclasses
import os
import subprocess
import sys
from random import Random

import pytest
import torch

from glue_compiler.fx.copying import copy_graph_module
from tests.slow import one_in
from tests.tools.fuzz import levels
from tests.tools.fuzz.made import WRONG, program
from tools.fuzz import harness, workers
from tools.fuzz.__main__ import main
from tools.fuzz.campaign import repaired
from tools.fuzz.check import NotAProgram, eager_results, is_torchs_own, module_of, runs_eagerly, verdict
from tools.fuzz.failures import examined
from tools.fuzz.graph_campaign import checked
from tools.fuzz.graph_text import program_of
from tools.fuzz.graphs import CannotRecord, draw_template, record_values
from tools.fuzz.kinds import KINDS, draw_program
from tools.fuzz.mutations import MUTATIONS, mutate
from tools.fuzz.process_state import ProcessState
from tools.fuzz.programs import Call, Statement, paths, unwrapped, without
from tools.fuzz.shrink import shrunk
from tools.fuzz.tally import Settings


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_draws_the_same_program_each_time_and_another_seed_another(kind):
    first, again, other = (draw_program(Random(seed), kind).source() for seed in (0, 0, 1))
    assert first == again != other


@pytest.mark.parametrize("kind", one_in(3, KINDS))
def test_most_of_what_is_drawn_runs_eagerly(kind):
    drawn = [repaired(draw_program(Random(seed), kind), Random(seed)) for seed in range(20)]
    assert sum(each is not None for each in drawn) >= 12


@pytest.mark.parametrize("kind", KINDS)
def test_every_statement_has_a_path(kind):
    body = draw_program(Random(3), kind).body
    for path, statement in paths(body):
        assert statement not in [s for p, s in paths(without(body, path)) if p == path] or body.count(statement) > 1


def test_a_block_is_opened_and_a_statement_left_out():
    body = (Statement("with torch.no_grad():", (Statement("a"), Statement("b"))), Statement("c"))
    assert [s.text for s in unwrapped(body, (0,))] == ["a", "b", "c"]
    assert [s.text for _, s in paths(without(body, (0, 0)))] == ["c", "with torch.no_grad():", "b"]


def test_a_right_program_has_nothing_wrong():
    found = verdict(program("y = x.tanh() * 2", options=(("extra_passes", [WRONG]),)))
    assert found.wrong == []
    assert found.fired == {"rename_functions": 1}


@pytest.mark.slow
def test_a_wrong_pass_is_found_blamed_and_what_does_not_matter_goes():
    noise = Statement("with torch.no_grad():", (Statement("unused = x * 3"),))
    wrong = program(
        "a = x * 2",
        noise,
        "y = a.sin()",
        "z = x.tanh()",
        outputs=("z", "y"),
        calls=(Call("fresh", 1), Call("refill", 2)),
        options=(("extra_passes", [WRONG]),),
    )
    found = verdict(wrong)
    assert any("output 1: off by" in difference for difference in found.wrong)
    failure = examined(wrong, found.wrong, 60.0, "here")
    assert failure.owner == "rename_functions"
    assert "y = a.sin()" in failure.script
    for gone in ("no_grad():\n", "z = x.tanh()", "refill', 2"):
        assert gone not in failure.script.partition("# From here on")[0]


@pytest.mark.slow
def test_the_script_of_a_failure_runs_alone(tmp_path):
    wrong = program("y = x.sin()", options=(("extra_passes", [WRONG]),))
    file = tmp_path / "failure.py"
    file.write_text(examined(wrong, verdict(wrong).wrong, 0.0, "here").script)

    def run(*backend):
        where_the_pass_is = {**os.environ, "PYTHONPATH": os.getcwd()}
        return subprocess.run(
            [sys.executable, file, *backend], capture_output=True, text=True, timeout=300, env=where_the_pass_is
        )

    alone = run()
    assert (alone.returncode, "output 0: off by" in alone.stdout) == (1, True), alone.stderr
    assert run("aot_eager").stdout == "as eager\n"


def test_what_plain_aot_eager_does_wrong_is_not_glues_fault(monkeypatch):
    monkeypatch.setattr("tools.fuzz.failures.is_torchs_own", lambda *_: True)
    wrong = program("y = x.sin()", options=(("extra_passes", [WRONG]),))
    assert examined(wrong, verdict(wrong).wrong, 0.0, "here") is None


@pytest.mark.parametrize("regions", ["auto", "whole", None])
def test_what_layers_compiled_by_hand_do_wrong_is_not_glues_fault(regions):
    """A region keeps ``other`` for backward, where eager keeps ``other * 2``."""
    layer = """class Layer(torch.nn.Module):
    def forward(self, hidden, other):
        return hidden + (other * 2).square(), other
"""
    regional = program(
        "hidden, other = x, x * 2",
        "hidden, other = MODEL[0](hidden, other)",
        "other.mul_(2)",
        "y = hidden + other",
        prelude=(layer, "MODEL = [Layer()]"),
        options=(("regions", regions),) if regions else (),
    )
    assert is_torchs_own(regional, eager_results(regional)) == (regions != "whole")


def test_shrinking_keeps_what_the_failure_needs():
    small = shrunk(program("a = x + 1", "b = a * 2", "y = b.sin()"), lambda p: "b.sin()" in p.source(), 10.0)
    assert [s.text for s in small.body] == ["y = b.sin()"]


@pytest.mark.parametrize(("index", "is_one"), [(0, False), (1, True)])
def test_a_program_whose_checkpoints_compute_something_else_again_is_none(index, is_one):
    two = program(
        "y = checkpoint(reads, x, seen, use_reentrant=False)",
        "y = checkpoint(writes, y, seen, use_reentrant=False)",
        prelude=(
            "seen = torch.zeros(2)",
            "def reads(x, seen): return x.sin() * (seen[0] + 1)",
            f"def writes(x, seen): seen.data[{index}] = 4; return x * 2",
        ),
    )
    assert runs_eagerly(two) == is_one


def test_a_mode_that_is_left_behind_is_told():
    state = ProcessState.now()
    assert state.differences() == []
    with torch.no_grad():
        assert state.differences() == ["left behind: grad mode: was True, is False"]


def test_a_program_that_fails_eagerly_is_none():
    with pytest.raises(NotAProgram, match="not_there"):
        eager_results(program("y = not_there"))
    broken = program("y = x * 2", Statement("y = not_there", twist=True))
    assert not runs_eagerly(broken)
    assert [s.text for s in repaired(broken, Random(0)).body] == ["y = x * 2"]


def template(kind="attention", first=0):
    for seed in range(first, first + 20):
        with contextlib.suppress(NotAProgram):
            return draw_template(Random(seed), kind, "cpu")
    raise AssertionError("no program was captured in one graph")


def test_a_captured_graph_as_text_computes_the_same():
    drawn = template("metadata")
    text = program_of(drawn.graph, drawn)
    expected = eager_results(dataclasses.replace(drawn.program, calls=text.calls))
    assert harness.differences(module_of(text), expected, eager_results(text)) == []


def test_values_are_recorded_as_dynamo_does():
    drawn = template("metadata")
    gm = copy_graph_module(drawn.graph)
    before = {node.name: node.meta.get("example_value") for node in gm.graph.nodes}
    record_values(gm, drawn.inputs(1))
    for node in gm.graph.nodes:
        value, old = node.meta.get("example_value"), before[node.name]
        if isinstance(old, torch.Tensor):
            assert (value.dtype, value.dim(), value.requires_grad) == (old.dtype, old.dim(), old.requires_grad)
        assert torch.is_grad_enabled()


def test_each_mutation_changes_some_graph():
    drawn, random, done = template(), Random(0), set()
    for _ in range(200):
        gm = copy_graph_module(drawn.graph)
        before = str(gm.graph)
        name = mutate(gm, random)
        if name is not None and str(gm.graph) != before:
            gm.graph.lint()
            done.add(name)
    assert done == {mutation.__name__ for mutation in MUTATIONS}


def test_a_wrong_pass_over_a_graph_is_found():
    drawn = template()
    gm = copy_graph_module(drawn.graph)
    last = gm.graph.output_node()
    (out, *others) = last.args[0]
    with gm.graph.inserting_before(last):
        last.args = ((gm.graph.call_method("sin", (out,)), *others),)
    gm.recompile()
    right = checked(drawn, copy_graph_module(gm), "hoist_metadata")
    assert right.wrong == []
    wrong = checked(drawn, gm, WRONG)
    assert wrong.rewrites == 1
    assert any("off by" in difference for difference in wrong.wrong)


def test_a_graph_that_cannot_be_run_is_refused():
    drawn = template()
    gm = copy_graph_module(drawn.graph)
    last = gm.graph.output_node()
    with gm.graph.inserting_before(last):
        gm.graph.call_method("no_such_method", (last.args[0][0],))
    with pytest.raises(CannotRecord, match="no_such_method"):
        record_values(gm, drawn.inputs(1))


@pytest.mark.slow
def test_the_command_line_prints_its_seed_and_what_fired(capsys):
    code = main(["--seed", "1", "--count", "3", "--kind", "metadata", "--level", "graphs", "--pass", "hoist_metadata"])
    printed = capsys.readouterr().out
    assert printed.startswith("seed 1\n")
    assert "graphs: 3 in" in printed
    assert "hoist_metadata: rewrote" in printed
    assert code == ("FAILED" in printed)


@pytest.mark.slow
def test_two_workers_count_together():
    found = subprocess.run(
        [
            *(sys.executable, "-m", "tools.fuzz", "--workers", "2", "--count", "2", "--seconds", "200"),
            *("--seed", "5", "--level", "graphs", "--kind", "metadata"),
        ],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "graphs: 2 in" in found.stdout


@pytest.mark.slow
@pytest.mark.parametrize("level", [levels.dies, levels.runs], ids=lambda level: level.__name__)
def test_a_worker_that_dies_loses_nothing(level, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(workers.LEVELS, "programs", level)
    total = workers.run_in(2, "programs", Settings(seed=7, seconds=600, keep=tmp_path))
    deaths = [2, 4] if level is levels.dies else []
    assert total.ran == 2 * (levels.COUNT - len(deaths))
    seeds = (7, 7 + 1_000_003)
    assert {each.origin for each in total.failures} == {f"seed {s}, programs from {n}" for s in seeds for n in deaths}
    assert {each.wrong[0] for each in total.failures} == {f"the worker died (exit code {c})" for c in (3, 1) if deaths}
    assert len(list(tmp_path.iterdir())) == len(total.failures)
    assert ("--seed 7 --first 4 --count 1" in capsys.readouterr().out) == bool(deaths)


@pytest.mark.slow
def test_a_worker_that_never_starts_ends_the_run(monkeypatch):
    monkeypatch.setitem(workers.LEVELS, "programs", levels.dies_at_once)
    with pytest.raises(RuntimeError, match="does not start"):
        workers.run_in(2, "programs", Settings(seed=7))


def test_graphs_of_a_kind_whose_passes_come_later_are_not_drawn(capsys):
    assert main(["--level", "graphs", "--kind", "steps", "--count", "1", "--seed", "1"]) == 0
    assert "1 graphs" not in capsys.readouterr().out
