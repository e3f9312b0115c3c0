"""Torch's compiler bisector: the same environment variables in 2.11 to 2.15."""

from __future__ import annotations


def disables_rewrite(what: str) -> bool:
    """Does torch's bisector ask for this single rewrite to be left out?

    It does with ``TORCH_BISECT_BACKEND=inductor TORCH_BISECT_SUBSYSTEM=glue_rewrites TORCH_BISECT_MAX=n`` after the
    first n + 1, which is how it counts the parts of Inductor. (The subsystem ``glue`` counts whole passes.)
    """
    from torch._inductor.compiler_bisector import CompilerBisector

    return CompilerBisector.disable_subsystem("inductor", "glue_rewrites", lambda: what)
