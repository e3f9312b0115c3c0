"""What is computed again where it is read, and what is read from memory for it."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from glue_compiler.fx.fused_reads import FARTHEST, MOST_READS, MOST_SUMMED_READS, fused_lives, fused_reads, is_pointwise

aten = torch.ops.aten


def reads(operands, inlines):
    """``operands``: by name, in order."""
    found, inlined = fused_reads(list(operands), operands.__getitem__, inlines.__contains__)
    return dict(zip(operands, found, strict=True)), inlined


def test_a_value_that_is_inlined_leaves_its_sources_to_its_readers():
    found, inlined = reads({"bent": ["wide"], "one": ["bent"], "other": ["bent", "x"]}, {"bent"})
    assert inlined == {"bent"}
    assert found == {"bent": {"wide"}, "one": {"wide"}, "other": {"wide", "x"}}


def test_sources_reach_through_several_values():
    found, inlined = reads({"a": ["x"], "b": ["a", "y"], "product": ["b"]}, {"a", "b"})
    assert inlined == {"a", "b"}
    assert found["product"] == {"x", "y"}


def test_what_is_in_memory_is_read_there():
    found, inlined = reads({"bent": ["wide"], "product": ["bent"]}, set())
    assert not inlined
    assert found["product"] == {"bent"}


@pytest.mark.parametrize(("more", "is_written"), [(0, False), (1, True)])
def test_what_is_computed_from_many_tensors_is_written_for_several_readers(more, is_written):
    sources = [f"x{number}" for number in range(MOST_READS + more)]
    found, inlined = reads({"sum": sources, "one": ["sum"], "other": ["sum"]}, {"sum"})
    assert ("sum" not in inlined) == is_written
    assert found["other"] == ({"sum"} if is_written else set(sources))


def test_with_one_reader_it_is_written_later():
    sources = [f"x{number}" for number in range(MOST_READS + 1)]
    assert reads({"sum": sources, "one": ["sum"]}, {"sum"})[1] == {"sum"}


def test_a_long_sum_is_computed_in_pieces():
    terms = 1000
    chain = {"s0": ["x0"], **{f"s{n}": [f"s{n - 1}", f"x{n}"] for n in range(1, terms)}}
    found, inlined = reads(chain, set(chain))
    assert max(map(len, found.values())) <= MOST_SUMMED_READS + 1
    assert 0.8 * terms < len(inlined) < terms


def test_pointwise_are_operators_of_single_elements():
    graph = fx.Graph()
    x = graph.placeholder("x")
    assert is_pointwise(graph.call_function(aten.tanh.default, (x,)))
    assert is_pointwise(graph.call_function(torch.ops.prims.convert_element_type.default, (x, torch.float32)))
    assert not is_pointwise(graph.call_function(aten.sum.default, (x,)))
    assert not is_pointwise(graph.call_function(aten.mm.default, (x, x)))
    assert not is_pointwise(x)


def gated(operands, sizes, others=8):
    """Lives of values of which ``sizes`` says what is written by a fused kernel; others are kernels of their own."""
    places = {name: place for place, name in enumerate(operands)}

    def size(name):
        return sizes.get(name, others)

    return fused_lives(places, operands.__getitem__, lambda name: False, sizes.__contains__, size)


GATED = {"grad": (), "up": ("grad", "saved"), "product": ("up",), "gate": ("grad", "saved"), "other": ("gate",)}
"""Both gradients of a gated product, with a product of the first between them."""


SCALED = {"grad": (), "gate": ("grad", "saved"), "product": ("gate",), "scaled": ("gate",), "other": ("scaled",)}
"""A gradient, a product of it, and the gradient times a number, which another product reads."""


def test_what_reads_a_written_value_is_written_by_its_kernel():
    assert gated(SCALED, {"gate": 8, "scaled": 8}).first == {
        "grad": 0,
        "gate": 1,
        "product": 2,
        "scaled": 1,
        "other": 4,
    }


@pytest.mark.parametrize(
    ("sizes", "more"),
    [({"gate": 8, "scaled": 4}, ()), ({"scaled": 8}, ()), ({"gate": 8, "scaled": 8}, ("product",))],
    ids=["of another size", "of a kernel of its own", "read beside what is not there yet"],
)
def test_what_cannot_be_in_its_kernel_is_written_later(sizes, more):
    changed = SCALED | {"scaled": ("gate", *more)}
    assert gated(changed, sizes).first["scaled"] == 3


def test_what_reads_a_value_of_before_has_no_kernel_to_be_written_in():
    """As backward does, of what forward has written and saved."""
    assert gated({"scaled": ("saved",), "other": ("scaled",)}, {"saved": 8, "scaled": 8}).first["scaled"] == 0


def test_two_gradients_that_read_the_same_are_written_by_one_kernel():
    found = gated(GATED, {"up": 8, "gate": 8})
    assert found.first == {"grad": 0, "up": 1, "product": 2, "gate": 1, "other": 4}
    assert found.last == {"saved": 3, "grad": 3, "up": 2, "gate": 4}


@pytest.mark.parametrize(
    ("sizes", "operands"),
    [
        ({"up": 8, "gate": 4}, GATED),  # of another size
        ({"gate": 8}, GATED),  # the first is a kernel of its own
        ({"up": 8, "gate": 8}, {**GATED, "gate": ("grad2", "saved2")}),  # they read nothing in common
        ({"up": 8, "gate": 8}, {**GATED, "gate": ("grad", "product")}),  # what it reads is not there yet
    ],
)
def test_what_is_not_of_one_kernel_is_written_where_it_stands(sizes, operands):
    assert gated(operands, sizes).first["gate"] == 3


def test_what_reads_a_fused_value_is_written_with_it():
    operands = {"grad": (), "up": ("grad",), "product": ("up",), "gate": ("up", "grad")}
    assert gated(operands, {"up": 8, "gate": 8}).first["gate"] == 1


AGAIN = {
    "product": ("saved",),
    "weight": ("product", "input"),
    "grad": (),
    "gate": ("grad", "saved"),
    "more": ("gate",),
}
"""A gated product that backward computes again, for a weight's gradient, and the gradient of one of its factors."""


def test_what_shares_a_read_waits_for_what_is_not_there_yet():
    found = gated(AGAIN, {"product": 8, "gate": 8})
    assert found.first == {"product": 0, "weight": 1, "grad": 2, "gate": 3, "more": 4}
    # Who reads it runs behind the kernel that writes both, and so keeps what else it reads.
    assert found.last == {"saved": 3, "product": 3, "input": 3, "grad": 3, "gate": 4}


@pytest.mark.parametrize(
    ("sizes", "operands"),
    [
        ({"product": 4, "gate": 8}, AGAIN),  # of another size
        ({"product": 8, "gate": 8}, {**AGAIN, "gate": ("grad", "saved2")}),  # they read nothing in common
        ({"product": 8, "gate": 8}, {**AGAIN, "grad": ("weight",)}),  # it is computed from it, by way of a product
    ],
)
def test_what_is_of_a_kernel_of_its_own_waits_for_nothing(sizes, operands):
    assert gated(operands, sizes).last["product"] == 1


def test_what_shares_a_small_read_waits_for_nothing():
    """As values of two layers that read one table."""
    assert gated(AGAIN, {"product": 8, "gate": 8}, others=4).last["product"] == 1


@pytest.mark.parametrize(("between", "waits"), [(FARTHEST - 3, True), (FARTHEST - 2, False)])
def test_what_is_far_behind_is_not_waited_for(between, waits):
    others = {str(number): () for number in range(between)}
    operands = {"early": ("saved",), "its": ("early",), **others, "grad": (), "late": ("saved", "grad")}
    found = gated(operands, {"early": 8, "late": 8})
    assert found.last["early"] == (found.first["late"] if waits else 1)
