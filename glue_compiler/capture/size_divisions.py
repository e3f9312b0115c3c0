"""Variances over a size that data decides: torch's formula of their gradient divides by it as by a Python number.

Where the size is 0, or the correction, eager gives NaN, and a graph would raise ZeroDivisionError.
"""

from __future__ import annotations

import torch
from torch import fx

from glue_compiler.compat.symbols import unbacked_symbols
from glue_compiler.fx.bodies import is_higher_order
from glue_compiler.fx.records import CallRecord, Meta
from glue_compiler.fx.values import is_call, requires_grad, tensors_in, unbacked_in, value_of, values_of

aten = torch.ops.aten
_VARIANCES = {aten.var, aten.var_mean, aten.std, aten.std_mean}


def may_divide(node: fx.Node) -> bool:
    """Is it worth a look: a call with a gradient, that reduces a size that data decides?"""
    if not is_call(node) or is_higher_order(node) or not requires_grad(value_of(node)):
        return False
    given = unbacked_in(values_of(node.all_input_nodes))
    return not set(given) <= set(unbacked_in(value_of(node)))


def divided_by_size(node: fx.Node, record: CallRecord | None) -> str | None:
    """Why the gradient of ``node``, of which ``record`` says what it does, may be an error; None if it is none."""
    if record is None:
        return None
    given = tensors_in(values_of(node.all_input_nodes))
    for operator in record.operators:
        if operator.overload.overloadpacket in _VARIANCES:
            of = record.meta_at(operator.arguments["self"], given)
            dims = operator.arguments.get("dim")
            sizes = of.shape if isinstance(of, Meta) else ()
            if any(unbacked_symbols(sizes[dim]) for dim in dims or range(len(sizes))):
                return f"the gradient of '{node.name}' is divided by a size that depends on data"
    return None
