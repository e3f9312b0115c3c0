"""Segments, minimum cuts, predictions and plans, on plain data."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from glue_compiler.passes.plan_memory import segments
from glue_compiler.passes.plan_memory.choose import Choice, Chooser, Prices
from glue_compiler.passes.plan_memory.plan import plan_memory
from glue_compiler.passes.plan_memory.predict import Predictor
from glue_compiler.passes.plan_memory.segments import segmentations
from glue_compiler.passes.plan_memory.step import TrainingStep, Value
from tests.passes.plan_memory.steps import MIB, RATES, chain, decoder_layer


def chooser(step):
    return Chooser(step, next(segmentations(step)), RATES.memory)


def saved_bytes(step, choice):
    return sum(step.values[place].nbytes for place in choice.saved)


def test_segments_begin_where_one_value_is_alive():
    step = chain(8)
    numbers = next(segmentations(step))
    assert len(set(numbers.values())) >= 8
    # A product's wide result never lives across a border.
    for place, value in enumerate(step.values):
        for read in value.inputs:
            if not value.is_backward and not step.values[read].is_input and step.values[read].nbytes == 4 * MIB:
                assert numbers[read] == numbers[place]


def test_what_is_free_saves_everything_and_what_is_dear_saves_the_borders():
    step = chain(8)
    one = chooser(step)
    assert saved_bytes(step, one.choose(Prices(0.0))) >= 8 * 5 * MIB
    dear = one.choose(Prices(1.0))
    assert saved_bytes(step, dear) <= 9 * MIB
    assert not dear.saved & dear.recomputed


def test_a_cheap_value_is_recomputed_at_a_lower_price_than_a_product():
    step = chain(8)
    one = chooser(step)
    # 4 MiB cost 1e-4 s where a compiler fuses them, 1e-2 s as a product; saving and reading them costs 4.2e-3 s each.
    between = one.choose(Prices(1e-4 / MIB))
    assert 8 * 4 * MIB <= saved_bytes(step, between) < saved_bytes(step, one.choose(Prices(0.0))) + 1
    assert any(
        step.values[place].nbytes == 4 * MIB and not step.values[place].is_kernel for place in between.recomputed
    )
    assert not any(
        step.values[place].is_kernel and step.values[place].nbytes == 4 * MIB for place in between.recomputed
    )


def test_what_may_not_be_recomputed_is_saved_at_any_price():
    step = chain(4, may_recompute=False)
    choice = chooser(step).choose(Prices(1.0))
    assert saved_bytes(step, choice) >= 4 * 4 * MIB


def test_equal_segments_are_cut_once():
    step = chain(24)
    one = chooser(step)
    one.choose(Prices(1.0))
    assert len(one._cuts) <= 4


@pytest.mark.parametrize("budget", [60, 40, 30, 24])
def test_a_plan_fits_its_budget_and_less_memory_costs_time(budget):
    step = chain(10)
    unlimited = plan_memory(step, RATES, 2**40, frozenset())
    plan = plan_memory(step, RATES, budget * MIB, frozenset())
    assert plan.peak <= budget * MIB < unlimited.peak + budget * MIB
    assert unlimited.seconds <= plan.seconds
    assert unlimited.least_seconds == pytest.approx(unlimited.seconds)


def test_without_a_fitting_plan_the_lowest_peak_is_taken():
    step = chain(10)
    impossible = plan_memory(step, RATES, 1, frozenset())
    assert impossible.peak > 1
    assert impossible.peak <= plan_memory(step, RATES, 24 * MIB, frozenset()).peak


def test_between_two_prices_the_later_segments_keep_more():
    step = chain(16)
    plan = plan_memory(step, RATES, 60 * MIB, frozenset())
    kept = [plan.segments[p] for p in plan.saved if step.values[p].nbytes == 4 * MIB]
    again = [plan.segments[p] for p in plan.recomputed if step.values[p].is_kernel]
    assert kept
    assert again
    assert min(kept) >= min(again)


def test_of_equal_values_in_one_segment_some_are_kept():
    """A layer that is compiled by itself has no other segments to pay another price."""
    values = [Value((), 0, 0, 0.0, is_input=True)]
    values += [Value((0,), 1, 1024, 1e-3, is_kernel=True, may_recompute=False)]
    values += [Value((1,), place, 4 * MIB, 0.01, is_kernel=True) for place in (2, 3, 4, 5)]
    values += [Value((2, 3, 4, 5), 6, MIB, 0.01, is_kernel=True)]
    values += [Value((), 7, 0, 0.0, is_input=True, is_backward=True)]
    values += [Value((7, 1, 2, 3, 4, 5), 8, MIB, 0.01, is_kernel=True, is_backward=True)]
    step = TrainingStep(tuple(values), tuple(range(7)), (6,), (8,), 0, {})
    most, least = (plan_memory(step, RATES, budget, frozenset(), waiting=15) for budget in (2**40, 1))
    assert (most.kept, least.kept) == (16 * MIB + 1024, 1024)
    for count in (1, 2, 3):
        budget = most.peak + 15 * (1024 + count * 4 * MIB)
        plan = plan_memory(step, RATES, budget, frozenset(), waiting=15)
        assert plan.kept == 1024 + count * 4 * MIB
        assert plan.held(15) <= budget


def movable(step):
    return frozenset(place for place, value in enumerate(step.values) if value.nbytes)


@pytest.mark.parametrize("budget", [2**40, 40, 24])
def test_moves_are_those_that_compute_hides(budget):
    step = chain(12, product_seconds=0.1)
    plan = plan_memory(step, RATES, budget * MIB, movable(step))
    assert plan.moved <= plan.saved
    one = Chooser(step, plan.segments, RATES.memory)
    choice = Choice(plan.saved, plan.recomputed)
    predictor = Predictor(step, one.home, RATES)
    assert plan.peak <= predictor.predict(choice).peak
    last = max(one.home.values())
    groups = predictor.groups(choice)
    assert all(groups[place] < last - 1 for place in plan.moved)
    times = predictor.times(choice)
    for number in set(groups.values()):
        nbytes = sum(step.values[place].nbytes for place in plan.moved if groups[place] == number)
        assert nbytes <= times.hides(number) * RATES.link
    assert bool(plan.moved) == (budget < 2**40)


def test_of_one_layer_among_others_its_second_half_hides_what_the_first_one_moves():
    step = decoder_layer()
    most = plan_memory(step, RATES, 2**40, frozenset(), waiting=15)
    budget = most.held(15) - 15 * 2 * MIB
    kept, moving = (plan_memory(step, RATES, budget, may_move, waiting=15) for may_move in ((), movable(step)))
    assert most.recomputed == moving.recomputed < kept.recomputed
    assert moving.held(15) <= budget
    assert {moving.segments[place] for place in moving.moved} == {min(moving.segments.values())}
    assert moving.seconds < kept.seconds


def test_of_one_layer_alone_nothing_moves():
    """Its backward begins as soon as its forward ends."""
    step = decoder_layer()
    most = plan_memory(step, RATES, 2**40, movable(step))
    assert not plan_memory(step, RATES, most.peak - MIB, movable(step)).moved


def test_one_layer_is_tried_whole_and_in_halves():
    step = decoder_layer()
    numbers = [[segments[place] for place in step.forward] for segments in segmentations(step)]
    assert any(len(set(each)) == 1 for each in numbers)
    halves = [each for each in numbers if len(set(each)) == 2]
    attention = next(place for place, value in enumerate(step.values) if value.is_kernel and not value.nbytes)
    gated = max(place for place in step.forward if step.values[place].nbytes == 3 * MIB)
    assert any(each[attention] < each[gated - 2] == each[gated] for each in halves)


def test_with_one_narrow_place_the_whole_is_tried_too():
    """What crosses the place is kept if it is cut there, and need not be."""
    values = [Value((), 0, 0, 0.0, is_input=True), Value((0,), 1, MIB, 1e-4)]
    values += [Value((1,), 2, 3 * MIB, 0.01, is_kernel=True), Value((2,), 3, MIB, 0.01, is_kernel=True)]
    values += [Value((1, 3), 4, MIB, 1e-4), Value((), 5, 0, 0.0, is_input=True, is_backward=True)]
    values += [Value((5, 1, 2), 6, MIB, 0.01, is_kernel=True, is_backward=True)]
    step = TrainingStep(tuple(values), tuple(range(5)), (4,), (6,), 0, {})
    assert plan_memory(step, RATES, 1, frozenset(), waiting=127).kept == 0


def test_with_nothing_to_hide_behind_nothing_moves():
    quick = chain(12, product_seconds=1e-6)
    assert not plan_memory(quick, RATES, 24 * MIB, movable(quick)).moved


def test_what_is_moved_may_be_what_would_be_computed_again():
    """The link has room for more than what is saved anyway, and what it takes need not be computed again."""
    step = chain(12, product_seconds=0.1)
    with_moves, without = (plan_memory(step, RATES, 24 * MIB, may_move) for may_move in (movable(step), ()))
    again = [sum(step.values[place].is_kernel for place in plan.recomputed) for plan in (with_moves, without)]
    assert again[0] < again[1]
    assert with_moves.seconds < without.seconds
    assert with_moves.moved & without.recomputed


def test_a_value_moves_with_the_segment_that_computes_from_it():
    step = chain(6)
    one = chooser(step)
    choice = one.choose(Prices(1.0))
    groups = Predictor(step, one.home, RATES).groups(choice)
    for place in choice.saved:
        read_by = {one.home[other] for other in choice.recomputed if place in step.values[other].inputs}
        assert groups[place] == min(read_by - {one.home[place]}, default=one.home[place])


def test_what_two_segments_compute_from_does_not_move():
    step = chain(6)
    values = list(step.values)
    first, later = 5, 14  # what the first layer returns is read by the third one's product, too
    assert values[later].is_kernel
    values[later] = dataclasses.replace(values[later], inputs=(*values[later].inputs, first))
    changed = dataclasses.replace(step, values=tuple(values))
    one = Chooser(changed, next(segmentations(step)), RATES.memory)
    choice = one.choose(Prices(1.0))
    assert first in choice.saved
    assert first not in Predictor(changed, one.home, RATES).groups(choice)
    assert first in Predictor(step, one.home, RATES).groups(chooser(step).choose(Prices(1.0)))


@pytest.mark.parametrize(("product_seconds", "is_hidden"), [(0.05, True), (0.005, False)])
def test_what_the_link_cannot_copy_in_time_is_waited_for(product_seconds, is_hidden):
    step = chain(6, product_seconds)  # a segment has two products
    one = chooser(step)
    choice = one.choose(Prices(0.0))
    predictor = Predictor(step, one.home, RATES)
    wide = next(place for place in sorted(choice.saved) if step.values[place].nbytes == 4 * MIB)
    waited = predictor.predict(choice, frozenset({wide})).seconds - predictor.predict(choice).seconds
    copying = 4 * MIB / RATES.link
    assert (waited < 0.1 * copying) == is_hidden
    assert (waited > 0.5 * copying) == (not is_hidden)


@pytest.mark.parametrize("budget", [12, 16, 20, 2**20])
def test_no_other_choice_that_fits_is_faster(budget):
    """Every choice of two layers, keep or compute again, beside the plan that is made."""
    step = chain(2, product_seconds=0.05)
    plan = plan_memory(step, RATES, budget * MIB, ())
    own = Chooser(step, plan.segments, RATES.memory)
    free = sorted(place for place in own.home if step.values[place].nbytes == 4 * MIB)
    always = plan.saved - set(free)
    predictor = Predictor(step, own.home, RATES)
    for count in range(len(free) + 1):
        for kept in itertools.combinations(free, count):
            choice = Choice(always | set(kept), (plan.recomputed | set(free)) - set(kept) - always)
            other = predictor.predict(choice)
            assert other.peak > budget * MIB or other.seconds >= plan.seconds - 1e-9


@pytest.mark.parametrize("fuses", [False, True])
def test_a_gradient_that_backward_gets_is_there_until_it_is_read(fuses):
    step = chain(6)
    (tangent,) = (place for place, value in enumerate(step.values) if value.is_input and value.is_backward)
    heavy = list(step.values)
    heavy[tangent] = dataclasses.replace(heavy[tangent], nbytes=64 * MIB)
    heavy[tangent + 1] = dataclasses.replace(heavy[tangent + 1], nbytes=MIB)
    for place in range(tangent + 2, len(heavy)):  # the first product of backward alone reads it
        assert tangent not in heavy[place].inputs
    one = chooser(step)
    choice = one.choose(Prices(0.0))
    light = Predictor(step, one.home, RATES, fuses=fuses)
    loaded = Predictor(dataclasses.replace(step, values=tuple(heavy)), one.home, RATES, fuses=fuses)
    (ahead, back), (light_ahead, light_back) = (each.bytes_beside_inputs(choice) for each in (loaded, light))
    assert ahead == light_ahead
    more = [with_it - without for with_it, without in zip(back, light_back, strict=True)]
    assert more[0] == 64 * MIB
    assert set(more[3:]) == {0}
    assert loaded.predict(choice).peak == light.predict(choice).peak + 64 * MIB


def test_an_element_belongs_to_the_segment_of_its_operator():
    """A border between them would ask for the operator's own value, which is a tuple."""
    step = chain(4)
    values = list(step.values)
    kernel = 6  # of the second layer, made an operator that returns a tuple
    values[kernel] = dataclasses.replace(values[kernel], nbytes=0, may_save=False, is_tuple=True)
    values[kernel + 1] = dataclasses.replace(values[kernel + 1], nbytes=4 * MIB)
    changed = dataclasses.replace(step, values=tuple(values))
    assert changed.is_element(kernel + 1)
    found = segments._between(changed, [kernel + 1, kernel + 5])
    assert found[kernel + 1] == found[kernel] < found[kernel + 2]


def test_cuts_hold_whatever_the_ratio_of_their_prices():
    """Edges of 1e-12 s beside ones of seconds: nothing that must not be cut is."""
    for seconds in (1e-9, 1e-3, 1.0, 1e3):
        step = chain(3, product_seconds=seconds)
        one = chooser(step)
        for price in (0.0, 1e-15, 1e-9, 1.0):
            choice = one.choose(Prices(price))
            there = choice.saved | choice.recomputed
            assert step.needed <= there
            reads = {read for place in choice.recomputed for read in step.values[place].inputs}
            assert all(read in there or step.values[read].is_input for read in reads)


def test_a_view_in_another_segment_is_made_again_from_its_memory():
    step = chain(4)
    values = list(step.values)
    x = 5  # what the first layer returns; a view of it, behind the second layer's product, is read by the third's
    view = dataclasses.replace(values[7], inputs=(x,), root=x, nbytes=0, seconds=0.0, may_save=False)
    values[7] = view
    values[8] = dataclasses.replace(values[8], inputs=(7,))
    values[10] = dataclasses.replace(values[10], inputs=(7, 9))
    changed = dataclasses.replace(step, values=tuple(values))
    for price in (0.0, 1.0):
        one = chooser(changed)
        choice = one.choose(Prices(price))
        reads = {read for place in choice.recomputed for read in changed.values[place].inputs}
        there = choice.saved | choice.recomputed
        assert all(read in there or changed.values[read].is_input for read in reads)


@pytest.mark.parametrize("is_pointwise", [False, True])
def test_a_pointwise_value_is_not_kept_beside_what_it_is_computed_from(is_pointwise):
    step = chain(6)
    reader = {place: value for place, value in enumerate(step.values) if value.is_backward and value.is_kernel}
    values = list(step.values)
    bent = [place for place, value in enumerate(values) if value.nbytes == 4 * MIB and not value.is_kernel]
    for place in bent:
        values[place] = dataclasses.replace(values[place], is_pointwise=is_pointwise, seconds=0.1)
        values[place + 1] = dataclasses.replace(values[place + 1], is_kernel=False)
    for place in reader:  # what is fused reads them
        values[place] = dataclasses.replace(values[place], is_kernel=False)
    fused = dataclasses.replace(step, values=tuple(values))
    assert not set(bent) & fused.realised
    one = chooser(fused)
    kept = one.choose(Prices(2e-2 / (4 * MIB))).saved & set(bent)
    assert (not kept) == is_pointwise


@pytest.mark.parametrize("is_pointwise", [False, True])
def test_a_value_that_is_inlined_takes_no_memory(is_pointwise):
    # wide = product(x); bent = f(wide); two products read what is made of bent, one behind the other
    values = (
        Value((), 0, 0, 0.0, is_input=True),
        Value((0,), 1, 4 * MIB, 1.0, is_kernel=True),
        Value((1,), 2, 8 * MIB, 1.0, is_pointwise=is_pointwise),
        Value((2,), 3, MIB, 1.0),
        Value((3,), 4, MIB, 1.0, is_kernel=True),
        Value((2, 4), 5, MIB, 1.0),
        Value((5,), 6, MIB, 1.0, is_kernel=True),
        Value((), 7, 0, 0.0, is_input=True, is_backward=True),
        Value((6, 7), 8, 0, 0.0, is_backward=True),
    )
    step = TrainingStep(values, tuple(range(7)), (6,), (8,), 0, {})
    home, choice = dict.fromkeys(range(1, 7), 0), Choice(frozenset({6}), frozenset())
    held, _ = Predictor(step, home, RATES).bytes_beside_inputs(choice)
    # What it is computed from stays for as long as it is read.
    fused = [0, 4, 4, 5, 6, 5, 2] if is_pointwise else [0, 4, 12, 9, 10, 9, 2]
    assert held == [size * MIB for size in fused]
    held, _ = Predictor(step, home, RATES, fuses=False).bytes_beside_inputs(choice)
    assert held[2] == 12 * MIB


def test_what_a_kernel_takes_for_itself_counts_while_it_runs():
    step = chain(4)
    values = list(step.values)
    last = max(place for place, value in enumerate(values) if value.is_kernel and value.is_backward)
    values[last] = dataclasses.replace(values[last], scratch=2**30)
    heavy = dataclasses.replace(step, values=tuple(values))
    one = chooser(step)
    choice = one.choose(Prices(0.0))
    light = Predictor(step, one.home, RATES).predict(choice)
    found = Predictor(heavy, one.home, RATES).predict(choice)
    assert 2**30 < found.peak < light.peak + 2**30
    assert found.seconds == light.seconds


class Clock:
    """Of each look at it, a second passes."""

    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        self.seconds += 1.0
        return self.seconds


@pytest.mark.parametrize("seconds", [0, 1, 3, 10])
def test_planning_ends_when_its_time_is_over(seconds):
    step = chain(10)
    clock = Clock()
    plan = plan_memory(step, RATES, 40 * MIB, frozenset(), seconds=seconds, clock=clock)
    assert plan.is_cut
    assert plan.looked_at == max(1, seconds)
    assert clock.seconds <= 1 + max(1, seconds) + 2  # the proof ends when a tenth of the time more is over


@pytest.mark.slow
def test_with_time_enough_all_plans_are_looked_at():
    step = chain(10)
    plan = plan_memory(step, RATES, 40 * MIB, frozenset(), seconds=1e6, clock=Clock())
    assert not plan.is_cut
    assert plan.looked_at > 20
    assert plan == plan_memory(step, RATES, 40 * MIB, frozenset(), seconds=1e9)


def test_the_first_plans_are_those_of_the_least_memory():
    """So that what fits is found, however little time there is."""
    step = chain(10)
    tightest = min(
        plan_memory(step, RATES, 1, frozenset(), seconds=count, clock=Clock()).peak
        for count in range(1, 1 + len(list(segmentations(step))))
    )
    assert tightest <= plan_memory(step, RATES, 24 * MIB, frozenset()).peak


def test_a_choice_is_predicted_once(monkeypatch):
    """Prices differ where choices do not, and what moves nothing is what may not move."""
    seen = []
    own = Predictor.bytes_beside_inputs

    def counted(self, choice, moved):
        seen.append((id(self), choice, moved))
        return own(self, choice, moved)

    monkeypatch.setattr(Predictor, "bytes_beside_inputs", counted)
    movable = frozenset(range(len(chain(10).values)))
    plan = plan_memory(chain(10, product_seconds=1e-6), RATES, 40 * MIB, movable)
    assert len(seen) == len(set(seen)) < plan.looked_at / 2
