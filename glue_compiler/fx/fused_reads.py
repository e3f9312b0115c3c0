"""What is read from memory where a compiler fuses, and computes a cheap value again in each kernel that reads it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import fx

MOST_READS = 4
"""A value of several readers that is computed from more tensors is written to memory, as Inductor's
``realize_reads_threshold`` has it."""
MOST_SUMMED_READS = 8
"""The same for a value of a single reader (``realize_acc_reads_threshold``): a long sum is computed in pieces."""

Key = TypeVar("Key", bound=Hashable)


def is_pointwise(node: fx.Node) -> bool:
    """Does each element depend on one element of each operand alone?"""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags


def fused_reads(
    order: Sequence[Key], operands: Callable[[Key], Collection[Key]], may_inline: Callable[[Key], bool]
) -> tuple[list[frozenset[Key]], set[Key]]:
    """For each of ``order``, the memories that it is computed from; and the values that are in no memory.

    Args:
        order: what is computed, operands first. Views are none of it.
        operands: the memories that a value is computed from, as the graph says it.
        may_inline: is a value pointwise, and needed by nothing but what a compiler fuses it with?
    """
    readers = Counter(read for key in order for read in operands(key))
    found: list[frozenset[Key]] = []
    computed_from: dict[Key, frozenset[Key]] = {}
    for key in order:
        reads = frozenset(source for read in operands(key) for source in computed_from.get(read, (read,)))
        found.append(reads)
        if may_inline(key) and len(reads) <= (MOST_READS if readers[key] > 1 else MOST_SUMMED_READS):
            computed_from[key] = reads
    return found, set(computed_from)


@dataclass(frozen=True)
class FusedLives(Generic[Key]):
    """When the memories of what is computed in some order are written and read.

    Attributes:
        first: the place where each is written; no later than where it stands. last: where it is read last.
        inlined: the values that are in no memory.
    """

    first: Mapping[Key, int]
    last: Mapping[Key, int]
    inlined: set[Key]


def fused_lives(
    places: Mapping[Key, int],
    operands: Callable[[Key], Collection[Key]],
    may_inline: Callable[[Key], bool],
    size_written: Callable[[Key], int],
) -> FusedLives[Key]:
    """What reads a tensor in one kernel with an earlier value is written with it: of a gated product both gradients. So
    is what reads the earlier value itself, such as a gradient times an adapter's scale.

    Args:
        places: of what is computed, in order. operands, may_inline: as for :func:`fused_reads`.
        size_written: of a pointwise value that is written to memory, its bytes, else 0.
    """
    reads, inlined = fused_reads(list(places), operands, may_inline)
    last = {read: place for place, each in zip(places.values(), reads, strict=True) for read in each}
    first: dict[Key, int] = {}
    readers: dict[Key, list[Key]] = {}
    for (key, place), each in zip(places.items(), reads, strict=True):
        first[key] = place
        if not (size := size_written(key)) or key in inlined:
            continue
        ready = max((first[read] for read in each if read in first), default=-1)
        fusible = (other for read in each for other in (read, *readers.get(read, ())) if other in first)
        beside = (first[other] for other in fusible if size_written(other) == size)
        first[key] = min((at for at in beside if ready <= at), default=place)
        for read in each:
            readers.setdefault(read, []).append(key)
    return FusedLives(first, last, inlined)
