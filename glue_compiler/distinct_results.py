"""Results that eager mode returns in memory of their own, and that a compiler returns as one tensor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from glue_compiler.compat import storages
from glue_compiler.fx.values import expression, is_plain, storage_of, value_of

Positions = tuple[tuple[int, ...], ...]


def may_be_merged(gm: fx.GraphModule) -> Positions:
    """Positions in what ``gm`` returns of tensors that look alike and share their memory with nothing else there, nor
    with what ``gm`` is given.

    A rewrite, or the compiler below, may find that two of them are equal: AOTAutograd makes one of two equal operators
    that give a tuple, Inductor one of two clones of a value that is not returned, though both are results.
    """
    returned: Any = gm.graph.output_node().args[0]
    results = list(enumerate(map(_tensor_of, returned if isinstance(returned, tuple | list) else ())))
    users: defaultdict[int, set[Any]] = defaultdict(set)
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr") and (given := _tensor_of(node)) is not None:
            users[storage_of(given)].add(node)
    for position, tensor in results:
        if tensor is not None:
            users[storage_of(tensor)].add(position)
    alike: defaultdict[Hashable, list[int]] = defaultdict(list)
    for position, tensor in results:
        if tensor is not None and len(users[storage_of(tensor)]) == 1:
            layout = tuple(tuple(map(expression, numbers)) for numbers in (tensor.shape, tensor.stride()))
            alike[tensor.dtype, tensor.device, layout].append(position)
    return tuple(tuple(positions) for positions in alike.values() if len(positions) > 1)


def keep_apart(call: Callable[..., Any], positions: Positions) -> Callable[..., Any]:
    """``call`` with copies in place of results at ``positions`` that lie in the memory of an earlier one; itself if
    there are no such positions.

    Otherwise, who writes to one result would write to the other.
    """
    if not positions:
        return call

    def run(*inputs: Any) -> Any:
        results = call(*inputs)
        copies: dict[int, Tensor] = {}
        for group in positions:
            seen: set[int] = set()
            for position in group:
                result = results[position]
                if not isinstance(result, Tensor) or not is_plain(result):
                    continue
                memory = storages.identity(result)
                if memory in seen and result.numel():
                    with torch.set_grad_enabled(torch.is_grad_enabled() or result.requires_grad):
                        copies[position] = result.clone()
                seen.add(memory)
        return type(results)(_replaced(results, copies)) if copies else results

    return run


def _replaced(results: Sequence[Any], copies: dict[int, Tensor]) -> list[Any]:
    return [copies.get(position, result) for position, result in enumerate(results)]


def _tensor_of(node: Any) -> Tensor | None:
    value = value_of(node) if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) and is_plain(value) else None
