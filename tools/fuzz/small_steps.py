# Small tensors, few rows and short runs count as worth what glue does for large ones. Self-contained: this text is also
# a part of each script that shows a failure.
import contextlib
import itertools
from collections.abc import Iterable, Iterator
from types import CodeType
from unittest import mock

import torch

from glue_compiler import backend
from glue_compiler.compat.symbols import size_when_traced
from glue_compiler.ops import embedding
from glue_compiler.ops.device_rates import Rates
from glue_compiler.passes import plan_memory
from glue_compiler.passes.group_experts import permuted_rows
from glue_compiler.passes.specialize_attention import rewrite
from glue_compiler.replan import replanner
from glue_compiler.replan.device_steps import Held
from glue_compiler.replan.replanner import Replanner


@contextlib.contextmanager
def small_steps_count() -> Iterator[None]:
    """Small tensors move too, for compute counts as so slow that it hides any copy, and steps take more memory each
    time, so that plans are made again; the gradients of all tables are worth a kernel, and masks of an odd number of
    queries are copied to whole blocks."""
    slow = Rates(flops=1e3, memory=1e3, link=1e4)
    marks = itertools.count()

    def held(_: torch.device) -> Held:
        return Held(0, int(1.7 ** next(marks)))

    def is_odd(queries: int | torch.SymInt, keys: int | torch.SymInt, device: torch.device) -> bool:
        return (size_when_traced(queries) or 0) % 2 == 1

    def follow(codes: Iterable[CodeType]) -> Replanner:
        return Replanner(codes, held, kinds=("cpu", "cuda"))

    with (
        mock.patch.object(plan_memory, "rates_of", return_value=slow),
        mock.patch.object(embedding, "pays", return_value=True),
        mock.patch.object(permuted_rows, "pays", return_value=True),
        mock.patch.object(rewrite, "whole_blocks_pay", is_odd),
        mock.patch.object(backend, "Replanner", follow),
        mock.patch.object(replanner, "FIRST", 1),
    ):
        yield
