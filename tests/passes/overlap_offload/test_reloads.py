"""When what was moved starts to come back."""

from __future__ import annotations

import pytest
from torch import fx

from glue_compiler.passes.overlap_offload.saved_tensors import RegionTensors, SavedTensor
from glue_compiler.passes.overlap_offload.schedule import _reloads


def backward(places):
    """So many nodes, of which the first is a placeholder."""
    graph = fx.Graph()
    graph.placeholder("x")
    for _ in range(places - 1):
        graph.call_function(len)
    return list(graph.nodes)


def region(index, first_use, last_use, earliest=0):
    (node, *_) = backward(1)
    return RegionTensors(index, (SavedTensor("plan", node, node, 8, 0, first_use, last_use),), earliest)


def starts(*regions, buffers=2):
    found, skips = _reloads(backward(30), regions, [one.index for one in regions], buffers)
    assert not skips
    return {reload.region.index: reload.start for reload in found}


def test_each_comes_back_while_the_region_behind_it_computes():
    assert starts(region(0, 20, 25), region(1, 10, 15)) == {1: 1, 0: 10}


@pytest.mark.parametrize(("earliest", "start"), [(0, 1), (4, 4), (9, 9)])
def test_none_comes_back_before_what_is_saved_of_the_region_behind_is_needed(earliest, start):
    assert starts(region(0, 20, 25), region(1, 10, 15, earliest)) == {1: start, 0: 10}


def test_a_place_for_it_must_be_free():
    assert starts(region(0, 20, 25), region(1, 10, 15, 5), buffers=1) == {1: 5, 0: 16}
