"""Is a call row-wise: does row ``i`` of its results depend on row ``i`` of its row operands, and on no other row?

Each operator that the call is made of, below autograd, is judged by what it does to dimension 0, the rows.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from glue_compiler.fx.operators import Operators, given_leaves
from glue_compiler.fx.records import CallRecord, Given, Made, Meta, RecordedOperator, Unknown, meta_of
from glue_compiler.fx.values import leaves, storage_of, storages_of, value_of

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
# They act along the dimensions that their argument of this name says; where that says none, along all.
_ALONG = {
    aten._softmax.default: "dim",
    aten._log_softmax.default: "dim",
    aten.glu.default: "dim",
    aten.sum.dim_IntList: "dim",
    aten.mean.dim: "dim",
    aten.amax.default: "dim",
    aten.amin.default: "dim",
    aten.max.dim: "dim",
    aten.min.dim: "dim",
    aten.var.correction: "dim",
    aten.logsumexp.default: "dim",
    aten.linalg_vector_norm.default: "dim",
    aten.slice.Tensor: "dim",
    aten.select.int: "dim",
    aten.split.Tensor: "dim",
    aten.split_with_sizes.default: "dim",
    aten.unbind.int: "dim",
    aten.squeeze.dim: "dim",
    aten.squeeze.dims: "dim",
    aten.cumsum.default: "dim",
    aten.flip.default: "dims",
}
_VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default}
_LEFT_PRODUCTS = {aten.mm.default: "self", aten.addmm.default: "mat1"}


class Rows(enum.Enum):
    """How the grouped form of a tensor differs from one expert's."""

    ROWS = "rows of all experts"
    VECTOR = "one for each row instead of one for each expert"


def out_of_place(operators: Operators, node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """What computes the result of ``node``, one operator in place, if nothing else sees the tensor that it overwrites.

    As (overload, positional arguments, keyword arguments).
    """
    record = operators.record(node)
    if record is None or len(record.operators) != 1 or record.operators[0].written != ("self",):
        return None
    call = record.operators[0]
    functional, given = _functional(call.overload), given_leaves(node)
    if functional is None or not isinstance(call.arguments["self"], Given) or record.result != (Made(0),):
        return None
    written, value = given[call.arguments["self"].position][0], value_of(node)
    storage = storage_of(value) if isinstance(value, torch.Tensor) else None
    if set(written.users) != {node} or operators.numbering.effects[node].writes != {storage}:
        return None
    for other in node.graph.nodes:
        if other is node:
            break
        if other is not written and storage in storages_of(value_of(other)):
            return None
    arguments: dict[str, Any] = {}
    for name, argument in call.arguments.items():
        if isinstance(argument, Given):
            argument = given[argument.position][0]
        elif not isinstance(argument, int | float | bool | str | type(None)):
            return None
        arguments[name] = argument
    keywords = {each.name for each in functional._schema.arguments if each.kwarg_only}
    positional = tuple(argument for name, argument in arguments.items() if name not in keywords)
    return functional, positional, {name: arguments[name] for name in keywords & arguments.keys()}


def _functional(overload: Any) -> Any | None:
    """``add.Tensor`` of ``add_.Tensor``."""
    packet = getattr(aten, overload._schema.name.removeprefix("aten::")[:-1], None)
    found = getattr(packet, overload._overloadname, None) if packet is not None else None
    if found is None or found._schema.is_mutable or not overload._schema.name.endswith("_"):
        return None
    names = [[argument.name for argument in each._schema.arguments] for each in (overload, found)]
    return found if names[0] == names[1] else None


def mixes_rows(
    operators: Operators, module: fx.GraphModule, node: fx.Node, kind: Callable[[fx.Node], Rows | None], rows: Any
) -> str | None:
    """None if ``node`` is proved row-wise, else why not.

    Args:
        kind: how each operand differs in the grouped form.
        rows: the number of rows, as a sympy expression.
    """
    if node.target is operator.getitem and isinstance(value_of(node.args[0]), tuple | list):  # type: ignore[arg-type]
        return None  # an item of what was judged
    record = operators.analysis.parts_of(module, node)
    if record is None:
        return "it cannot be run on fake tensors"
    given = given_leaves(node)
    metas = [meta_of(list(leaves(value_of(operand)))[leaf]) for operand, leaf in given]
    kinds = {Given(i): found for i, (operand, _) in enumerate(given) if (found := kind(operand)) is not None}
    judge = _Judge(record, metas, kinds, rows)
    for step, call in enumerate(record.operators):
        if (problem := judge.problem(step, call)) is not None:
            return problem
    tensors = [each for each in record.result if isinstance(each, Given | Made | Unknown)]
    if not all(judge.is_row(each) for each in tensors if judge.is_tensor(each)):
        return "its result does not have the rows in its first dimension"
    return None


class _Judge:
    """Follows the row tensors through the operators of one call."""

    def __init__(self, record: CallRecord, metas: list[Meta], kinds: dict[Any, Rows], rows: Any) -> None:
        self.record = record
        self.metas = metas
        self.kinds = kinds
        self.rows = rows

    def is_row(self, reference: Any) -> bool:
        return self.kinds.get(reference) is Rows.ROWS

    def is_tensor(self, reference: Any) -> bool:
        return isinstance(reference, Unknown) or isinstance(self._meta(reference), Meta)

    def _meta(self, reference: Given | Made) -> Any:
        if isinstance(reference, Given):
            return self.metas[reference.position]
        return self.record.operators[reference.step].results[reference.result]

    def problem(self, step: int, call: RecordedOperator) -> str | None:
        references = list(_references(list(call.arguments.values())))
        kinds = {self.kinds[each] for each in references if each in self.kinds}
        results = [Made(step, i) for i, result in enumerate(call.results) if isinstance(result, Meta)]
        if not kinds or _reads_metadata(call.overload):
            return None
        func = (_functional(call.overload) if call.written == ("self",) else None) or call.overload
        if any(isinstance(each, Unknown) for each in references) or (call.written and func is call.overload):
            return f"what {func} reads or writes is not known"
        self.kinds.update(dict.fromkeys(results, Rows.ROWS if Rows.ROWS in kinds else Rows.VECTOR))
        is_pointwise = torch.Tag.pointwise in func.tags or func in _ELEMENTWISE
        if Rows.VECTOR in kinds and not is_pointwise:
            return f"{func} takes an operand of each expert's own"
        if Rows.ROWS not in kinds:
            return None
        given = [each for each in references if self.is_row(each)]
        if not all(self._has_rows(each) for each in (*given, *results)):
            return f"{func} moves or changes the rows"
        if is_pointwise:
            return self._broadcasts(func, references, call.results[0].rank)
        return self._moves(func, call.arguments, given)

    def _has_rows(self, reference: Any) -> bool:
        shape = self._meta(reference).shape
        return bool(shape) and bool(shape[0] == self.rows)

    def _moves(self, func: Any, arguments: Mapping[str, Any], given: list[Any]) -> str | None:
        first = arguments.get("self", arguments.get("input"))
        rank = self._meta(first).rank if isinstance(first, Given | Made) else 0
        if func is aten.cat.default and len(given) == len(arguments["tensors"]):
            return _along(func, arguments["dim"], self._meta(given[0]).rank)
        if len(given) != 1 or (given[0] != first and func not in _LEFT_PRODUCTS):
            return f"{func} is not known to keep rows apart"
        if func in _ALONG:
            return _along(func, arguments[_ALONG[func]], rank)
        if func in _VIEWS:
            return None  # row-major, and as many rows before as after: each row keeps its elements
        if func is aten.unsqueeze.default:
            return None if arguments["dim"] % (rank + 1) > 0 else f"{func} moves the rows"
        if func is aten.permute.default:
            return None if arguments["dims"][0] % rank == 0 else f"{func} moves the rows"
        if func is aten.transpose.int:
            moved = {arguments["dim0"] % rank, arguments["dim1"] % rank}
            return f"{func} moves the rows" if 0 in moved and len(moved) > 1 else None
        if func in _LEFT_PRODUCTS:
            bias = arguments["self"] if func is aten.addmm.default else None
            bias_rows = self._meta(bias).shape[:-1] if isinstance(bias, Given | Made) else ()
            left = given[0] == arguments[_LEFT_PRODUCTS[func]] and all(_is_one(size) for size in bias_rows)
            return None if left else f"{func} is not known to keep rows apart"
        if func is aten.native_layer_norm.default:
            return None if len(arguments["normalized_shape"]) < rank else f"{func} normalises over the rows"
        return f"{func} is not known to keep rows apart"

    def _broadcasts(self, func: Any, references: list[Any], rank: int) -> str | None:
        for reference in references:
            meta, found = self._meta(reference), self.kinds.get(reference)
            if found is Rows.ROWS and meta.rank != rank:
                return f"{func} broadcasts rows against another dimension"
            if found is Rows.VECTOR and rank > 2:
                return f"{func} broadcasts an operand of each expert's own against other dimensions"
            shared = found is None and (meta.rank > rank or (meta.rank == rank and not _is_one(meta.shape[0])))
            if shared:
                return f"{func} combines the rows with a tensor that has another value for each row"
        return None


def _references(value: Any) -> list[Any]:
    if isinstance(value, Given | Made | Unknown):
        return [value]
    if isinstance(value, tuple | list):
        return [each for item in value for each in _references(item)]
    return []


def _along(func: Any, dims: Any, rank: int) -> str | None:
    several = dims if isinstance(dims, tuple | list) else [dims]
    across = not several or any(dim is None or dim % rank == 0 for dim in several)
    return f"{func} acts across the rows" if across else None


def _reads_metadata(func: Any) -> bool:
    return func.namespace == "prim" or func in (aten.sym_size.int, aten.sym_numel.default, aten.sym_stride.int)


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1
