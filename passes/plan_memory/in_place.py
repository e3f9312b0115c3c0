"""Which results a fused kernel writes where an operand lay, as Inductor's scheduler has it.

Source: ``SchedulerNode.decide_inplace_update``: the result is as large as the operand, reads it, and is the only use of
it that is left but for what the result is computed from.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from glue_compiler.fx.fused_reads import FusedLives
from glue_compiler.passes.plan_memory.step import Value


def written_in_place(
    values: Sequence[Value],
    order: Sequence[int],
    kernels: Sequence[int],
    ends: Mapping[int, tuple[int, int]],
    memories: FusedLives[int],
    stays: Collection[int],
) -> dict[int, tuple[int, int]]:
    """``ends`` with operands that end earlier, because a result is written over them.

    Args:
        order: places of what is computed, in order. kernels: of ``order``, as ``TrainingStep.kernels_before`` has it.
        ends: of each that is in memory, its first and last index in ``order``. stays: what nothing is written over.
    """
    gaps = {place: kernels[index] for index, place in enumerate(order) if place in memories.reads}
    readers: dict[tuple[int, int], set[int]] = {}
    for place, gap in gaps.items():
        if not values[place].is_kernel and place not in memories.inlined:
            for read in memories.reads[place]:
                readers.setdefault((gap, read), set()).add(place)

    def computed_from(place: int) -> set[int]:
        """It, and what stands between the same two kernels."""
        reached, waiting = {place}, [place]
        while waiting:
            more = {read for read in memories.reads[waiting.pop()] if gaps.get(read) == gaps[place]} - reached
            reached |= more
            waiting += more
        return reached

    def is_written(index: int, over: int) -> bool:
        """Is what ends at ``over`` read by more than what is fused with it?"""
        return kernels[over] > kernels[index] or values[order[over]].is_kernel or over == len(order) - 1

    free: dict[tuple[int, int], list[int]] = {}
    for place, (_, over) in ends.items():
        if not (values[order[over]].is_kernel or values[place].is_input or place in stays):
            free.setdefault((kernels[over], values[place].nbytes), []).append(place)
    found = dict(ends)
    for place, (at, over) in ends.items():
        if order[at] != place or values[place].is_kernel or not is_written(at, over):
            continue
        gap = kernels[at]
        for operand in free.get((gap, values[place].nbytes), []):
            uses = readers.get((gap, operand), set())
            if ends[operand][0] < at and place in uses and uses <= computed_from(place):
                free[gap, values[place].nbytes].remove(operand)
                first = memories.first.get(place, at)
                begins = first if kernels[first] == gap else at
                found[operand] = (ends[operand][0], max(ends[operand][0], begins - 1))
                break
    return found
