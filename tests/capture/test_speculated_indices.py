"""The number of an expert that has rows, while its code is traced for all: an index, and nothing else."""

import pytest
import torch

from tests import versions
from tests.capture.speculated_loops import SEEN, check, over_hits
from tests.passes.group_experts.loops import EXPERTS
from tests.slow import one_in


def counts_in_bytes(state, expert):
    return (expert.to(torch.uint8) - 1).double()


def halves(state, expert):
    return (expert.half() / 3).double()


def divides(state, expert):
    return expert / 2


def subtracts(state, expert):
    return expert - 1


def floors(state, expert):
    return expert // 2 + 1


def is_negative(state, expert):
    return 2.0 if -expert < 0 else 3.0


def compares_to_a_tensor(state, expert):
    return (expert == torch.arange(4)).double().sum() + (expert == 1)


def multiplies_an_integer(state, expert):
    return (torch.full((), 100, dtype=torch.uint8) * expert).double()


def shows(state, expert):
    SEEN.append(str(expert))
    return 1.0


def finds_by_identity(state, expert):
    return state.dict.get(expert, 7.0)


def asks_for_the_type(state, expert):
    return 2.0 if type(expert) is int else 3.0


def fills(state, expert):
    return torch.full((), expert, dtype=torch.float64)


def takes_the_number(state, expert):
    return 1.0 if int(expert) < 100 and expert.item() >= 0 else 2.0


def compares(state, expert):
    if expert == EXPERTS or expert < 0:
        return 2.0
    return 1.0


def indexes_a_list(state, expert):
    return [3.0, 3.0, 3.0, 3.0][expert]


def is_a_tensor(state, expert):
    return 2.0 if isinstance(expert, torch.Tensor) else 3.0


INDEX_TROUBLE = [
    counts_in_bytes, halves, divides, subtracts, floors, is_negative, compares_to_a_tensor,
    multiplies_an_integer, shows, fills,
]  # fmt: skip


@pytest.mark.parametrize("touch", one_in(3, INDEX_TROUBLE), ids=lambda touch: touch.__name__)
def test_a_hit_is_only_an_index(touch):
    check(over_hits(touch), grouped=False)


@pytest.mark.parametrize(
    "touch",
    one_in(3, [takes_the_number, compares, indexes_a_list, is_a_tensor, finds_by_identity, asks_for_the_type]),
    ids=lambda touch: touch.__name__,
)
def test_a_hit_may_be_asked_for_its_number(touch):
    if touch in (takes_the_number, finds_by_identity):
        versions.NUMBER_OF_A_HIT.skip()
    check(over_hits(touch), grouped=True)
