"""Problems of torch releases that a user of glue meets, and what follows. Each was seen on the versions named."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from glue_compiler.compat.versions import NEWEST_TORCH, OLDEST_TORCH

Version = tuple[int, int]


@dataclass(frozen=True)
class KnownProblem:
    """``first`` and ``last``: the torch releases that have it, both included."""

    first: Version
    last: Version
    problem: str
    consequence: str


KNOWN_PROBLEMS = (
    KnownProblem(
        (2, 11),
        (2, 11),
        "Inductor's backward fails on checkpointed regions that read a value back (.item()) and assert something of "
        "it: 'Unsupported inductor graph input type'.",
        "hoist_metadata moves such reads out of the region. With it off, set "
        "torch._dynamo.config.do_not_emit_runtime_asserts.",
    ),
    KnownProblem(
        (2, 11),
        (2, 11),
        "Dynamo does not capture writes to a slice whose length is a value.",
        "Loops over experts that write results slice by slice (aria of transformers 4) stay as they are.",
    ),
    KnownProblem(
        (2, 11),
        (2, 11),
        "Inductor's backward of scaled_dot_product_attention in fp64 fails on a CPU: 'expected scalar type Double but "
        "found Float'.",
        "specialize_attention leaves attention that is written out in fp64 as it is there.",
    ),
    KnownProblem(
        OLDEST_TORCH,
        NEWEST_TORCH,
        "Collectives into one tensor again and again, and writes through .data, do not advance its version counter.",
        "memoize_metadata cannot see such a refill of an integer input: write with copy_, or switch the pass off.",
    ),
    KnownProblem(
        OLDEST_TORCH,
        NEWEST_TORCH,
        "reorder_for_peak_memory moves an asynchronous copy's wait next to its start.",
        "overlap_offload keeps their order by data dependencies, and switches it off where options ask for offload.",
    ),
    KnownProblem(
        OLDEST_TORCH,
        NEWEST_TORCH,
        "Of two results that are equal AOTAutograd and Inductor may make one tensor, which eager mode does not.",
        "glue copies the second when the graph has run; views of one tensor that have gradients stay as they are.",
    ),
    KnownProblem(
        OLDEST_TORCH,
        NEWEST_TORCH,
        "torch's minifier behind AOTAutograd writes scripts without glue's passes.",
        "A pass that raises: GLUE_STRICT=1 TORCHDYNAMO_REPRO_AFTER=dynamo; one that computes wrongly: glue bisect.",
    ),
)


def torch_version() -> Version:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def is_supported() -> bool:
    """Is this torch one of those that glue is tested with?"""
    return OLDEST_TORCH <= torch_version() <= NEWEST_TORCH


def known_problems() -> tuple[KnownProblem, ...]:
    """Those of this torch."""
    return tuple(problem for problem in KNOWN_PROBLEMS if problem.first <= torch_version() <= problem.last)


def backend_is_registered() -> bool:
    """Does ``torch.compile(..., backend="glue")`` find glue?"""
    return "glue" in torch._dynamo.list_backends(exclude_tags=None)


def switched_off_by_torch(name: str) -> bool:
    """Does ``torch._inductor.config.disabled_passes`` name a pass? A part of the text is enough for torch."""
    from torch._inductor import config

    return name.upper() in str(config.disabled_passes).upper()
