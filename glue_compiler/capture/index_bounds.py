"""An index that data decides is asserted to lie in its dimension, as eager does.

Dynamo asks for no such thing of ``x[u0]``, and a compiled kernel reads what lies there.
"""

from __future__ import annotations

import sympy
import torch
from torch import fx

from glue_compiler.compat.symbols import unbacked_symbols
from glue_compiler.fx.bodies import is_higher_order
from glue_compiler.fx.records import CallRecord, Meta
from glue_compiler.fx.values import expression, is_call, tensors_in, unbacked_in, values_of


def may_select(node: fx.Node) -> bool:
    """Is it worth a look: a call with a number that data decides, and a tensor? Of bodies each node is looked at."""
    values = values_of(node.all_input_nodes) if is_call(node) and not is_higher_order(node) else []
    numbers = [value for value in values if isinstance(value, torch.SymInt)]
    return bool(unbacked_in(numbers)) and bool(tensors_in(values))


def assert_indices(node: fx.Node, record: CallRecord | None) -> str | None:
    """Has assertions put in front of ``node``, of which ``record`` says what it does; or says why none can be."""
    if record is None:
        return f"it is not known what '{node.name}' selects"
    values = values_of(node.all_input_nodes)
    given = tensors_in(values)
    symbolic = (*values, *(size for tensor in given for size in tensor.shape))
    numbers = {expression(value): value for value in symbolic if isinstance(value, torch.SymInt)}
    for operator in record.operators:
        if operator.overload.overloadpacket is not torch.ops.aten.select:
            continue
        index, of = operator.arguments["index"], record.meta_at(operator.arguments["self"], given)
        if not isinstance(index, sympy.Basic) or not unbacked_symbols(index):
            continue
        size = of.shape[operator.arguments["dim"]] if isinstance(of, Meta) else None
        number, size = numbers.get(index), numbers.get(size, size)
        if number is None or not isinstance(size, int | torch.SymInt):
            return f"what '{node.name}' selects is not asserted to be there"
        torch._check(number >= -size)
        torch._check(number < size)
    return None
