"""Settings of torch's that a program runs under; each is a context manager that stands in the program's text."""

from __future__ import annotations

from tools.fuzz.draw import Draw

SETTINGS = (
    "torch._functorch.config.patch(aggressive_recomputation=True)",
    "torch._functorch.config.patch(activation_memory_budget=0.5)",
    "default_dtype(torch.float64)",
    "deterministic()",
)


def draw_settings(draw: Draw, compiler: str) -> None:
    """Rarely one of ``SETTINGS``, and what the device and the compiler need."""
    if draw.chance(0.05) and not draw.one_graph:
        draw.set(draw.pick(*SETTINGS))
    if draw.device != "cpu":
        draw.set("deterministic()")  # else a write to one place twice leaves one of the two there, another each time
    if compiler == "inductor":
        draw.set("torch._inductor.config.patch(fallback_random=True, emulate_precision_casts=True)")
    for name, text in (("deterministic", DETERMINISTIC), ("default_dtype", DEFAULT_DTYPE)):
        if any(setting.startswith(name) for setting in draw.settings):
            draw.need(name, text)


DETERMINISTIC = """
@contextlib.contextmanager
def deterministic():
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
"""
DEFAULT_DTYPE = """
@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
"""
