"""Any step of checkpoint offload, for property tests, and what its events say."""

from hypothesis import settings
from hypothesis import strategies as st

from benchmarks.offload_simulator import Link, Region

# A busy machine must not fail a test.
any_time = settings(deadline=None)
SECONDS = st.floats(0, 1e3)
BANDWIDTHS = st.floats(1e-1, 1e6)
BUFFERS = st.integers(1, 3)
LINKS = st.builds(Link, host_to_device=BANDWIDTHS, device_to_host=BANDWIDTHS, latency=st.floats(0, 10))


@st.composite
def regions(draw):
    """A forward's regions, of equal or unequal sizes."""
    sizes = draw(st.sampled_from([st.integers(0, 1000), st.just(100)]))
    return [Region(index, draw(sizes), draw(SECONDS), draw(SECONDS)) for index in range(draw(st.integers(1, 8)))]


@st.composite
def steps(draw):
    """``(regions, moved)``: any of the regions may be moved, the last too."""
    all_regions = draw(regions())
    moved = draw(st.sets(st.sampled_from([region.index for region in all_regions])))
    return all_regions, moved


def by_region(timeline, kind):
    """``{region: event}`` of one kind; each region has at most one."""
    events = [event for event in timeline.events if event.kind == kind]
    assert len({event.region for event in events}) == len(events)
    return {event.region: event for event in events}


def issued(timeline, kind):
    """``{region: second}`` at which the compute engine stood when a copy was issued; its memory is taken from then."""
    seconds, compute = {}, 0.0
    for event in timeline.events:
        if event.engine == "compute":
            compute = event.end
        elif event.kind == kind:
            seconds[event.region] = compute
    return seconds


def most_at_once(intervals):
    """The most of the half-open ``(start, end)`` that hold at one time."""
    return max((sum(start <= moment < end for start, end in intervals) for moment, _ in intervals), default=0)
