"""Products of matrices for each row and head, or for both as one dimension, however they are written."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from glue_compiler.fx.operators import Call, Operators, Value

aten = torch.ops.aten


@dataclass(frozen=True)
class Product:
    """``factor * left @ right``, or ``factor * left @ right.transpose(-1, -2)``, and what is ``added`` to that.

    ``unread`` would be added, but for a factor of 0: its gradient is zeros, and not None.
    """

    left: Value
    right: Value
    is_transposed: bool
    factor: float = 1.0
    added: Value | None = None
    unread: Value | None = None


def product_of(call: Call | None, operators: Operators) -> Product | None:
    match call:
        case Call(aten.matmul, {"self": Value() as left, "other": Value() as right}):
            # Of tensors of several ranks, one is repeated for the other's rows.
            is_one_rank = operators.rank(left) == operators.rank(right)
            return Product(left, right, False) if is_one_rank else None
        case Call(
            aten.baddbmm,
            {
                "self": Value() as added,
                "batch1": Value() as left,
                "batch2": Value() as right,
                "beta": 0 | 1 as beta,
                "alpha": int() | float() as factor,
            },
        ):
            # By a beta of 0 what is added is not read: NaN in it are no NaN of the result.
            return Product(left, right, False, factor, added if beta else None, None if beta else added)
        case Call(aten.einsum, {"equation": str() as equation, "tensors": [Value() as first, Value() as second]}):
            names, result = _named(equation.replace(" ", ""), operators.rank(first), operators.rank(second))
            for (left, of_left), (right, of_right) in (
                ((first, names[0]), (second, names[-1])),
                ((second, names[-1]), (first, names[0])),
            ):
                is_transposed = _is_transposed(of_left, of_right, result)
                if is_transposed is not None:
                    return Product(left, right, is_transposed)
    return None


def _named(equation: str, *ranks: int) -> tuple[list[str], str]:
    """The dimensions of the factors and of the result, with names in the place of an ellipsis."""
    factors, _, result = equation.partition("->")
    missing = {rank - len(each) + 3 for each, rank in zip(factors.split(","), ranks, strict=False) if "..." in each}
    others = [name for name in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if name not in equation]
    names = "".join(others[: missing.pop()]) if len(missing) == 1 else "..."
    return [each.replace("...", names) for each in factors.split(",")], result.replace("...", names)


def _is_transposed(left: str, right: str, result: str) -> bool | None:
    """Of ``bhij,bhjk->bhik`` False, of ``bhij,bhkj->bhik`` True; None for what is no such product."""
    names, rank = "".join(dict.fromkeys(left + right)), len(result)
    if not (names.isalpha() and rank in (3, 4) and len(names) == rank + 1 and len(left) == len(right) == rank):
        return None
    batch, rows, inner, columns = left[:-2], left[-2], left[-1], result[-1]
    if result != batch + rows + columns or len({*batch, rows, inner, columns}) != rank + 1:
        return None
    return {batch + inner + columns: False, batch + columns + inner: True}.get(right)
