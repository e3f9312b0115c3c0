"""The functions that captured graphs switch modes with, and those that do nothing to results."""

from __future__ import annotations

import torch

GRAD_SWITCHES = frozenset({torch._C._set_grad_enabled})
ENTER_AUTOCAST = torch.amp.autocast_mode._enter_autocast
EXIT_AUTOCAST = torch.amp.autocast_mode._exit_autocast
AUTOCAST_SWITCHES = frozenset({ENTER_AUTOCAST, EXIT_AUTOCAST})
WITHOUT_EFFECT = frozenset({torch._C._log_api_usage_once})
