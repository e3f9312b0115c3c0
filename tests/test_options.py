"""Options: every key, every wrong key, every source."""

import pytest
import torch

from glue_compiler.errors import GlueOptionError, GlueWarning
from glue_compiler.options import OWN_KEYS, parse_bytes, parse_options

PASSES = ("hoist_metadata", "other_pass")


def parse(options=None, mode=None, **environment):
    return parse_options(options, mode, PASSES, environment)


def test_defaults():
    options = parse()
    assert (options.compiler, options.dump, options.strict, dict(options.inductor)) == ("inductor", None, False, {})


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [("compilr", "compiler"), ("dumb", "dump"), ("pases", "passes"), ("max_autotun", "max_autotune")],
)
def test_an_unknown_key_names_the_nearest(wrong, nearest):
    with pytest.raises(GlueOptionError, match=f"unknown option '{wrong}'; did you mean '{nearest}'"):
        parse({wrong: 1})


def test_an_unknown_key_lists_glues_own():
    with pytest.raises(GlueOptionError) as error:
        parse({"zzzz": 1})
    assert all(key in str(error.value) for key in OWN_KEYS)


def test_an_unknown_pass_and_an_unknown_compiler_name_the_nearest():
    with pytest.raises(GlueOptionError, match="did you mean 'hoist_metadata'"):
        parse({"passes": {"hoist_metdata": False}})
    with pytest.raises(GlueOptionError, match="did you mean 'inductor'"):
        parse({"compiler": "indcutor"})


@pytest.mark.parametrize(
    "options",
    [
        {"strict": 1},
        {"capture": "off"},
        {"passes": ["hoist_metadata"]},
        {"passes": {"hoist_metadata": 1}},
        {"dump": 3},
        {"hoist_limit": "many"},
        {"hoist_limit": -1},
        {"assume": True},
        {"assume": {"sorted_ids": True}},
        {"assume": {"sorted_document_ids": 1}},
    ],
)
def test_a_value_of_the_wrong_type_is_an_error(options):
    with pytest.raises(GlueOptionError):
        parse(options)


def test_inductors_options_pass_through_and_are_checked():
    assert parse({"max_autotune": True, "triton.cudagraphs": False}).inductor == {
        "max_autotune": True,
        "triton.cudagraphs": False,
    }
    assert parse({"epilogue-fusion": True}).inductor == {"epilogue_fusion": True}
    with pytest.raises(GlueOptionError, match="max_autotune"):
        parse({"max_autotune": "yes"})


def test_a_mode_is_what_it_is_for_inductor():
    assert parse(mode="max-autotune").inductor == torch._inductor.list_mode_options("max-autotune")
    assert parse(mode="default").inductor == {}
    with pytest.raises(GlueOptionError, match="fastest"):
        parse(mode="fastest")


def test_the_environment_is_read_and_options_win():
    options = parse({"dump": "b"}, GLUE_DUMP="a", GLUE_STRICT="1", GLUE_HOIST_LIMIT="1KiB", GLUE_COMPILER="aot_eager")
    assert (options.dump, options.strict, options.hoist_limit, options.compiler) == ("b", True, 1024, "aot_eager")


@pytest.mark.parametrize("text", ["0", "false", ""])
def test_capture_is_on_unless_it_is_switched_off(text):
    assert parse().capture
    assert not parse(GLUE_CAPTURE=text).capture
    assert parse({"capture": True}, GLUE_CAPTURE=text).capture
    with pytest.raises(GlueOptionError, match="'capture' is True or False, not 'off'"):
        parse(GLUE_CAPTURE="off")


def test_glue_disable_wins_over_options():
    options = parse({"passes": {"hoist_metadata": True, "other_pass": True}}, GLUE_DISABLE="hoist_metadata")
    assert not options.is_enabled("hoist_metadata", default=True)
    assert options.is_enabled("other_pass", default=False)
    with pytest.raises(GlueOptionError, match="did you mean 'hoist_metadata'"):
        parse(GLUE_DISABLE="hoist_metadat")
    with pytest.raises(GlueOptionError, match="^GLUE_REGIONS: unknown regions 'foo'"):
        parse(GLUE_REGIONS="foo")


def test_an_unknown_variable_warns():
    with pytest.warns(GlueWarning, match="did you mean 'GLUE_DUMP'"):
        parse(GLUE_DUMB="x")


@pytest.mark.parametrize(
    ("text", "number"),
    [(5, 5), ("5", 5), ("1KiB", 1024), ("1.5 kB", 1500), ("64MiB", 64 * 2**20), ("2GB", 2 * 10**9), ("0", 0)],
)
def test_numbers_of_bytes(text, number):
    assert parse_bytes(text) == number


def test_a_wrong_option_reaches_the_user_before_tracing():
    traced = []

    def fn(x):
        traced.append(1)
        return x + 1

    with pytest.raises(GlueOptionError, match="did you mean 'dump'"):
        torch.compile(fn, backend="glue", options={"dumb": "x"})(torch.ones(1))
    assert not traced


@pytest.mark.parametrize("key", ["memory_budget", "pinned_limit"])
@pytest.mark.parametrize("text", ["24", " 24 ", "16000"])
def test_a_small_budget_without_a_unit_is_a_slip(key, text):
    with pytest.raises(GlueOptionError, match=rf"'{text.strip()}GiB'"):
        parse({key: text})


@pytest.mark.parametrize(("budget", "meant"), [("0", 0), ("67108864", 2**26), ("24B", 24), (24, 24), (None, None)])
def test_a_budget_that_has_a_unit_or_is_large_is_meant(budget, meant):
    assert parse({"memory_budget": budget}).memory_budget == meant


@pytest.mark.parametrize(
    ("budget", "meant"), [("auto", "auto"), (" Auto ", "auto"), (0.8, 0.8), (1.0, 1.0), ("0.8", 0.8), (".5", 0.5)]
)
def test_a_budget_may_be_what_is_free_or_a_share_of_the_card(budget, meant):
    assert parse({"memory_budget": budget}).memory_budget == meant


def test_one_byte_is_no_share_of_the_card():
    with pytest.raises(GlueOptionError, match=r"1 is one byte; write 1\.0 for all of the card"):
        parse({"memory_budget": 1})


@pytest.mark.parametrize("budget", [0.0, -0.5, 1.5, 24.0, float("nan"), float("inf"), "1.5", "0.0"])
def test_what_is_no_share_of_the_card_is_an_error(budget):
    with pytest.raises(GlueOptionError, match="'memory_budget': .* is no share of the card; write a float above 0"):
        parse({"memory_budget": budget})


@pytest.mark.parametrize("budget", ["automatic", "80%", True, -1, "24 potatoes", [24], ""])
def test_any_other_budget_is_an_error_that_says_what_there_is(budget):
    with pytest.raises(
        GlueOptionError, match=r"'memory_budget': .*'64MiB', 'auto', or a share of the card such as 0\.8"
    ):
        parse({"memory_budget": budget})


def test_a_budget_is_kept_by_regions():
    assert parse({"memory_budget": "auto"}).regions == parse(GLUE_MEMORY_BUDGET="24GiB").regions == "auto"
    assert parse({"memory_budget": "auto", "regions": "auto"}).regions == "auto"
    for given in ({"regions": "whole"}, {"offload": "checkpoints"}):
        (name,) = given
        with pytest.raises(GlueOptionError, match=f"'memory_budget'.* leave out '?{name}"):
            parse({"memory_budget": 0.5, **given})


@pytest.mark.parametrize("given", [{"offload": "checkpoints"}, {"padding": "drop", "prefix": "share"}], ids=str)
def test_what_looks_at_all_layers_makes_graphs_whole(given):
    assert parse().regions == parse({"offload": None, "prefix": "keep"}).regions == "auto"
    assert parse(given).regions == parse({**given, "regions": "whole"}).regions == "whole"
    with pytest.raises(GlueOptionError, match="looks at .*; leave out regions='auto'"):
        parse({**given, "regions": "auto"})
    with pytest.raises(GlueOptionError, match="looks at .*; leave out regions='auto'"):
        parse(given, GLUE_REGIONS="auto")


@pytest.mark.parametrize("value", ["9" * 400, "9" * 400 + "GiB", 10**400, "1e400"])
def test_more_bytes_than_an_address_holds_are_an_error(value):
    with pytest.raises(GlueOptionError) as raised:
        parse_bytes(value)
    assert len(str(raised.value)) < 200


def test_the_switch_for_accelerates_names_is_no_unknown_variable(recwarn):
    parse(GLUE_ACCELERATE="0")
    assert not recwarn.list
