"""The fake values that Dynamo recorded on nodes: tensors, symbols, storages, sizes in bytes, source lines."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

from glue_compiler.compat import storages, symbols

Symbolic = (torch.SymInt, torch.SymFloat, torch.SymBool)
StorageKey = int


def value_of(node: fx.Node) -> Any:
    """What the node evaluates to, as fake tensors, symbols and Python values; None if Dynamo recorded nothing."""
    meta = node.meta
    return meta["example_value"] if "example_value" in meta else meta.get("val")


def value_in(argument: Any) -> Any:
    """What a call finds in an argument: the value of a node, or what is none."""
    return value_of(argument) if isinstance(argument, fx.Node) else argument


def values_of(nodes: Iterable[fx.Node]) -> list[Any]:
    return [value_of(node) for node in nodes]


def makes_tensor(node: fx.Node) -> bool:
    return isinstance(value_of(node), torch.Tensor)


def is_call(node: fx.Node) -> bool:
    """Does it call something, and is no input, attribute or output?"""
    return node.op.startswith("call_")


def inputs_of(graph: fx.Graph) -> list[fx.Node]:
    return graph.find_nodes(op="placeholder")


def has_value(node: fx.Node) -> bool:
    return "example_value" in node.meta or "val" in node.meta


def leaves(value: Any) -> Iterator[Any]:
    """The leaves of nested tuples, lists, dicts and slices."""
    found: list[Any] = []
    _collect(value, found)
    return iter(found)


def _collect(value: Any, found: list[Any]) -> None:
    # Asked for millions of times in a compile: a list takes a third of the time of nested generators.
    if isinstance(value, (tuple, list)):
        for item in value:
            _collect(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, found)
    elif isinstance(value, slice):
        _collect((value.start, value.stop, value.step), found)
    else:
        found.append(value)


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


def is_plain(tensor: torch.Tensor) -> bool:
    """A dense tensor whose storage tells what it aliases: no wrapper subclass, and none inside of vmap or grad."""
    known = type(tensor) in (torch.Tensor, torch.nn.Parameter, symbols.fake_tensor_type())
    return known and tensor.layout is torch.strided and not symbols.is_functorch_wrapped(tensor)


def storage_of(tensor: torch.Tensor) -> StorageKey:
    """Equal for two tensors of one graph exactly when they are views of the same memory."""
    return storages.identity(tensor)


def storages_of(value: Any) -> set[StorageKey]:
    return {storage_of(tensor) for tensor in tensors_in(value) if is_plain(tensor)}


def requires_grad(value: Any) -> bool:
    return any(tensor.requires_grad for tensor in tensors_in(value))


def is_item(node: fx.Node) -> bool:
    """Is it taken out of a tuple or list?"""
    return node.target is operator.getitem and isinstance(value_of(node.args[0]), tuple | list)  # type: ignore[arg-type]


def producer_of(node: fx.Node) -> fx.Node:
    """The operator behind an item of a tuple."""
    while is_item(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def own_storages(node: fx.Node) -> set[StorageKey]:
    """Memory that a node allocates; an item of a tuple counts as the operator that made the tuple."""
    return storages_of(value_of(node)) - storages_of(values_of(producer_of(node).all_input_nodes))


def expression(value: Any) -> Any:
    """A symbolic value as its sympy expression, anything else as it is. Adds no guard."""
    return value.node.expr if isinstance(value, Symbolic) else value


def expressions(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(map(expression, values))


def expressions_of(value: Any) -> Iterator[Any]:
    """Every number in a value's metadata: sizes, strides and offsets of tensors, and symbols."""
    for leaf in leaves(value):
        if isinstance(leaf, torch.Tensor):
            if symbols.is_functorch_wrapped(leaf):
                continue
            yield from map(expression, leaf.shape)
            if leaf.layout is torch.strided:
                yield from map(expression, leaf.stride())
                yield expression(leaf.storage_offset())  # 2.11: a slice of unknown length has an unknown offset
        elif isinstance(leaf, Symbolic):
            yield expression(leaf)


def unbacked_in(value: Any) -> list[Any]:
    """The unbacked symbols of a value, each once, in order of appearance."""
    named = [
        leaf
        for leaf in leaves(value)
        if (symbols.has_symbols(leaf) if isinstance(leaf, torch.Tensor) else isinstance(leaf, Symbolic))
    ]
    found: dict[Any, None] = {}
    for number in expressions_of(named):
        if not isinstance(number, int | float | bool):
            found.update(dict.fromkeys(sorted(symbols.unbacked_symbols(number), key=str)))
    return list(found)


def most_bytes(of: Any, shape_env: Any) -> int | None:
    """An upper bound of the bytes of a tensor, which may be given as its metadata; None when there is no bound.

    From hints and value ranges.
    """
    total: int = of.dtype.itemsize
    for size in of.shape:
        bound = size if isinstance(size, int) else symbols.upper_bound(expression(size), shape_env)
        if bound is None:
            return None
        total *= bound
    return total


def keeps_layout(tensor: torch.Tensor) -> bool:
    """Does a copy made by ``torch.empty_like`` have the same strides? Not so for a slice or an expanded tensor."""
    copy = torch.empty_like(tensor, device="meta")
    return expressions(tensor.stride()) == expressions(copy.stride())


def is_in_order(tensor: torch.Tensor) -> bool:
    """Is it contiguous, as far as its record says? Adds no guard."""
    copy = torch.empty_like(tensor, device="meta", memory_format=torch.contiguous_format)
    strides = zip(tensor.shape, tensor.stride(), copy.stride(), strict=True)
    return all(expression(size) == 1 or expression(own) == expression(other) for size, own, other in strides)


def source_line(node: fx.Node) -> str:
    """The user's line that a node comes from: ``model.py:12 in forward``, or ``""``."""
    trace = node.meta.get("stack_trace") or ""
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', trace)
    if not frames:
        return ""
    path, line, function = frames[-1]
    return f"{path}:{line} in {function}"
