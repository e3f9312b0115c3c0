"""The simulator of a step: timelines computed by hand, and what holds for every step."""

from itertools import pairwise

import pytest
from hypothesis import given

from benchmarks.offload_simulator import Link, Region
from benchmarks.step_timeline import memory_over_time, simulate
from tests.benchmarks.schedules import (
    BUFFERS,
    LINKS,
    any_time,
    by_region,
    issued,
    most_at_once,
    steps,
)

# Three regions of 4 bytes: 2 s forward, 3 s backward; a copy out takes 4 s, a copy back 2 s.
THREE = [Region(index, 4, 2.0, 3.0) for index in range(3)]
LINK = Link(host_to_device=2.0, device_to_host=1.0, latency=0.0)


def spans(timeline, kind):
    return {region: (event.start, event.end) for region, event in by_region(timeline, kind).items()}


# -- by hand


def test_without_offload_the_step_is_compute_and_all_inputs_meet_at_its_middle():
    timeline = simulate(THREE, LINK, (), "none", base_bytes=100)
    assert spans(timeline, "forward") == {0: (0, 2), 1: (2, 4), 2: (4, 6)}
    assert spans(timeline, "backward") == {2: (6, 9), 1: (9, 12), 0: (12, 15)}
    assert (timeline.step_seconds, timeline.peak_bytes, timeline.overlap) == (15, 112, 1.0)


def test_serial_copies_add_all_their_time():
    timeline = simulate(THREE, LINK, (0, 1), "serial", base_bytes=100)
    assert spans(timeline, "forward") == {0: (0, 2), 1: (6, 8), 2: (12, 14)}
    assert spans(timeline, "offload") == {0: (2, 6), 1: (8, 12)}
    assert spans(timeline, "backward") == {2: (14, 17), 1: (19, 22), 0: (24, 27)}
    assert spans(timeline, "reload") == {1: (17, 19), 0: (22, 24)}
    assert (timeline.step_seconds, timeline.peak_bytes, timeline.overlap) == (27, 108, 0.0)


def test_overlapped_reloads_start_with_the_backward_before_and_are_hidden():
    timeline = simulate(THREE, LINK, (0, 1), "overlapped", base_bytes=100)
    assert spans(timeline, "forward") == {0: (0, 2), 1: (2, 4), 2: (6, 8)}
    assert spans(timeline, "offload") == {0: (2, 6), 1: (6, 10)}
    # Input 1 comes back while region 2's backward runs, input 0 while region 1's does.
    assert spans(timeline, "backward") == {2: (10, 13), 1: (13, 16), 0: (16, 19)}
    assert spans(timeline, "reload") == {1: (10, 12), 0: (13, 15)}
    assert spans(timeline, "wait") == {0: (4, 6), 1: (8, 10)}
    # Copies take 12 s, and 4 s of them are waited for.
    assert (timeline.step_seconds, timeline.overlap) == (19, 8 / 12)
    # At 4 s input 0 is on its way out, input 1 waits for that, and region 2 has its own.
    assert timeline.peak_bytes == 112


def test_a_copy_is_waited_for_behind_the_next_region():
    five = [Region(index, 4, 1.0, 3.0) for index in range(5)]
    timeline = simulate(five, LINK, range(4), "overlapped")
    assert spans(timeline, "forward") == {0: (0, 1), 1: (1, 2), 2: (5, 6), 3: (9, 10), 4: (13, 14)}
    # Each copy is issued before the one before it is waited for, so they follow each other without a gap.
    assert spans(timeline, "offload") == {0: (1, 5), 1: (5, 9), 2: (9, 13), 3: (13, 17)}
    waits = [(event.region, event.start, event.end) for event in timeline.events if event.kind == "wait"]
    assert waits == [(0, 2, 5), (1, 6, 9), (2, 10, 13), (3, 14, 17)]
    # While it waits at 2 s: one in flight, one to follow, and the one that region 1 has just produced.
    assert timeline.peak_bytes == 12


def test_with_one_buffer_a_reload_waits_for_the_backward_before():
    timeline = simulate(THREE, Link(2.0, 8.0, 0.0), (0, 1), "overlapped", buffers=1)
    assert spans(timeline, "reload") == {1: (6, 8), 0: (12, 14)}
    assert spans(timeline, "backward") == {2: (6, 9), 1: (9, 12), 0: (14, 17)}


def test_the_last_region_can_be_moved_but_backward_waits_for_it():
    timeline = simulate(THREE, LINK, (2,), "overlapped")
    assert spans(timeline, "offload") == {2: (6, 10)}
    assert spans(timeline, "reload") == {2: (10, 12)}
    assert timeline.step_seconds == 21


def test_latency_counts_for_every_copy():
    timeline = simulate(THREE, Link(2.0, 1.0, 0.5), (0,), "serial")
    assert spans(timeline, "offload") == {0: (2, 6.5)}
    assert spans(timeline, "reload") == {0: (16.5, 19)}


def test_memory_over_time_steps_where_inputs_come_and_go():
    timeline = simulate(THREE, LINK, (0, 1), "serial")
    assert memory_over_time(timeline.events, THREE, (0, 1), 100) == (
        (0, 100),
        (0, 104),
        (2, 108),  # region 1 has its input
        (6, 104),  # input 0 is out
        (8, 108),
        (12, 104),
        (17, 100),  # input 2 is done with
        (17, 104),  # and the reload of input 1 begins
        (22, 100),
        (22, 104),
        (27, 100),
    )


def test_work_of_no_time_holds_memory_all_the_same():
    instant = [Region(index, 4, 0.0, 0.0) for index in range(3)]
    assert simulate(instant, LINK, (), "none").peak_bytes == 12


def test_no_regions_take_no_time():
    timeline = simulate([], LINK, (), "overlapped", base_bytes=7)
    assert (timeline.events, timeline.step_seconds, timeline.peak_bytes) == ((), 0.0, 7)


@pytest.mark.parametrize(
    ("moved", "schedule", "buffers"), [((3,), "serial", 2), ((0,), "none", 2), ((0,), "overlapped", 0)]
)
def test_what_makes_no_sense_is_refused(moved, schedule, buffers):
    with pytest.raises(ValueError, match="indices of their own|moves nothing|at least one buffer"):
        simulate(THREE, LINK, moved, schedule, buffers=buffers)


def test_two_regions_of_one_index_are_refused():
    with pytest.raises(ValueError, match="indices of their own"):
        simulate([THREE[0], THREE[0]], LINK, (), "none")


@pytest.mark.parametrize("make", [lambda: Region(0, -1, 1, 1), lambda: Region(0, 1, -1, 1), lambda: Link(1, 0, 0)])
def test_impossible_sizes_and_speeds_are_refused(make):
    with pytest.raises(ValueError, match="negative"):
        make()


# -- for every step


@any_time
@given(steps(), LINKS, BUFFERS)
def test_no_input_is_read_before_it_arrives(step, link, buffers):
    regions, moved = step
    for schedule in ("serial", "overlapped"):
        timeline = simulate(regions, link, moved, schedule, buffers=buffers)
        forward, backward = by_region(timeline, "forward"), by_region(timeline, "backward")
        offload, reload = by_region(timeline, "offload"), by_region(timeline, "reload")
        for region in moved:
            assert forward[region].end <= offload[region].start
            assert offload[region].end <= reload[region].start
            assert reload[region].end <= backward[region].start


@any_time
@given(steps(), LINKS, BUFFERS)
def test_never_more_copies_in_flight_than_buffers(step, link, buffers):
    regions, moved = step
    timeline = simulate(regions, link, moved, "overlapped", buffers=buffers)
    begun, copies = issued(timeline, "offload"), by_region(timeline, "offload")
    assert most_at_once([(begun[region], copies[region].end) for region in moved]) <= buffers


@pytest.mark.slow
@any_time
@given(steps(), LINKS, BUFFERS)
def test_never_more_reloaded_inputs_alive_than_buffers_nor_than_two(step, link, buffers):
    regions, moved = step
    timeline = simulate(regions, link, moved, "overlapped", buffers=buffers)
    begun, backward = issued(timeline, "reload"), by_region(timeline, "backward")
    assert most_at_once([(begun[region], backward[region].end) for region in moved]) <= min(buffers, 2)


@any_time
@given(steps(), LINKS, BUFFERS)
def test_no_reload_is_issued_before_the_backward_before_it(step, link, buffers):
    regions, moved = step
    timeline = simulate(regions, link, moved, "overlapped", buffers=buffers)
    begun, backward = issued(timeline, "reload"), by_region(timeline, "backward")
    for region in moved & {region.index for region in regions[:-1]}:
        assert begun[region] >= backward[region + 1].start


@any_time
@given(steps(), LINKS, BUFFERS)
def test_overlapped_is_never_later_than_serial_nor_earlier_than_compute(step, link, buffers):
    regions, moved = step
    overlapped = simulate(regions, link, moved, "overlapped", buffers=buffers)
    serial = simulate(regions, link, moved, "serial")
    alone = simulate(regions, link, (), "none")
    for kind in ("forward", "backward"):
        first, middle, last = (by_region(timeline, kind) for timeline in (alone, overlapped, serial))
        for region in first:
            assert first[region].end <= middle[region].end <= last[region].end
    assert alone.step_seconds <= overlapped.step_seconds <= serial.step_seconds


@any_time
@given(steps(), LINKS, BUFFERS)
def test_memory_is_never_above_that_without_offload(step, link, buffers):
    regions, moved = step
    timeline = simulate(regions, link, moved, "overlapped", buffers=buffers, base_bytes=5)
    assert timeline.peak_bytes <= simulate(regions, link, (), "none", base_bytes=5).peak_bytes


@any_time
@given(steps(), LINKS, BUFFERS)
def test_everything_happens_once_and_every_engine_does_one_thing_at_a_time(step, link, buffers):
    regions, moved = step
    for schedule in ("serial", "overlapped"):
        timeline = simulate(regions, link, moved, schedule, buffers=buffers, base_bytes=5)
        indices = {region.index for region in regions}
        assert by_region(timeline, "forward").keys() == by_region(timeline, "backward").keys() == indices
        assert by_region(timeline, "offload").keys() == by_region(timeline, "reload").keys() == moved
        for engine in ("compute", "device_to_host", "host_to_device"):
            events = [event for event in timeline.events if event.engine == engine]
            assert all(event.start <= event.end for event in events)
            assert all(one.end <= other.start for one, other in pairwise(events))
        assert memory_over_time(timeline.events, regions, moved, 5)[-1][1] == 5
        assert 0 <= timeline.overlap <= 1


@any_time
@given(steps(), LINKS, BUFFERS)
def test_the_compute_engine_works_or_waits_from_the_first_second_to_the_last(step, link, buffers):
    regions, moved = step
    timeline = simulate(regions, link, moved, "overlapped", buffers=buffers)
    events = [event for event in timeline.events if event.engine == "compute"]
    assert events[0].start == 0
    assert events[-1].end == timeline.step_seconds
    assert all(one.end == other.start for one, other in pairwise(events))
