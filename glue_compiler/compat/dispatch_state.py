"""Which parts of torch's dispatcher are in force in this thread."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

# As it is where this module is imported, outside of any operator and any mode.
_OUTSIDE = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


def outside_of_operators() -> AbstractContextManager[None]:
    """In the kernel of an operator autograd records nothing, and autocast casts nothing; within this they do again."""
    return torch._C._ForceDispatchKeyGuard(*_OUTSIDE)
