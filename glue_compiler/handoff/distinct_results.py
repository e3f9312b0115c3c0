"""Results that eager mode returns in memory of their own, and that a compiler returns as one tensor."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from glue_compiler.compat import storages
from glue_compiler.fx.values import expression, is_plain, storage_of, value_of

Groups = tuple[tuple[int, ...], ...]


def results_apart(gm: fx.GraphModule) -> Groups:
    """Positions in what ``gm`` returns, those together whose tensors share memory, and nothing with what ``gm`` is
    given; none that no other could be equal to.

    A rewrite, or the compiler below, may find that two of them are equal: AOTAutograd makes one of two equal operators
    that give a tuple, Inductor one of two clones of a value, though both are results.
    """
    returned: Any = gm.graph.output_node().args[0]
    groups: defaultdict[int, list[int]] = defaultdict(list)
    kinds: dict[int, Hashable] = {}
    for position, node in enumerate(returned if isinstance(returned, tuple | list) else ()):
        tensor = _tensor_of(node)
        if tensor is not None:
            memory = storage_of(tensor)
            groups[memory].append(position)
            kinds.setdefault(memory, (tensor.device, expression(tensor.untyped_storage().nbytes())))
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr") and (given := _tensor_of(node)) is not None:
            groups.pop(storage_of(given), None)
    alike = Counter(kinds[memory] for memory in groups)
    return tuple(tuple(positions) for memory, positions in groups.items() if alike[kinds[memory]] > 1)


def keep_apart(call: Callable[..., Any], groups: Groups, ignored: Collection[int] = ()) -> Callable[..., Any]:
    """``call`` with copies in place of results that lie in the memory of those of an earlier group; itself if there are
    no two groups. Otherwise, who writes to one result would write to the other.

    Results of one group that have gradients stay where they are: copies would not share theirs.

    Args:
        ignored: positions at which ``call`` returns something else.
    """
    kept = [tuple(position for position in group if position not in ignored) for group in groups]
    kept = [group for group in kept if group]
    if len(kept) < 2:
        return call
    first = [group[0] for group in kept]

    def run(*inputs: Any) -> Any:
        results = call(*inputs)
        try:
            memory = [storages.identity(results[position]) for position in first]
        except (AttributeError, NotImplementedError, RuntimeError):  # inside of vmap a tensor has no memory
            return results
        if len(set(memory)) == len(memory):
            return results
        return type(results)(_apart(list(results), kept, memory))

    return run


def _apart(results: list[Any], groups: Sequence[tuple[int, ...]], memory: Sequence[int]) -> list[Any]:
    seen: set[int] = set()
    for group, place in zip(groups, memory, strict=True):
        tensors = [results[position] for position in group]
        if place in seen and tensors[0].numel():
            copies = [_copied(tensors[0])] if len(tensors) == 1 else _moved(tensors)
            for position, copy in zip(group, copies, strict=True):
                results[position] = copy
        seen.add(place)
    return results


def _copied(tensor: Tensor) -> Tensor:
    """In the same strides, with the same gradient."""
    with torch.set_grad_enabled(torch.is_grad_enabled() or tensor.requires_grad):
        source = tensor
        for dim, stride in enumerate(tensor.stride()):
            source = source if stride else source.narrow(dim, 0, 1)
        copy = torch.empty_strided(source.shape, source.stride(), dtype=tensor.dtype, device=tensor.device)
        return copy.copy_(source).expand(tensor.shape)


def _moved(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Views of one piece of memory, as views of a copy of it."""
    if any(tensor.requires_grad for tensor in tensors):
        return tensors
    memory = tensors[0].untyped_storage().clone()
    moved = []
    for tensor in tensors:
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        moved.append(empty.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride()))
    return moved


def _tensor_of(node: Any) -> Tensor | None:
    value = value_of(node) if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) and is_plain(value) else None
