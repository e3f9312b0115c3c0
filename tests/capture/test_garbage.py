"""Collections while a frame is converted: what was there before is left out, and is as it was afterwards."""

import gc

import pytest
import torch

from glue_compiler.backend import GlueBackend
from glue_compiler.capture.garbage import older_objects_left_out


def frozen_while_compiled(fails=False):
    seen = []

    def hand_off(gm, inputs, options, uuid, *edit):
        seen.append(gc.get_freeze_count())
        if fails:
            raise RuntimeError("no code")
        return gm

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x.sin(), backend=GlueBackend(hand_off), options={"compiler": "aot_eager"})
    if fails:
        with pytest.raises(Exception, match="no code"):
            compiled(torch.ones(2))
    else:
        compiled(torch.ones(2))
    return seen[0]


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_older_is_left_out_while_a_frame_is_converted_and_no_longer(fails):
    assert frozen_while_compiled(fails) > 10_000
    assert gc.get_freeze_count() == 0


def test_conversions_within_conversions_are_one():
    with older_objects_left_out():
        with older_objects_left_out():
            pass
        assert gc.get_freeze_count() > 10_000
    assert gc.get_freeze_count() == 0


def test_what_a_user_has_frozen_stays_so():
    gc.freeze()
    try:
        count = frozen_while_compiled()
        assert gc.get_freeze_count() <= count
        assert gc.get_freeze_count() > 10_000
    finally:
        gc.unfreeze()


def test_where_collections_are_off_nothing_is_done():
    gc.disable()
    try:
        assert frozen_while_compiled() == 0
    finally:
        gc.enable()
