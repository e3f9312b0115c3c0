"""Programs of padded batches and of loops over chunks: most are rewritten, and a rewrite that is wrong is found."""

import itertools
import re
from importlib import import_module
from random import Random

import pytest
import torch

from tools.fuzz.campaign import drawn, repaired
from tools.fuzz.check import module_of, verdict
from tools.fuzz.kinds import draw_program
from tools.fuzz.loops import MISSES
from tools.fuzz.padding import READERS
from tools.fuzz.tally import Settings, Tally

# The package has operators under the names of these modules.
token_rows, counted_loop = (import_module(f"glue_compiler.ops.{name}") for name in ("token_rows", "counted_loop"))
OWN = {"padding": "drop_padding", "loops": "roll_loops"}


def rewritten(kind):
    """Programs that the pass of ``kind`` rewrites, without twists."""
    for seed in range(20):
        random = Random(seed)
        program = repaired(draw_program(random, kind, twists=0.0, plain=True), random)
        if program is not None and OWN[kind] in verdict(program).fired:
            yield program


@pytest.mark.slow
@pytest.mark.parametrize("kind", OWN)
def test_most_are_rewritten_by_the_pass_of_their_own(kind):
    settings, tally, found = Settings(seed=2, kinds=(kind,)), Tally("programs"), []
    for number in range(7):  # the eighth is Inductor's
        given = drawn(settings, number, tally)
        found += [OWN[kind] in verdict(given).fired] if given is not None else []
    assert sum(found) >= 0.6 * len(found) >= 3


def puts_twice_as_much(monkeypatch):
    right = token_rows._Put.forward
    monkeypatch.setattr(token_rows._Put, "forward", lambda *given: right(*given) * 2)


def takes_gradients_twice(monkeypatch):
    right = token_rows._Take.backward
    monkeypatch.setattr(token_rows._Take, "backward", lambda *given: (right(*given)[0] * 2, *[None] * 4))


def leaves_a_step_out(monkeypatch):
    right = counted_loop._run
    monkeypatch.setattr(counted_loop, "_run", lambda body, steps, *given: right(body, steps - 1, *given))


@pytest.mark.parametrize(
    ("kind", "breaks"),
    [("padding", puts_twice_as_much), ("padding", takes_gradients_twice), ("loops", leaves_a_step_out)],
    ids=lambda each: getattr(each, "__name__", each),
)
@pytest.mark.slow
def test_a_rewrite_that_is_wrong_is_found(kind, breaks, monkeypatch):
    programs = list(itertools.islice(rewritten(kind), 12))  # most take nothing that needs a gradient
    assert not any(verdict(program).wrong for program in programs)
    breaks(monkeypatch)
    assert any("off by" in each for program in programs for each in verdict(program).wrong)


def test_results_are_compared_where_the_mask_shows_them():
    module = module_of(draw_program(Random(0), "padding"))
    shown = torch.tensor([[True, True, True, True, False]])
    for shape in ((1, 5), (1, 5, 2), (1, 2, 5, 4)):
        value = torch.ones(shape)
        found = module["seen_only"](value, shown)
        assert found.sum() == value.sum() * 4 / 5
    assert module["seen_only"](torch.ones(5, 1, 2), shown) is None  # where its tokens are is not known
    assert module["seen_only"](torch.ones(1, 2), shown).sum() == 2
    assert module["seen_only"](torch.tensor(3.0), shown) == 3


@pytest.mark.parametrize("how", ["right", "left", "holes", "none", "any"])
def test_batches_keep_the_contract(how):
    module = module_of(draw_program(Random(0), "padding"))
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        mask, labels = module["padded"](how, torch.randint(0, 12, (3, 7), generator=generator), generator)
        assert mask.any(1).all()
        assert (labels[mask == 0] == -100).all()
        assert (labels[:, 1:][mask[:, :-1] == 0] == -100).all()
        assert not (how == "right" and (mask.diff() > 0).any())
        assert not (how == "left" and (mask.diff() < 0).any())


def drawn_texts(kind, count=300):
    return [draw_program(Random(seed), kind).source() for seed in range(count)]


def test_some_programs_read_padding_and_some_loops_have_unequal_steps():
    texts = drawn_texts("padding")
    assert 0.03 < sum(any(f"hidden = {each}\n" in text for each in READERS) for text in texts) / len(texts) < 0.3
    texts = drawn_texts("loops")
    ends = [re.escape((miss[0] or miss[1]).partition("{")[0]) for miss in MISSES]
    assert 0.05 < sum(any(re.search(f"\n +{end}", text) for end in ends) for text in texts) / len(texts) < 0.4


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("padding", r"ROWS, LENGTH, WORDS, SIZE, HEADS = 1"),
        ("padding", r"length = LENGTH \+ 2 \* seed"),
        ("padding", r"checkpoint\(layer_"),
        ("padding", r"COMPILED = \['f'\]"),
        ("padding", r"torch.autocast"),
        ("padding", r"mask = \(1.0 - mask"),
        ("loops", r"checkpoint\(looped"),
        ("loops", r"chunks = CHUNKS \+ 2 \* seed"),
        ("loops", r"kept.append\("),
        ("loops", r"out\[:, i\] = "),
        ("loops", r"'dynamic': True"),
    ],
)
def test_among_what_is_drawn_there_is(kind, wanted):
    assert any(re.search(wanted, text) for text in drawn_texts(kind))
