"""Ranks, started when a test first asks for them."""

import pytest

from tests.distributed.ranks import Ranks


@pytest.fixture(scope="session")
def two_ranks():
    ranks = Ranks(2)
    yield ranks
    ranks.end()


@pytest.fixture(scope="session")
def four_ranks():
    ranks = Ranks(4)
    yield ranks
    ranks.end()
