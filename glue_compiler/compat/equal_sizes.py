"""ShapeEnv: sizes that are proved equal after Dynamo has traced them as different."""

from __future__ import annotations

from typing import Any

import sympy
import torch

from glue_compiler.compat.symbols import is_unbacked, replacements_changed


def assume_equal(shape_env: Any, first: Any, second: Any) -> None:
    """Make two sizes read as one expression from now on, by replacing an unbacked symbol that one of them adds.

    Does nothing when no symbol can be replaced: then metadata keeps both expressions. Not
    ``ShapeEnv._set_replacement``, which refuses an expression whose range is wider than the symbol's.

    Args:
        first, second: sympy expressions or ints that are equal in every run.
    """
    difference = shape_env.replace(sympy.sympify(first - second))
    for symbol in sorted(difference.free_symbols, key=str, reverse=True):
        if is_unbacked(symbol) and abs(difference.coeff(symbol)) == 1:
            other = symbol - difference if difference.coeff(symbol) == 1 else symbol + difference
            shape_env.replacements[symbol] = other
            replacements_changed(shape_env)
            return


def equal_by_guard(first: Any, second: Any) -> bool:
    """Are two sizes equal when the graph is captured? Then Dynamo compiles it for equal ones only (a guard).

    Only for sizes of inputs: a guard on a symbol that Dynamo has no source for would make it fail.

    Args:
        first, second: SymInts, or ints, which are compared without a guard.
    """
    if isinstance(first, int) and isinstance(second, int):
        return first == second
    symbolic = first if isinstance(first, torch.SymInt) else second
    if not isinstance(symbolic, torch.SymInt):
        return False
    shape_env = symbolic.node.shape_env
    both = (first, second)
    expressions = [size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size) for size in both]
    if any(is_unbacked(each) for each in expressions):
        return False
    symbols = set().union(*(each.free_symbols for each in expressions))
    if not all(shape_env.var_to_sources.get(symbol) for symbol in symbols):
        return False
    hints = [size.node.hint if isinstance(size, torch.SymInt) else size for size in both]
    return hints[0] == hints[1] and bool(first == second)
