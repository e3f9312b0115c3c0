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
from glue_compiler.ops import loss_chunks
from glue_compiler.testing.fuzz import harness, workers
from glue_compiler.testing.fuzz.__main__ import main
from glue_compiler.testing.fuzz.campaign import repaired
from glue_compiler.testing.fuzz.check import NotAProgram, eager_results, module_of, runs_eagerly, verdict
from glue_compiler.testing.fuzz.failures import examined
from glue_compiler.testing.fuzz.graph_campaign import checked
from glue_compiler.testing.fuzz.graph_text import program_of
from glue_compiler.testing.fuzz.graphs import CannotRecord, draw_template, record_values
from glue_compiler.testing.fuzz.kinds import KINDS, draw_program
from glue_compiler.testing.fuzz.mutations import MUTATIONS, mutate
from glue_compiler.testing.fuzz.process_state import ProcessState
from glue_compiler.testing.fuzz.programs import Call, Program, Statement, paths, unwrapped, without
from glue_compiler.testing.fuzz.shrink import shrunk
from glue_compiler.testing.fuzz.tally import Settings
from tests.testing import fuzz_levels

WRONG = "tests.verify.wrong_passes:RenameFunctions"
"""Writes ``sin`` as ``cos``."""


@pytest.fixture(autouse=True)
def settings_restored(monkeypatch):
    """Programs with losses compute them in small chunks, and keep graphs."""
    monkeypatch.setitem(loss_chunks.LIMITS, "cpu", loss_chunks.LIMITS["cpu"])
    with torch._functorch.config.patch(donated_buffer=True):
        yield


def program(*lines, outputs=("y",), prelude=(), **further):
    return Program(
        kind="test",
        prelude=(Statement("FLOAT = torch.float64"), *map(Statement, prelude)),
        make=(Statement("x = torch.arange(1.0, 5.0, dtype=FLOAT).add(seed).requires_grad_()"),),
        inputs=("x",),
        body=tuple(line if isinstance(line, Statement) else Statement(line) for line in lines),
        outputs=outputs,
        calls=further.pop("calls", (Call("fresh", 1), Call("fresh", 2))),
        **further,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_draws_the_same_program_each_time_and_another_seed_another(kind):
    first, again, other = (draw_program(Random(seed), kind).source() for seed in (0, 0, 1))
    assert first == again != other


@pytest.mark.parametrize("kind", KINDS)
def test_most_of_what_is_drawn_runs_eagerly(kind):
    drawn = [repaired(draw_program(Random(seed), kind), Random(seed)) for seed in range(20)]
    assert sum(each is not None for each in drawn) >= 15


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
    monkeypatch.setattr("glue_compiler.testing.fuzz.failures.is_torchs_own", lambda *_: True)
    wrong = program("y = x.sin()", options=(("extra_passes", [WRONG]),))
    assert examined(wrong, verdict(wrong).wrong, 0.0, "here") is None


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


def compared(expected, actual, **settings):
    return harness.differences({"PRECISION": "float64", "ZERO_FOR_NONE": False, **settings}, expected, actual)


ONE = torch.ones(2, dtype=torch.float64)


def test_what_eager_makes_of_nan_is_not_compared():
    half = torch.tensor([1.0, float("nan")], dtype=torch.float64)
    assert compared({"output 0": half}, {"output 0": ONE}) == []
    (difference,) = compared({"output 0": half}, {"output 0": ONE * 2})
    assert "off by" in difference


@pytest.mark.parametrize(
    ("expected", "actual", "told"),
    [
        (ONE, ONE + 1e-6, "off by"),
        (ONE, ONE.float(), "float32"),
        (ONE, ONE[:1], "(1,)"),
        (ONE, ONE * float("nan"), "NaN"),
        (ONE, None, "compiled None"),
        (None, torch.zeros(2), "eager None"),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "[1, 3]"),
        (True, False, "compiled False"),
    ],
)
def test_what_differs_is_told(expected, actual, told):
    (difference,) = compared({"output 0": expected}, {"output 0": actual})
    assert told in difference
    assert compared({"output 0": expected}, {"output 0": expected}) == []


def test_a_gradient_of_zeros_for_a_parameter_that_no_data_selected_is_allowed_where_it_is_documented():
    none, zeros, ones = {"gradient": None}, {"gradient": torch.zeros(2)}, {"gradient": torch.ones(2)}
    assert compared(none, zeros) != []
    assert compared(none, zeros, ZERO_FOR_NONE=True) == []
    assert compared(none, ones, ZERO_FOR_NONE=True) != []
    without, with_one = {"output 0 requires grad": False}, {"output 0 requires grad": True}
    assert compared(without, with_one) != []
    assert compared(without, with_one, ZERO_FOR_NONE=True) == []
    assert compared(with_one, without, ZERO_FOR_NONE=True) != []


def test_an_error_in_one_of_both_is_told():
    error = {"call 1: error": "ValueError: no"}
    assert compared(error, {}) != []
    assert compared({}, error) != []
    assert compared(error, {"call 1: error": "RuntimeError: in other words"}) == []


def test_a_tensor_that_a_compile_keeps_alive_is_told():
    kept = []
    module = module_of(program("y = x * 2"))

    def keeps(f):
        def call(*inputs):
            kept.append(f(*inputs))
            return kept[-1]

        return call

    expected = harness.observe(module_of(program("y = x * 2")))
    (difference,) = harness.differences(module, expected, harness.observe(module, keeps))
    assert difference.startswith("alive afterwards")


def test_python_state_is_compared():
    counts = ("STATE = [0]",)
    module = module_of(program("STATE[0] += 1", "y = x * 2", prelude=counts))
    expected = harness.observe(module_of(program("STATE[0] += 1", "y = x * 2", prelude=counts)))
    actual = harness.observe(module, lambda f: lambda x: (x * 2,))
    assert "call 2: STATE: eager [2], compiled [0]" in harness.differences(module, expected, actual)


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
    assert compared(expected, eager_results(text)) == []


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
    drawn = template(first=1)  # that of 0 hides all keys, so its queries do not matter
    gm = copy_graph_module(drawn.graph)
    (query, *_) = gm.graph.find_nodes(op="placeholder")
    with gm.graph.inserting_after(query):
        sine = gm.graph.call_method("sin", (query,))
    query.replace_all_uses_with(sine, lambda user: user is not sine)
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
            *(sys.executable, "-m", "glue_compiler.testing.fuzz", "--workers", "2", "--count", "2", "--seconds", "200"),
            *("--seed", "5", "--level", "graphs", "--kind", "metadata"),
        ],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "graphs: 2 in" in found.stdout


@pytest.mark.slow
@pytest.mark.parametrize("level", [fuzz_levels.dies, fuzz_levels.runs], ids=lambda level: level.__name__)
def test_a_worker_that_dies_loses_nothing(level, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(workers.LEVELS, "programs", level)
    total = workers.run_in(2, "programs", Settings(seed=7, seconds=600, keep=tmp_path))
    deaths = [2, 4] if level is fuzz_levels.dies else []
    assert total.ran == 2 * (fuzz_levels.COUNT - len(deaths))
    seeds = (7, 7 + 1_000_003)
    assert {each.origin for each in total.failures} == {f"seed {s}, programs from {n}" for s in seeds for n in deaths}
    assert {each.wrong[0] for each in total.failures} == {f"the worker died (exit code {c})" for c in (3, 1) if deaths}
    assert len(list(tmp_path.iterdir())) == len(total.failures)
    assert ("--seed 7 --first 4 --count 1" in capsys.readouterr().out) == bool(deaths)


def test_a_worker_that_never_starts_ends_the_run(monkeypatch):
    monkeypatch.setitem(workers.LEVELS, "programs", fuzz_levels.dies_at_once)
    with pytest.raises(RuntimeError, match="does not start"):
        workers.run_in(2, "programs", Settings(seed=7))


@pytest.mark.parametrize("written", [None, 1])
def test_a_caller_writes_the_outputs_or_one_input(written):
    given = dataclasses.replace(program(), between="out.detach().zero_()", written=written)
    outputs, inputs = [[torch.ones(2, requires_grad=True) for _ in range(3)] for _ in range(2)]
    module_of(given)["between"](outputs, inputs)
    assert [bool(out.any()) for out in (*outputs, *inputs)] == (
        [False] * 3 + [True] * 3 if written is None else [True] * 4 + [False, True]
    )


def test_graphs_of_a_kind_whose_passes_come_later_are_not_drawn(capsys):
    assert main(["--level", "graphs", "--kind", "steps", "--count", "1", "--seed", "1"]) == 0
    assert "1 graphs" not in capsys.readouterr().out
