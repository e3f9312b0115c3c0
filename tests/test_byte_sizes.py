"""Numbers of bytes are shown in a unit in which the number says something."""

import pytest

from glue_compiler.byte_sizes import with_unit


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1023, "1023 bytes"),
        (1024, "1.00 KiB"),
        (64 * 2**20, "64.00 MiB"),
        (24 * 2**30, "24.00 GiB"),
        (3 * 2**40, "3.00 TiB"),
    ],
)
def test_the_largest_unit_of_which_there_is_one(nbytes, shown):
    assert with_unit(nbytes) == shown
