"""Forward-mode gradients: right where nothing was rewritten, an error where they would be lost."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from glue_compiler.errors import GlueError

ROWS, WEIGHT, TARGET = torch.randn(5, 8), torch.randn(37, 8), torch.arange(5)


def loss(weight):
    return F.cross_entropy(F.linear(ROWS, weight), TARGET)


def tangent_of(call):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(call(forward_ad.make_dual(WEIGHT, WEIGHT))).tangent


def compiled(**options):
    torch._dynamo.reset()
    return torch.compile(loss, backend="glue", options={"compiler": "aot_eager", **options})


def test_a_tangent_that_would_be_lost_is_an_error_that_names_the_pass():
    with pytest.raises(GlueError, match='options={"passes": {"chunk_loss": False}}'):
        tangent_of(compiled())


def test_without_the_pass_it_is_eagers():
    call = compiled(passes={"chunk_loss": False})
    torch.testing.assert_close(tangent_of(call), tangent_of(loss))


def test_tensors_without_tangents_pass_in_a_dual_level():
    call = compiled()
    with forward_ad.dual_level():
        torch.testing.assert_close(call(WEIGHT), loss(WEIGHT))
