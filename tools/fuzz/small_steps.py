# Small tensors, few rows and short runs count as worth what glue does for large ones. Self-contained: this text is also
# a part of each script that shows a failure.
import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch

from glue_compiler.compat.symbols import size_when_traced
from glue_compiler.handoff import layer_variants
from glue_compiler.memory.layer_plan import Call
from glue_compiler.memory.layer_roles import Choice, Role
from glue_compiler.memory.moved_calls import Mover
from glue_compiler.ops import embedding
from glue_compiler.ops.copy_engine import CopyEngine
from glue_compiler.passes.group_experts import permuted_rows
from glue_compiler.passes.specialize_attention import rewrite


class EachRole:
    """In the place of a ``LayerPlan``: calls of layers have all roles in turn, whatever they take."""

    def __init__(self, *_: Any, first: int = 0) -> None:
        self.told: list[Any] = []
        self.asked = 0
        self.mover = Mover(CopyEngine(), least=1)
        self._numbers, self._moved = itertools.count(first), None  # type: tuple[Iterator[int], int | None]

    def compiles(self) -> None: ...

    def before_call(self, call: Call, role: Role) -> None: ...

    def called(self, call: Call, role: Role, before: None, outputs: Sequence[Any]) -> None: ...

    def ran_out(self) -> None: ...

    def role(self, call: Call) -> Role:
        number, self.asked = next(self._numbers), self.asked + 1
        choice = (Choice.KEEP, Choice.AGAIN, Choice.MOVE, Choice.AGAIN, Choice.MOVE)[number % 5]
        moves_input = bool(call.input_bytes) and number % 3 == 1
        before = self._moved
        self._moved = call.layer if choice is Choice.MOVE or moves_input else None
        leaves = before if choice is Choice.KEEP or moves_input else None
        return Role(choice, leaves, () if before is None else (before,), moves_input)


@contextlib.contextmanager
def small_steps_count() -> Iterator[None]:
    """Layers have roles on any device under a ``memory_budget``; the gradients of all tables are worth a kernel, and
    masks of an odd number of queries are copied to whole blocks."""

    def is_odd(queries: int | torch.SymInt, keys: int | torch.SymInt, device: torch.device) -> bool:
        return (size_when_traced(queries) or 0) % 2 == 1

    with (
        mock.patch.object(layer_variants, "memory_on", lambda device: device),
        mock.patch.object(layer_variants, "LayerPlan", EachRole),
        mock.patch.object(embedding, "pays", return_value=True),
        mock.patch.object(permuted_rows, "pays", return_value=True),
        mock.patch.object(rewrite, "whole_blocks_pay", is_odd),
    ):
        yield
