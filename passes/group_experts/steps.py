"""A loop's body as steps over the rows of all experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from glue_compiler.fx.index_operators import CONVERSIONS
from glue_compiler.fx.operators import Operators
from glue_compiler.fx.values import leaves, value_of

aten = torch.ops.aten
Nodes = tuple[fx.Node, ...]
"""One node for each expert, in the order of the experts."""


@dataclass(frozen=True)
class Stacked:
    """``base[e]`` for each expert e."""

    base: fx.Node


@dataclass(frozen=True)
class Separate:
    """A tensor of its own for each expert."""

    nodes: Nodes


PerExpert = Stacked | Separate


@dataclass(frozen=True)
class Row:
    """The result of an earlier step."""

    step: int


@dataclass(frozen=True)
class Vector:
    """A per-expert operand of an elementwise step, repeated for the rows of its expert.

    ``shape``: of one expert's; ``tail``: of a row of the repeated one.
    """

    values: PerExpert
    shape: tuple[int, ...]
    tail: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Step:
    """One call of the body, for the rows of all experts; ``node`` is the first expert's."""

    node: fx.Node
    tail: tuple[Any, ...]
    """Sizes of a row of the result, which is ``[rows, *tail]``; empty for a tuple."""

    @property
    def shared(self) -> tuple[fx.Node, ...]:
        """Operands that are one tensor for all experts and no rows."""
        return ()


@dataclass(frozen=True, eq=False)
class Gather(Step):
    """``source[token]``: a row of ``source`` for each row."""

    source: fx.Node


@dataclass(frozen=True, eq=False)
class AllRows(Step):
    """``source``, of whose rows each expert has a piece, in order."""

    source: fx.Node


@dataclass(frozen=True, eq=False)
class SlotWeight(Step):
    """``source[token, slot]``, one number for each row; with ``by_expert`` ``source[token, expert]``.

    A ``source`` of one dimension has one number for all slots of a token.
    """

    source: fx.Node
    by_expert: bool


@dataclass(frozen=True, eq=False)
class Reshape(Step):
    """The same elements of each row in another shape."""

    row: Row


@dataclass(frozen=True, eq=False)
class Product(Step):
    """``x @ weight[e]``, or ``x @ weight[e].T`` as ``F.linear`` has it, plus a bias."""

    x: Row
    weight: PerExpert
    transposed: bool
    """``weight[e]`` is ``[K, N]``."""
    bias: PerExpert | None


@dataclass(frozen=True, eq=False)
class RowWise(Step):
    """The call as it is, with all rows in place of one expert's; ``op`` and ``target`` are the out-of-place form's."""

    op: str
    target: Any
    args: Any
    kwargs: Any

    @property
    def shared(self) -> tuple[fx.Node, ...]:
        found: list[fx.Node] = []
        fx.map_arg((self.args, self.kwargs), found.append)
        return tuple(found)


def rows_of(step: Step) -> list[Row]:
    """The results of earlier steps that a step takes, as often as it takes them."""
    operands = [getattr(step, name) for name in ("args", "kwargs", "row", "x") if hasattr(step, name)]
    return [item for item in leaves(operands) if isinstance(item, Row)]


def _operands_of(step: Step, operators: Operators, operator: Any) -> tuple[Any, Any] | None:
    """The two operands, if the step is one ``operator``, element by element: ``a + b`` or ``a * b``."""
    if not isinstance(step, RowWise):
        return None
    call = operators.only_call(step.node)
    if call is None or call.operator is not operator or call.arguments.get("alpha", 1) != 1:
        return None
    # Both commute, so it does not matter which operand is which.
    found = [operand for operand in leaves([step.args, step.kwargs]) if isinstance(operand, Row | Vector)]
    return (found[0], found[1]) if len(found) == 2 else None


def fold_biases(steps: list[Step], operators: Operators) -> tuple[Step, ...]:
    """``x @ W[e] + b[e]`` as one product with a bias, where nothing else uses the product.

    The sum is rounded once instead of twice. The product's own step stays as dead code, which is not written.
    """
    uses = [row.step for step in steps for row in rows_of(step)]
    folded = list(steps)
    for i, step in enumerate(steps):
        operands = _operands_of(step, operators, aten.add)
        for rows, vector in (operands, operands[::-1]) if operands is not None else ():
            product = steps[rows.step] if isinstance(rows, Row) else None
            if not isinstance(product, Product) or product.bias is not None or not isinstance(vector, Vector):
                continue
            dtypes = {value_of(node).dtype for node in (product.node, step.node, _first(vector.values))}
            alike = type(vector.values) is type(product.weight)  # stacked with stacked: one operator takes both
            if alike and vector.shape == product.tail and len(dtypes) == 1 and uses.count(rows.step) == 1:
                folded[i] = Product(
                    step.node, step.tail, product.x, product.weight, product.transposed, bias=vector.values
                )
    return tuple(folded)


def weighted_sum(steps: tuple[Step, ...], dtype: torch.dtype, operators: Operators) -> tuple[Row, SlotWeight | None]:
    """(what is summed over a token's slots, weights): a last multiplication by the slots' weights is left to the sum.

    Args:
        dtype: of the sum.
    """
    last = len(steps) - 1
    step = steps[last]
    used = [sum(row.step == i for other in steps for row in rows_of(other)) for i in range(len(steps))]
    if _is_cast(step, dtype, operators) and used[last] == 0:
        last = rows_of(step)[0].step
        step = steps[last]
    factors = _operands_of(step, operators, aten.mul)
    for rows, factor in (factors, factors[::-1]) if factors is not None else ():
        if isinstance(rows, Row) and isinstance(factor, Row) and used[last] <= 1 and used[factor.step] == 1:
            weights = steps[factor.step]
            if isinstance(weights, SlotWeight) and weights.tail == (1,):
                return rows, weights
    return Row(len(steps) - 1), None


def _is_cast(step: Step, dtype: torch.dtype, operators: Operators) -> bool:
    """To ``dtype``, which the sum is rounded to anyway."""
    call = operators.only_call(step.node) if isinstance(step, RowWise) else None
    casts = call is not None and call.operator in CONVERSIONS
    return casts and value_of(step.node).dtype == dtype and len(rows_of(step)) == 1


def _first(values: PerExpert) -> fx.Node:
    return values.base if isinstance(values, Stacked) else values.nodes[0]
