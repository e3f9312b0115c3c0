"""What is written at indices, of sizes that depend on data: which of them are taken to be the sizes of that place.

Eager takes a size of 1 for any. Autograd then sums the gradient, where it sees that the size is 1: of a size that is
known when the code runs it does not, and no assertion of Dynamo's says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from glue_compiler.compat import symbols
from glue_compiler.compat.size_assertions import known_count
from glue_compiler.errors import GlueSizeError
from glue_compiler.fx import bodies
from glue_compiler.fx.effects import EffectAnalysis
from glue_compiler.fx.records import CallRecord, Given, Meta
from glue_compiler.fx.values import is_call, tensors_in, unbacked_in, values_of

aten = torch.ops.aten
ASSUMES_ROWS = "glue_assumes_rows"
"""Key in ``node.meta`` of a node that a pass may make one of known sizes; see :func:`check_rows`."""
_WRITES = {aten.index_put, aten.index_put_, aten._unsafe_index_put, aten._index_put_impl_}


def may_write_at_indices(node: fx.Node) -> bool:
    """Is it worth a look: does it take a place, something to index with, and a size that depends on data?"""
    if not is_call(node):
        return False
    given: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), given.append)  # one node may be several of these
    tensors = tensors_in(values_of(given))
    may_index = any(t.dim() and not t.is_floating_point() for t in tensors)
    return len(tensors) > 1 and may_index and bool(unbacked_in(tensors))


def check_rows(gm: fx.GraphModule) -> None:
    """Raises GlueSizeError if a marked node of ``gm`` still takes for granted what no pass has proved."""
    nodes = [(m, n) for m in bodies.graph_modules(gm) for n in m.graph.nodes if ASSUMES_ROWS in n.meta]
    if not nodes:
        return
    effects = EffectAnalysis.for_graph(gm)
    for module, node in nodes:
        for assumption in assumed_of(node, effects.record_of(module, node)):
            raise GlueSizeError(f"eager does not ask for {assumption} at '{node.name}'")


def assumed_of(node: fx.Node, record: CallRecord | None) -> Iterator[Any]:
    """Equations that ``node``, of which ``record`` says what it does, takes for granted."""
    if record is None:
        return
    given = tensors_in(values_of(node.all_input_nodes))
    for operator in record.operators:
        if operator.overload.overloadpacket not in _WRITES:
            continue
        value, into = (record.meta_at(operator.arguments[name], given) for name in ("values", "self"))
        if not isinstance(value, Meta) or not isinstance(into, Meta):
            continue
        place = _place(into, operator.arguments["indices"], record, given)
        for size, there in zip(reversed(value.shape), reversed(place), strict=False):
            if size != there and symbols.unbacked_symbols(size):
                yield sympy.Eq(size, there)


def _place(into: Meta, indices: Sequence[Any], record: CallRecord, given: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """The shape of what is written (NumPy's rules of advanced indexing)."""
    left = list(into.shape)
    kept: list[Any] = []
    indexed: list[tuple[Any, ...]] = []
    at: list[int] = []
    for index in indices:
        meta = record.meta_at(index, given)
        if meta is None and index is None:
            kept.append(left.pop(0))
            continue
        at.append(len(kept))
        if not isinstance(meta, Meta):
            indexed.append((sympy.Symbol("unknown"),))
            left.pop(0)
        elif meta.dtype in (torch.bool, torch.uint8):
            indexed.append((_count(index, given),))
            del left[: meta.rank]
        else:
            indexed.append(meta.shape)
            left.pop(0)
    rank = max(map(len, indexed), default=0)
    padded = [(1,) * (rank - len(shape)) + tuple(shape) for shape in indexed]
    taken = [next((size for size in sizes if size != 1), 1) for sizes in zip(*padded, strict=True)]
    # Indices that others stand between move to the front.
    first = at[0] if at and at[-1] == at[0] else 0
    return (*kept[:first], *taken, *kept[first:], *left)


def _count(index: Any, given: Sequence[torch.Tensor]) -> Any:
    """How many elements of a mask are set, if that is known by the name of a symbol."""
    found = known_count(given[index.position]) if isinstance(index, Given) else None
    return found if found is not None else sympy.Symbol("unknown")
