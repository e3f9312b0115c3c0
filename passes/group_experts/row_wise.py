"""Is a call row-wise: does row ``i`` of its results depend on row ``i`` of its row operands, and on no other row?

Names prove nothing, so the call is run on its recorded fake operands, and each operator that it dispatches is judged by
what it does to dimension 0, the rows.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from glue_compiler import compat
from glue_compiler.fx.effects import EffectAnalysis, Effects
from glue_compiler.fx.values import expression, storage_of, storages_of, tensors_in, value_of

aten = torch.ops.aten

# Not tagged as pointwise, though they are: each element by itself.
_ELEMENTWISE = {
    aten._to_copy.default,
    aten.clone.default,
    aten.hardswish.default,
    aten.leaky_relu.default,  # untagged in 2.11
    aten.log_sigmoid_forward.default,
    aten.detach.default,
    aten.alias.default,
    aten.lift_fresh.default,
}
# Operator → index of the argument that names the dimensions it acts along, and what an absent one means.
_ALL = "all dimensions"
_ALONG: dict[Any, tuple[int, Any]] = {
    aten._softmax.default: (1, _ALL),
    aten._log_softmax.default: (1, _ALL),
    aten.glu.default: (1, -1),
    aten.sum.dim_IntList: (1, _ALL),
    aten.mean.dim: (1, _ALL),
    aten.amax.default: (1, _ALL),
    aten.amin.default: (1, _ALL),
    aten.var.correction: (1, _ALL),
    aten.linalg_vector_norm.default: (2, _ALL),
    aten.slice.Tensor: (1, 0),
    aten.select.int: (1, _ALL),
    aten.split.Tensor: (2, 0),
    aten.split_with_sizes.default: (2, 0),
    aten.squeeze.dim: (1, _ALL),
    aten.cumsum.default: (1, _ALL),
    aten.flip.default: (1, _ALL),
}
_VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default}
_LEFT_PRODUCTS = {aten.mm.default: 0, aten.addmm.default: 1}


_OUT_OF_PLACE: dict[Any, Any] = {
    operator.iadd: operator.add,
    operator.imul: operator.mul,
    operator.isub: operator.sub,
    operator.itruediv: operator.truediv,
    **{f"{name}_": name for name in ("add", "mul", "sub", "div", "clamp", "neg", "sigmoid", "tanh", "relu")},
}


def out_of_place(node: fx.Node, effects: Mapping[fx.Node, Effects]) -> Any | None:
    """The target that computes what ``node`` does in place, if nothing else ever sees the tensor that it overwrites."""
    written = node.args[0] if node.args else None
    if node.target not in _OUT_OF_PLACE or not isinstance(written, fx.Node) or set(written.users) != {node}:
        return None
    value = value_of(written)
    if not isinstance(value, torch.Tensor) or effects[node].writes != {storage_of(value)}:
        return None
    for other in node.graph.nodes:
        if other is node:
            return _OUT_OF_PLACE[node.target]
        if other is not written and storage_of(value) in storages_of(value_of(other)):
            return None
    return None


def mixes_rows(
    node: fx.Node, target: Any, is_row: Callable[[fx.Node], bool], rows: Any, analysis: EffectAnalysis
) -> str | None:
    """None if ``node``, calling ``target``, is proved row-wise, else why not.

    Args:
        is_row: which operands hold one row of the row set in each row.
        rows: the number of rows, as a sympy expression.
    """
    values: dict[fx.Node, Any] = {}
    row_tensors: list[torch.Tensor] = []

    def operand(arg: fx.Node) -> Any:
        if arg not in values:
            values[arg] = _detached(value_of(arg))
            if is_row(arg):
                row_tensors.extend(tensors_in(values[arg]))
        return values[arg]

    args, kwargs = fx.map_arg(node.args, operand), fx.map_arg(node.kwargs, operand)
    judge = _Judge(row_tensors, rows)
    fake_mode = analysis.fake_mode
    try:
        with torch.no_grad(), compat.speculation(fake_mode, getattr(fake_mode, "shape_env", None)), judge:
            if node.op == "call_method":
                result = getattr(args[0], str(target))(*args[1:], **kwargs)
            else:
                result = target(*args, **kwargs)
    except Exception as failure:
        return f"it cannot be run on fake tensors ({type(failure).__name__})"
    if judge.problem:
        return judge.problem
    if not all(judge.is_row(tensor) for tensor in tensors_in(result)):
        return "its result does not have the rows in its first dimension"
    return None


class _Judge(TorchDispatchMode):
    """Follows the row tensors through the operators of one call."""

    def __init__(self, row_tensors: list[torch.Tensor], rows: Any) -> None:
        super().__init__()
        self.kept = list(row_tensors)  # alive, so that an id stays one tensor's
        self.ids = {id(tensor) for tensor in row_tensors}
        self.rows = rows
        self.problem: str | None = None

    def is_row(self, tensor: Any) -> bool:
        return id(tensor) in self.ids

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = [tensor for tensor in tensors_in([*args, kwargs]) if self.is_row(tensor)]
        if not given or self.problem or _reads_metadata(func):
            return result
        results = tensors_in(result)
        self.problem = self._problem(func, args, given, results)
        if self.problem is None:
            self.kept += results
            self.ids |= {id(tensor) for tensor in results}
        return result

    def _has_rows(self, tensor: torch.Tensor) -> bool:
        return tensor.dim() > 0 and bool(expression(tensor.shape[0]) == self.rows)

    def _problem(self, func: Any, args: Any, given: list[torch.Tensor], results: list[torch.Tensor]) -> str | None:
        if not all(self._has_rows(tensor) for tensor in (*given, *results)):
            return f"{func} moves or changes the rows"
        if torch.Tag.pointwise in func.tags or func in _ELEMENTWISE:
            return self._broadcasts(func, args, given, results[0].dim())
        first = args[0]
        rank = first.dim() if isinstance(first, torch.Tensor) else 0
        if func in _ALONG:
            position, default = _ALONG[func]
            dims = args[position] if len(args) > position else default
            return self._along(func, dims, rank)
        if func in _VIEWS:
            return None  # row-major, and as many rows before as after: each row keeps its elements
        if func is aten.unsqueeze.default:
            return None if args[1] % (rank + 1) > 0 else f"{func} moves the rows"
        if func is aten.cat.default:
            dim = args[1] if len(args) > 1 else 0
            if len(given) == len(args[0]):
                return self._along(func, dim, args[0][0].dim())
        if func in (aten.permute.default, aten.transpose.int):
            keeps = args[1][0] == 0 if func is aten.permute.default else 0 not in (args[1] % rank, args[2] % rank)
            return None if keeps else f"{func} moves the rows"
        if func in _LEFT_PRODUCTS and len(given) == 1 and given[0] is args[_LEFT_PRODUCTS[func]]:
            return None
        if func is aten.native_layer_norm.default and len(given) == 1 and self.is_row(first):
            return None if len(args[1]) < rank else f"{func} normalises over the rows"
        return f"{func} is not known to keep rows apart"

    def _broadcasts(self, func: Any, args: Any, given: list[torch.Tensor], rank: int) -> str | None:
        if any(tensor.dim() != rank for tensor in given):
            return f"{func} broadcasts rows against another dimension"
        shared = [tensor for tensor in tensors_in(args) if not self.is_row(tensor)]
        if any(t.dim() > rank or (t.dim() == rank and not _is_one(t.shape[0])) for t in shared):
            return f"{func} combines the rows with a tensor that has another value for each row"
        return None

    @staticmethod
    def _along(func: Any, dims: Any, rank: int) -> str | None:
        if dims is None or dims == _ALL or dims == []:
            return f"{func} acts across the rows"
        several = dims if isinstance(dims, Sequence) else [dims]
        return f"{func} acts across the rows" if any(dim % rank == 0 for dim in several) else None


def _reads_metadata(func: Any) -> bool:
    return func.namespace == "prim" or func in (aten.sym_size.int, aten.sym_numel.default, aten.sym_stride.int)


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    if type(value) in (tuple, list):
        return type(value)(_detached(item) for item in value)
    return value
