"""What a run draws: each kind in its turn, a part by Inductor, a part twice; and what scripts hold."""

import dataclasses
import re
from collections import Counter
from random import Random

import pytest

from tests.tools.fuzz.made import WRONG, program
from tools.fuzz.campaign import TRIES, drawn, turn
from tools.fuzz.check import verdict
from tools.fuzz.failures import examined
from tools.fuzz.kinds import KINDS, draw_program
from tools.fuzz.script import fails_alone, script_of
from tools.fuzz.settings import DEFAULT_DTYPE
from tools.fuzz.tally import Settings, Tally


def test_each_kind_has_its_share_of_all_of_inductors_and_of_those_compiled_twice():
    turns = [turn(Settings(seed=1), number) for number in range(96 * len(KINDS))]
    count = Counter(each for kind, compiler, twice in turns for each in (kind, (kind, compiler), (kind, twice)))
    for kind in KINDS:
        assert (count[kind], count[kind, "inductor"], count[kind, True]) == (96, 12, 6)
    assert all(compiler == "inductor" for _, compiler, twice in turns if twice)


def test_a_number_draws_the_same_program_whatever_was_drawn_before():
    settings, tally = Settings(seed=3), Tally("programs")
    for number in range(3):
        drawn(settings, number, tally)
    again = drawn(settings, 2, Tally("programs"))
    assert again is not None
    assert again == drawn(settings, 2, tally)


def test_a_program_that_eager_refuses_does_not_take_its_kinds_turn(monkeypatch):
    answers = iter([None, None, program("y = x")])
    monkeypatch.setattr("tools.fuzz.campaign.repaired", lambda *_: next(answers))
    tally = Tally("programs")
    assert drawn(Settings(seed=1, kinds=("steps",)), 0, tally) is not None
    assert (tally.of_kind["drawn", "steps"], tally.of_kind["refused", "steps"]) == (3, 2)
    monkeypatch.setattr("tools.fuzz.campaign.repaired", lambda *_: None)
    assert drawn(Settings(seed=1, kinds=("steps",)), 0, tally) is None
    assert tally.of_kind["refused", "steps"] == 2 + TRIES


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_third_of_each_kind_is_rewritten(kind):
    settings, tally = Settings(seed=2, kinds=(kind,)), Tally("programs")
    for number in range(7):  # the eighth is Inductor's
        given = drawn(settings, number, tally)
        if given is not None:
            found = verdict(given)
            tally.count(kind, found.fired, found.skipped)
    assert 3 * tally.of_kind["rewritten", kind] >= tally.ran >= 5
    assert f"{kind}: drawn {tally.of_kind['drawn', kind]}, rewritten" in "\n".join(tally.lines())


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("attention", r"repeat_interleave\(\d, dim=1\)\[:, :\d\][^@]*enable_gqa=True"),
        ("attention", r"data\[:, :, :1\] = float\('nan'\)"),
        ("losses", r"class_weight\[::2\] = 0[^@]*weight=class_weight"),
        ("losses", r"class_weight.zero_\(\)"),
        ("losses", r"\[:, : int\(mask.sum\(1\).max\(\)\)\]"),
        ("losses", r"in_loss\(i, out\):\n    return out.dim\(\) == 0[^@]*optim.SGD"),
        ("losses", r"hidden.data\[[^@]*SPOILED = \('gradient of input 1', "),
        ("losses", r"hidden.data\[[^@]*SPOILED = \(\)"),
        ("metadata", r", : int\(lens\d+\[1\]\)\]"),
        ("experts", r"x.data\[:1\] = float\('nan'\)"),
        ("steps", r"buffer.fill_\(float\('nan'\)\)"),
        ("layers", r"stacked.data\[1, 0\] = float\('inf'\)"),
    ],
)
def test_among_what_is_drawn_there_is(kind, wanted):
    assert any(re.search(wanted, draw_program(Random(seed), kind).source().replace("@", "")) for seed in range(400))


def test_inductor_gets_more_programs_whose_sizes_are_read_from_data():
    def cuts(compiler):
        texts = [draw_program(Random(seed), "metadata", compiler=compiler).source() for seed in range(60)]
        return sum(bool(re.search(r": int\(|int\([^)]*\) :\]|\.item\(\)\]", text)) for text in texts)

    assert cuts("inductor") > max(18, 1.5 * cuts("aot_eager"))


SETTING = program(
    "y = x.sin() if torch.get_default_dtype() is torch.float64 else x.tanh()",
    prelude=(DEFAULT_DTYPE.strip(),),
    settings=("default_dtype(torch.float64)",),
    options=(("extra_passes", [WRONG]),),
)


def test_a_failure_that_needs_a_setting_keeps_it_and_loses_others(monkeypatch):
    monkeypatch.setattr("tools.fuzz.failures.fails_alone", lambda _: True)
    also = dataclasses.replace(SETTING, settings=(*SETTING.settings, "torch._dynamo.config.patch(verbose=True)"))
    failure = examined(also, verdict(also).wrong, 60.0, "here")
    assert failure is not None
    assert "SETTINGS = [lambda: default_dtype(torch.float64)]\n" in failure.script
    assert verdict(dataclasses.replace(SETTING, settings=())).wrong == []


@pytest.mark.slow
def test_a_script_has_the_settings_and_functions_compiled_one_by_one():
    assert fails_alone(script_of(SETTING, [], "")) is True
    assert fails_alone(script_of(dataclasses.replace(SETTING, settings=()), [], "")) is False
    inner = dataclasses.replace(
        program("y = inner(x)", prelude=("def inner(x): return x.sin()",), options=SETTING.options), compiled=("inner",)
    )
    assert fails_alone(script_of(inner, [], "")) is True
    assert fails_alone("raise RuntimeError") is False


def test_a_script_that_is_right_alone_says_so(monkeypatch):
    monkeypatch.setattr("tools.fuzz.failures.fails_alone", lambda _: False)
    failure = examined(SETTING, verdict(SETTING).wrong, 0.0, "here")
    assert failure is not None
    assert failure.script.startswith("# Right in a process of its own")


SECOND = "tests.tools.fuzz.levels:WrongTheSecondTime"


@pytest.mark.slow
@pytest.mark.parametrize("extra", [[], [SECOND]], ids=["right", "wrong"])
def test_what_only_a_second_compile_does_wrong_is_found(extra):
    options = (("extra_passes", extra), ("compiler", "inductor"))
    found = verdict(program("y = x.sin() * 2", options=options, twice=True))
    if extra:
        assert found.wrong
        assert all(each.endswith("(with warm caches)") for each in found.wrong)
    else:
        assert found.wrong == []
        assert found.warm > 0
    assert verdict(program("y = x.sin() * 2", options=options)).wrong == []


def test_layers_of_regions_are_modules_and_are_found():
    """Their loop is in the program, with something behind it."""
    programs = [draw_program(Random(seed), "regions") for seed in range(20)]
    asked = [dict(each.options) for each in programs]
    found = {next(iter(each.items()), "nothing") for each in asked}
    assert found == {("regions", "auto"), ("memory_budget", "1GiB"), "nothing"}
    assert {each.get("compiler") for each in asked if "memory_budget" in each} == {None, "inductor"}
    assert all("for i, layer in enumerate(model):" in each.source() for each in programs)
    assert any("checkpoint(super().forward" in each.source() for each in programs)
    # Each is several graphs, and torch gives zeros to what was used by no used result of one.
    assert all(each.zero_for_none for each in programs)
    assert not any(draw_program(Random(seed), "layers").zero_for_none for seed in range(20))


def test_masks_go_from_one_graph_to_another():
    texts = [draw_program(Random(seed), "attention").source() for seed in range(80)]
    assert any("graph_break()" in text for text in texts)
