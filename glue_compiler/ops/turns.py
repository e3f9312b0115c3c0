"""An operator that keeps a compiler from doing work before other work is done.

What does not depend on each other, a compiler may fuse, and run in any order. Where it must not, as between tiles of
which one at a time is to be alive, the later one's operands are taken ``in_turn``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_library = torch.library.Library("glue", "FRAGMENT")
_library.define(
    "in_turn(Tensor(a) operand, Tensor[] after) -> Tensor(a)",
    tags=(torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag),  # any strides will do: nothing is read
)


def in_turn(operand: Tensor, after: Sequence[Tensor]) -> Tensor:
    """``operand``, of any sizes, dtype and strides, where the tensors of ``after`` exist. Nothing is read or copied."""
    return torch.ops.aten.alias(operand)


_library.impl("in_turn", in_turn, "CompositeExplicitAutograd")


@torch.library.register_fake("glue::in_turn", lib=_library)
def _(operand: Tensor, after: Sequence[Tensor]) -> Tensor:
    return torch.ops.aten.alias(operand)
