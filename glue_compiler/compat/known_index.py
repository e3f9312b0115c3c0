"""Dynamo: a tensor of one index whose value is known while tracing."""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.cache
def hit_variable() -> type:
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.constant import ConstantVariable

    class HitVariable(VariableTracker):
        """``tensor([index])``, whose value is known while tracing. What is not written here Dynamo refuses to trace."""

        def __init__(self, index: int, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.index = index

        def python_type(self) -> type:
            return torch.Tensor

        def as_proxy(self) -> Any:
            return known_index(self.index)

        def _item(self, tx: Any, key: Any) -> Any:
            if not key.is_python_constant() or key.as_python_constant() != 0:
                return super().call_method(tx, "__getitem__", [key], {})
            return ConstantVariable.create(self.index)

        def mp_subscript_impl(self, tx: Any, key: Any) -> Any:  # from 2.12 on
            return self._item(tx, key)

        def nb_index_impl(self, tx: Any) -> Any:  # from 2.12 on
            return ConstantVariable.create(self.index)

        def __index__(self) -> int:  # 2.11 calls operator.index on the variable itself
            return self.index

        def call_method(self, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
            if name == "item" and not args and not kwargs:
                return ConstantVariable.create(self.index)
            if name == "__getitem__" and len(args) == 1 and not kwargs:
                return self._item(tx, args[0])
            return super().call_method(tx, name, args, kwargs)

    return HitVariable


def known_index(index: int) -> slice:
    """What ``x[tensor([index])]`` is traced as: the same elements, as long as it is the only index."""
    return slice(index, index + 1, 1)
