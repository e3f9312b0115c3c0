"""What a graph that is interpreted and fails half way leaves on."""

import pytest
import torch

from glue_compiler.compat.switches import ENTER_AUTOCAST, autocast_nesting, modes_restored


def fails_in_autocast():
    ENTER_AUTOCAST("cpu", torch.bfloat16, True, True)
    torch._C._set_grad_enabled(False)
    raise ZeroDivisionError


def state():
    return autocast_nesting(), torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()


@pytest.mark.parametrize("outer", [False, True], ids=["", "inside another region"])
def test_the_modes_are_as_they_were(outer):
    with torch.autocast("cpu", torch.float16, enabled=outer):
        before = state(), torch.get_autocast_dtype("cpu")
        with pytest.raises(ZeroDivisionError), modes_restored():
            fails_in_autocast()
        assert (state(), torch.get_autocast_dtype("cpu")) == before
    assert state() == (0, False, True)


def test_a_parameter_that_is_written_afterwards_is_cast_again():
    weight, x = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2)

    def product():
        with torch.autocast("cpu", torch.bfloat16):
            return (x @ weight).float().sum().item()

    def product_and_failure():
        ENTER_AUTOCAST("cpu", torch.bfloat16, True, True)
        product()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), modes_restored():
        product_and_failure()
    weight.untyped_storage().copy_(torch.zeros(2, 2).untyped_storage())
    assert product() == 0
