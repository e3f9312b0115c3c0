"""When attention without its mask pays."""

import pytest

from glue_compiler.ops.attention_costs import gradient_pays, lists_pay, pays


@pytest.mark.parametrize(
    ("length", "layers", "expected"),
    [
        (8192, 1, True),
        (512, 1, True),
        (511, 1, False),
        (256, 1, False),
        (256, 2, True),
        (255, 100, False),
        (None, 1, True),
    ],
)
def test_long_rows_and_many_layers_pay(length, layers, expected):
    assert pays((9, 0), length, layers) == expected
    assert pays((8, 0), length, layers) == expected  # not measured: as the one that was


@pytest.mark.parametrize(("queries", "expected"), [(8192, True), (1024, True), (1023, False), (1, False), (None, True)])
def test_lists_of_a_mask_pay_for_many_queries(queries, expected):
    assert lists_pay((9, 0), queries) == expected
    assert lists_pay((8, 0), queries) == expected


@pytest.mark.parametrize("capability", [(9, 0), (8, 0)])
def test_a_gradient_pays_where_the_model_does_not_write_softmax_out(capability):
    assert gradient_pays(capability, is_written_out=False)
    assert not gradient_pays(capability, is_written_out=True)


def test_other_devices_are_not_estimated():
    assert pays(None, 1, 1)
    assert lists_pay(None, 1)
    assert gradient_pays(None, is_written_out=True)
