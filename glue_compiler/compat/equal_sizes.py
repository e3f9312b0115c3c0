"""ShapeEnv: sizes that are proved equal after Dynamo has traced them as different."""

from __future__ import annotations

from typing import Any

import sympy

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
