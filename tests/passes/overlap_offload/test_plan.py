"""The planner: what is moved, and why not."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glue_compiler.passes.overlap_offload.plan import EXACT_REGIONS, plan_offload, worst_peak
from glue_compiler.passes.overlap_offload.simulator import Link, Region, simulate
from tests.passes.overlap_offload.schedules import BUFFERS, LINKS, SECONDS, any_time, regions

LINK = Link(host_to_device=2.0, device_to_host=1.0, latency=0.0)
EIGHT = [Region(index, 10, 1.0, 2.0) for index in range(8)]


def of_sizes(*sizes):
    return [Region(index, size, 1.0, 2.0) for index, size in enumerate(sizes)]


# -- the policy "all"


def test_all_moves_every_region_but_the_last():
    plan = plan_offload(EIGHT, LINK, policy="all", base_bytes=3)
    assert plan.moved == tuple(range(7))
    assert plan.buffers == 2
    assert plan.predicted == simulate(EIGHT, LINK, range(7), "overlapped", base_bytes=3)
    assert plan.peak_bytes == 3 + 30


def test_all_leaves_inputs_of_no_bytes():
    assert plan_offload(of_sizes(10, 0, 10), LINK, policy="all").moved == (0,)


@pytest.mark.parametrize("few", [[], of_sizes(10), of_sizes(0, 10)])
def test_all_of_nothing_says_so(few):
    plan = plan_offload(few, LINK, policy="all")
    assert plan.moved == ()
    assert "nothing to move" in plan.reason


def test_indices_need_not_be_positions():
    named = [Region(index, 10, 1.0, 2.0) for index in (4, 2, 9)]
    assert plan_offload(named, LINK, policy="all").moved == (4, 2)


def test_without_a_link_or_times_there_is_the_same_plan_but_no_prediction():
    known = plan_offload(EIGHT, LINK, policy="budget", budget=70)
    assert known.predicted is not None
    for some, link in [(EIGHT, None), ([Region(index, 10, 0.0, 0.0) for index in range(8)], LINK)]:
        plan = plan_offload(some, link, policy="budget", budget=70)
        assert plan.predicted is None
        assert (plan.moved, plan.peak_bytes) == (known.moved, known.peak_bytes)


# -- the policy "budget"


def test_a_budget_that_is_met_moves_nothing():
    plan = plan_offload(EIGHT, LINK, policy="budget", base_bytes=20, budget=100)
    assert plan.moved == ()
    assert "nothing to move" in plan.reason


@pytest.mark.parametrize(("budget", "moved"), [(99, (0,)), (90, (0,)), (89, (0, 1))])
def test_below_the_peak_as_many_move_as_are_needed(budget, moved):
    plan = plan_offload(EIGHT, LINK, policy="budget", base_bytes=20, budget=budget)
    assert plan.moved == moved
    assert plan.peak_bytes == 100 - 10 * len(moved)
    assert plan.reason == "the fewest bytes that fit the budget (exact)"


def test_the_lowest_peak_is_met_and_below_it_the_plan_says_that_it_cannot():
    lowest = plan_offload(EIGHT, LINK, policy="budget", budget=30)
    assert lowest.peak_bytes == 30
    assert "cannot" not in lowest.reason
    below = plan_offload(EIGHT, LINK, policy="budget", budget=29)
    assert "cannot fit" in below.reason
    # As low as possible all the same, without regions 5 and 6: region 7 has its input before those can be out.
    assert below.moved == lowest.moved == tuple(range(5))


def test_where_moving_lowers_nothing_nothing_is_moved():
    plan = plan_offload(EIGHT[:3], LINK, policy="budget", budget=10)
    assert plan.moved == ()
    assert "cannot fit" in plan.reason
    assert "would not lower" in plan.reason


def test_of_several_sizes_the_fewest_bytes_are_moved():
    # Four bytes are over. Moving region 0 would save 50, but moving the one of four bytes behind it is enough.
    plan = plan_offload(of_sizes(50, 4, 1, 1, 1, 4), LINK, policy="budget", budget=57)
    assert plan.moved == (1,)


def test_one_large_input_is_better_than_two_smaller_ones():
    # Seven bytes are over. Region 4 may be in flight when the sixth region's forward ends, so 3 moves, and it does not.
    plan = plan_offload(of_sizes(6, 5, 5, 1, 1, 1, 6), LINK, policy="budget", budget=18)
    assert plan.moved == (0, 3)


def test_a_budget_policy_needs_a_budget():
    with pytest.raises(ValueError, match="needs a budget"):
        plan_offload(EIGHT, LINK, policy="budget")


def test_two_regions_of_one_index_are_refused():
    with pytest.raises(ValueError, match="same index"):
        plan_offload([EIGHT[0], EIGHT[0]], None, policy="all")


@any_time
@given(regions(max_size=8), BUFFERS, st.data())
def test_no_choice_that_fits_moves_fewer_bytes(some, buffers, data):
    def nbytes(moved):
        return sum(region.nbytes for region in some if region.index in moved)

    indices = [region.index for region in some[:-1] if region.nbytes]
    choices = [choice for count in range(len(some)) for choice in combinations(indices, count)]
    lowest = min(worst_peak(some, choice, buffers=buffers) for choice in choices)
    budget = data.draw(st.integers(lowest - 1, worst_peak(some, (), buffers=buffers)))
    plan = plan_offload(some, None, policy="budget", budget=budget, buffers=buffers)
    fitting = [c for c in choices if worst_peak(some, c, buffers=buffers) <= max(budget, lowest)]
    assert nbytes(plan.moved) == min(nbytes(choice) for choice in fitting)
    assert plan.peak_bytes <= max(budget, lowest)
    assert ("cannot fit" in plan.reason) == (lowest > budget)


@any_time
@given(regions(max_size=24, sizes=st.integers(1, 1000)).filter(lambda some: len(some) > EXACT_REGIONS + 1), st.data())
def test_of_many_regions_none_of_the_chosen_can_be_left_out(some, data):
    lowest, unmoved = worst_peak(some, range(len(some) - 1)), worst_peak(some, ())
    budget = data.draw(st.integers(lowest, unmoved))
    plan = plan_offload(some, None, policy="budget", budget=budget)
    assert plan.peak_bytes <= budget
    for left_out in plan.moved:
        assert worst_peak(some, set(plan.moved) - {left_out}) > budget


@any_time
@given(regions(), LINKS, LINKS, BUFFERS, st.integers(0, 8000), st.data())
def test_memory_is_never_above_the_plan_however_wrong_its_times_were(some, link, true_link, buffers, budget, data):
    plan = plan_offload(some, link, policy="budget", budget=budget, buffers=buffers, base_bytes=5)
    seconds = data.draw(st.lists(SECONDS, min_size=2 * len(some), max_size=2 * len(some)))
    true = [
        Region(region.index, region.nbytes, *seconds[2 * place : 2 * place + 2]) for place, region in enumerate(some)
    ]
    run = simulate(true, true_link, plan.moved, "overlapped", buffers=buffers, base_bytes=5)
    assert run.peak_bytes <= plan.peak_bytes
    assert plan.predicted is None or plan.predicted.peak_bytes <= plan.peak_bytes


@any_time
@given(regions(), BUFFERS, st.data())
def test_moving_one_more_region_never_raises_the_worst_peak(some, buffers, data):
    indices = [region.index for region in some]
    moved = data.draw(st.sets(st.sampled_from(indices)))
    more = moved | {data.draw(st.sampled_from(indices))}
    assert worst_peak(some, more, buffers=buffers) <= worst_peak(some, moved, buffers=buffers)
