"""A loop's body as steps over the rows of all experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from glue_compiler.fx.spellings import ADD
from glue_compiler.fx.values import value_of

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
    """A per-expert operand of an elementwise step, repeated for the rows of its expert; ``shape``: of one expert's."""

    values: PerExpert
    shape: tuple[int, ...]


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
    """The call as it is, with all rows in place of one expert's; ``target`` is the out-of-place form."""

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
    found: list[Row] = []

    def look(value: Any) -> None:
        if isinstance(value, Row):
            found.append(value)
        elif isinstance(value, tuple | list):
            for item in value:
                look(item)
        elif isinstance(value, dict):
            look(list(value.values()))

    look([getattr(step, name) for name in ("args", "kwargs", "row", "x") if hasattr(step, name)])
    return found


def fold_biases(steps: list[Step]) -> tuple[Step, ...]:
    """``x @ W[e] + b[e]`` as one product with a bias, where nothing else uses the product.

    The sum is rounded once instead of twice. The product's own step stays, for nobody.
    """
    uses = [row.step for step in steps for row in rows_of(step)]
    folded = list(steps)
    for i, step in enumerate(steps):
        if not isinstance(step, RowWise) or step.target not in ADD or len(step.args) != 2 or step.kwargs:
            continue
        for rows, vector in (step.args, step.args[::-1]):
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


def _first(values: PerExpert) -> fx.Node:
    return values.base if isinstance(values, Stacked) else values.nodes[0]
