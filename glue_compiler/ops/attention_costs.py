"""Whether attention without its mask pays: what a layer saves against what a batch's block lists cost.

Measured with ``python -m benchmarks.attention_kernels``, one H200, torch 2.11, bf16, 16 query and 8 key heads of size
128, one row, forward and backward; wider models and more rows save more. Other cards are taken to be alike.
"""

from __future__ import annotations

Capability = tuple[int, int]


METADATA = 29.0
"""Microseconds of offsets and block lists of a batch, once."""
SAVED = ((256, 16.0), (512, 35.0), (1024, 78.0))
"""(tokens in a row, microseconds that a layer saves from there on), ascending. Rows shorter than the first were not
measured and count as saving nothing."""
LISTED = 1024
"""Queries from which on block lists of a mask's own values pay in a model of many layers, which share them: each may be
in a graph of its own, and memoize_metadata shares lists of masks of 1 MiB and more. Measured with ``python -m
benchmarks.mask_kinds``, ten kinds of masks, in microseconds: at 1024 lists take 75 to 120, and eight kinds save them
after 1 to 14 layers, while the densest two lose 20 a layer; at 2048 they take 82 to 170, and all ten save them after 1
or 2 layers."""


def pays(capability: Capability | None, length: int | None, layers: int) -> bool:
    """Do ``layers`` that share one batch's metadata save more than it costs?

    Args:
        capability: of the CUDA device; None: another device, where nothing is estimated.
        length: tokens in a row; None: not known when the graph is compiled, and taken as long.
    """
    if capability is None or length is None:
        return True
    saved = max((each for least, each in SAVED if length >= least), default=0.0)
    return saved * layers > METADATA


def lists_pay(capability: Capability | None, queries: int | None) -> bool:
    """Does a layer with a mask that is read when the graph runs save more than block lists of it cost?

    Args:
        capability, queries: as of :func:`pays`.
    """
    return capability is None or queries is None or queries >= LISTED


def gradient_pays(capability: Capability | None, *, is_written_out: bool) -> bool:
    """Does attention whose added numbers get a gradient, such as a learned bias, save time over what the model has?

    Measured with ``python -m benchmarks.mask_kinds --kinds learned``: forward and backward of 2,048 queries take 1.14
    ms by ``scaled_dot_product_attention`` with such a mask, 0.83 over lists, whose backward adds the gradient of each
    score atomically, and 0.60 as softmax written out; of 1,024 queries 0.31, 0.26 and 0.17.
    """
    return capability is None or not is_written_out
