"""Is a call row-wise: does row ``i`` of its results depend on row ``i`` of its row operands, and on no other row?

Each operator that the call is made of, below autograd, is judged by what it does to dimension 0, the rows.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from glue_compiler.fx.normal import Arguments, functional, normal
from glue_compiler.fx.operators import Operators, given_leaves
from glue_compiler.fx.records import CallRecord, Given, Made, Meta, RecordedOperator, Unknown, meta_of
from glue_compiler.fx.values import is_item, leaves, storage_of, storages_of, value_of

aten = torch.ops.aten

# Not tagged as pointwise, though they are: each element by itself.
_ELEMENTWISE = {
    aten._to_copy,
    aten.clone,
    aten.hardswish,
    aten.leaky_relu,  # untagged in 2.11
    aten.log_sigmoid_forward,
    aten.detach,
    aten.alias,
    aten.lift_fresh,
}
# They act along the dimensions that an argument says; where none does, along all.
_ALONG = {
    aten.softmax,
    aten.log_softmax,
    aten.glu,
    aten.sum,
    aten.mean,
    aten.amax,
    aten.amin,
    aten.max,
    aten.min,
    aten.var,
    aten.logsumexp,
    aten.linalg_vector_norm,
    aten.slice,
    aten.select,
    aten.split,
    aten.split_with_sizes,
    aten.unbind,
    aten.squeeze,
    aten.cumsum,
    aten.flip,
}


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
    target, given = functional(call.overload), given_leaves(node)
    if target is None or not isinstance(call.arguments["self"], Given) or record.result != (Made(0),):
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
    keywords = {each.name for each in target._schema.arguments if each.kwarg_only}
    positional = tuple(argument for name, argument in arguments.items() if name not in keywords)
    return target, positional, {name: arguments[name] for name in keywords & arguments.keys()}


def mixes_rows(
    operators: Operators, module: fx.GraphModule, node: fx.Node, kind: Callable[[fx.Node], Rows | None], rows: Any
) -> str | None:
    """None if ``node`` is proved row-wise, else why not.

    Args:
        kind: how each operand differs in the grouped form.
        rows: the number of rows, as a sympy expression.
    """
    if is_item(node):
        return None  # an item of what was judged
    record = operators.analysis.record_of(module, node, below=True)
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


@dataclass
class _Judge:
    """Follows the row tensors through the operators of one call."""

    record: CallRecord
    metas: list[Meta]
    kinds: dict[Any, Rows]
    rows: Any

    def is_row(self, reference: Any) -> bool:
        return self.kinds.get(reference) is Rows.ROWS

    def is_tensor(self, reference: Any) -> bool:
        return isinstance(reference, Unknown) or isinstance(self._meta(reference), Meta)

    def _meta(self, reference: Given | Made) -> Any:
        if isinstance(reference, Given):
            return self.metas[reference.position]
        return self.record.operators[reference.step].results[reference.result]

    def problem(self, step: int, call: RecordedOperator) -> str | None:
        references = [each for each in leaves(dict(call.arguments)) if isinstance(each, Given | Made | Unknown)]
        kinds = {self.kinds[each] for each in references if each in self.kinds}
        results = [Made(step, i) for i, result in enumerate(call.results) if isinstance(result, Meta)]
        if not kinds or _reads_metadata(call.overload):
            return None
        is_followed = not call.written or (call.written == ("self",) and functional(call.overload) is not None)
        if not is_followed or any(isinstance(each, Unknown) for each in references):
            return f"what {call.overload} reads or writes is not known"
        func, arguments = normal(call.overload, call.arguments, call.results[0])
        self.kinds.update(dict.fromkeys(results, Rows.ROWS if Rows.ROWS in kinds else Rows.VECTOR))
        is_pointwise = torch.Tag.pointwise in func.tags or func.overloadpacket in _ELEMENTWISE
        if Rows.VECTOR in kinds and not is_pointwise:
            return f"{func} takes an operand of each expert's own"
        if Rows.ROWS not in kinds:
            return None
        given = [each for each in references if self.is_row(each)]
        if not all(self._has_rows(each) for each in (*given, *results)):
            return f"{func} moves or changes the rows"
        rank = call.results[0].rank
        if is_pointwise:
            return self._broadcasts(func, references, rank)
        if self._keeps_rows(func, arguments, given, rank):
            return None
        why = "acts across the rows" if func.overloadpacket in _ALONG else "is not known to keep rows apart"
        return f"{func} {why}"

    def _has_rows(self, reference: Any) -> bool:
        shape = self._meta(reference).shape
        return bool(shape) and bool(shape[0] == self.rows)

    def _keeps_rows(self, func: Any, given: Arguments, rows: list[Any], made: int) -> bool:
        """Of an operator on ``rows``. ``made``: the rank of the result."""
        if func is aten.cat.default:
            rank = self._meta(rows[0]).rank
            return len(rows) == len(given["tensors"]) and given["dim"] % rank > 0
        if len(rows) != 1:
            return False
        rank = self._meta(rows[0]).rank
        if func is aten.addmm.default:
            sizes = self._meta(given["self"]).shape[:-1]
            return bool(rows[0] == given["mat1"]) and all(_is_one(size) for size in sizes)
        if rows[0] != given.get("self", given.get("input")):
            return False
        if func.overloadpacket in _ALONG:
            dims = list(leaves([given.get("dim", given.get("dims"))]))
            return bool(dims) and all(dim is not None and dim % rank > 0 for dim in dims)
        match func:
            case aten.expand.default:  # to more dimensions, the rows may be the last one, repeated as often
                return made == rank
            case aten.view.default:
                return True  # row-major, and as many rows before as after: each row keeps its elements
            case aten.unsqueeze.default:
                return bool(given["dim"] % (rank + 1) > 0)
            case aten.permute.default:
                return bool(given["dims"][0] % rank == 0)
            case aten.matmul.default:
                return rank == 2
            case aten.native_layer_norm.default:
                return len(given["normalized_shape"]) < rank
        return False

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


def _reads_metadata(func: Any) -> bool:
    return func.namespace == "prim" or func in (aten.sym_size.int, aten.sym_numel.default, aten.sym_stride.int)


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1
