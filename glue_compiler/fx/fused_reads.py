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
FARTHEST = 64
"""The largest distance of two values that are fused, in buffers (``Scheduler.are_long_distant_nodes``)."""

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
        reads: the memories that each is computed from.
        first: the place where each is written; no later than where it stands. last: where it is read last.
        inlined: the values that are in no memory.
    """

    reads: Mapping[Key, frozenset[Key]]
    first: Mapping[Key, int]
    last: Mapping[Key, int]
    inlined: set[Key]


def fused_lives(
    places: Mapping[Key, int],
    operands: Callable[[Key], Collection[Key]],
    may_inline: Callable[[Key], bool],
    is_written: Callable[[Key], bool],
    size: Callable[[Key], int],
) -> FusedLives[Key]:
    """What reads a tensor in one kernel with an earlier value is written with it: of a gated product both gradients. So
    is what reads the earlier value itself, such as a gradient times an adapter's scale.

    If what it reads is not there yet, and what both read is as large as they are, the earlier value waits, unless the
    later one is computed from it: a gated product that backward computes again waits for the gradients. Who reads the
    earlier value runs behind them.

    Args:
        places: of what is computed, in order. operands, may_inline: as for :func:`fused_reads`.
        is_written: is a value pointwise, and written to memory by a fused kernel? size: bytes of any memory.
    """
    found, inlined = fused_reads(list(places), operands, may_inline)
    reads = dict(zip(places, found, strict=True))
    last = {read: place for key, place in places.items() for read in reads[key]}
    first: dict[Key, int] = {}
    readers: dict[Key, list[Key]] = {}
    kernels: dict[Key, list[Key]] = {}
    number: dict[Key, int] = {}
    written: dict[Key, int] = {}
    for key, place in places.items():
        first[key] = place
        if key in inlined:
            continue
        number[key] = len(number)
        if not (own := size(key) if is_written(key) else 0):
            for read in reads[key]:
                kernels.setdefault(read, []).append(key)
            continue
        ready = max((first[read] for read in reads[key] if read in first), default=-1)
        beside = {
            other: size(read)
            for read in sorted(reads[key], key=size)
            for other in (read, *readers.get(read, ()))
            if written.get(other) == own
        }
        first[key] = min((first[other] for other in beside if ready <= first[other]), default=place)
        for other, shared in beside.items():
            is_near = shared >= own and number[key] - number[other] <= FARTHEST
            if first[other] < first[key] and is_near and not _is_computed_from(key, other, reads, places):
                late = reads[other].union([other], *(reads[kernel] for kernel in kernels.get(other, ())))
                last.update((read, max(last.get(read, 0), first[key])) for read in late)
        written[key] = own
        for read in reads[key]:
            readers.setdefault(read, []).append(key)
    return FusedLives(reads, first, last, inlined)


def _is_computed_from(key: Key, other: Key, reads: Mapping[Key, frozenset[Key]], places: Mapping[Key, int]) -> bool:
    """By way of something else."""
    seen: set[Key] = set()
    waiting = [read for read in reads[key] if read != other]
    while waiting:
        read = waiting.pop()
        if read in seen or places.get(read, -1) < places[other]:
            continue
        if other in reads[read]:
            return True
        seen.add(read)
        waiting += reads[read]
    return False
