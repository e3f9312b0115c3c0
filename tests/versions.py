"""What a release of torch gets wrong or refuses, or one of transformers does otherwise: tests skip there.

Each limit of torch was seen in the same program without glue, under plain ``aot_eager``, ``inductor`` or eager. A test
names its limit; the reason that pytest prints is what docs/versions.md says of that release.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from importlib.metadata import version

import pytest
import torch

from glue_compiler.compat.versions import torch_version

Version = tuple[int, int]


@dataclass(frozen=True)
class Limit:
    """``first`` and ``last``: the releases that have it, both included; None: from the oldest, to the newest."""

    reason: str
    first: Version | None = None
    last: Version | None = None
    where: bool = True
    """Does this machine and this build show it?"""

    @property
    def holds(self) -> bool:
        started = self.first is None or torch_version() >= self.first
        ended = self.last is not None and torch_version() > self.last
        return self.where and started and not ended

    @property
    def mark(self) -> pytest.MarkDecorator:
        """Decorates a test."""
        return pytest.mark.skipif(self.holds, reason=self.reason)

    def skip(self) -> None:
        """Called in a test, where its parameters decide."""
        if self.holds:
            pytest.skip(self.reason)


CUDA_BUILD_WITHOUT_DEVICE = torch.version.cuda is not None and not torch.cuda.is_available()

TRANSFORMERS_4 = importlib.util.find_spec("transformers") is not None and version("transformers").startswith("4.")

SINKS_BEHIND_VMAP = Limit(
    "transformers 4 makes masks under vmap, behind whose code specialize_attention does not follow attention sinks",
    where=TRANSFORMERS_4,
)
CLASS_ATTRIBUTE = Limit(
    "torch 2.11: Dynamo loses what code that it traces writes to an attribute of a class", last=(2, 11)
)
DEFAULT_ARGUMENT = Limit(
    "torch 2.11: Dynamo loses what code that it traces appends to a list that is a default argument", last=(2, 11)
)
NUMBER_OF_A_HIT = Limit(
    "torch 2.11: Dynamo breaks the graph at int() of an index that is a value, and at a lookup by it", last=(2, 11)
)
SWITCHED_INFERENCE_MODE = Limit(
    "torch 2.11: AOTAutograd fails on a view that is made in inference mode inside of the program", last=(2, 11)
)
SLICE_WRITES = Limit("torch before 2.13: Dynamo leaves a write to a slice of unknown length to eager", last=(2, 12))
NUMBERS_IN_CHECKPOINTS = Limit("torch 2.11: numbers read inside of checkpointed bodies are not compiled", last=(2, 11))
SIZES_IN_INDUCTOR = Limit(
    "torch 2.11: Inductor fails on slices of unknown length in graphs without gradients (an AssertionError of its "
    "sets of unbacked symbols)",
    last=(2, 11),
)
SYMBOLS_IN_INDUCTOR = Limit(
    "torch 2.15: Inductor's code for sizes that depend on data uses a name that it does not define (NameError: 'u0')",
    first=(2, 15),
)
WRITTEN_SUBCLASSES = Limit(
    "torch 2.11: AOTAutograd fails on a write to a tensor subclass of varying sizes that needs a gradient (as deferred "
    "logits are)",
    last=(2, 11),
)
MASKED_DOUBLE = Limit(
    "torch 2.11: Inductor's backward of scaled_dot_product_attention in fp64 fails on a CPU",
    last=(2, 11),
)
AO_OPERATORS = Limit("torch 2.11: has no ao operators and no streams for its own offloading", last=(2, 11))
FAKE_TENSORS_IN_THREADS = Limit(
    "torch before 2.13 built for CUDA, on a machine without: a FakeTensorMode in a second thread ends in a "
    "segmentation fault",
    last=(2, 12),
    where=CUDA_BUILD_WITHOUT_DEVICE,
)
RANDOM_IN_CHECKPOINTS = Limit("torch: random numbers in a checkpoint that needs no gradient are not compiled")
