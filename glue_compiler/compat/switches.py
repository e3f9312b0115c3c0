"""The functions that captured graphs switch modes with, and those that do nothing to results."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

GRAD_SWITCHES = frozenset({torch._C._set_grad_enabled})
ENTER_AUTOCAST = torch.amp.autocast_mode._enter_autocast
EXIT_AUTOCAST = torch.amp.autocast_mode._exit_autocast
AUTOCAST_SWITCHES = frozenset({ENTER_AUTOCAST, EXIT_AUTOCAST})
WITHOUT_EFFECT = frozenset({torch._C._log_api_usage_once})


@contextlib.contextmanager
def modes_restored() -> Iterator[None]:
    """Grad mode and autocast end as they began, whatever a graph that is interpreted and fails half way leaves on."""
    devices = ("cpu", "cuda")
    autocast = [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in devices]
    cache, nesting = torch.is_autocast_cache_enabled(), autocast_nesting()
    with torch.set_grad_enabled(torch.is_grad_enabled()):
        try:
            yield
        finally:
            for device, (enabled, dtype) in zip(devices, autocast, strict=True):
                torch.set_autocast_enabled(device, enabled)
                torch.set_autocast_dtype(device, dtype)
            torch.set_autocast_cache_enabled(cache)
            while autocast_nesting() > nesting:
                torch.autocast_decrement_nesting()
            if nesting == 0:  # casts of parameters, which the outermost region drops when it ends
                torch.clear_autocast_cache()


def autocast_nesting() -> int:
    """How many autocast regions are open in this thread."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()
