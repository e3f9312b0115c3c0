"""What CUDA cards can do, by compute capability: the one place that kernels, their sizes and choices of them ask.

Source: CUDA C++ Programming Guide, appendix "Compute Capabilities" (shared memory of a block, features), and
developer.nvidia.com/cuda-gpus (products). What serves attention and products of experts: by the packages' own sources.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from glue_compiler.errors import GlueOptionError, unknown_name

Capability = tuple[int, int]
_KIB = 1024


@dataclass(frozen=True)
class Card:
    """A compute capability.

    Attributes:
        products: cards of it, for people.
        shared: bytes of shared memory that one block of threads can have.
        multiplies: Triton makes instructions of matrix products for it, where it otherwise adds up single numbers,
            and so has bf16, which older cards do not have at all.
        copies_tiles: the tensor memory accelerator, and room for two programs of three stages on a multiprocessor.
        has_wgmma: instructions of Hopper alone, of which QuACK's and torch's own grouped products are made.
        prefers_cudnn: cuDNN's attention is faster than FlashAttention 2 in torch.
        flash4_head: the largest head that FlashAttention 4 serves with gradients; 0: it is not taken.
    """

    capability: Capability
    products: str
    shared: int
    multiplies: bool = True
    copies_tiles: bool = False
    has_wgmma: bool = False
    prefers_cudnn: bool = False
    flash4_head: int = 0

    @property
    def name(self) -> str:
        return "sm_{}{}".format(*self.capability)


# FlashAttention 4 asserts on Blackwell for heads between 136 and 248, and asks for more than there is on sm_120 for
# those over 128 (128 x 64 tiles forward, 64 x 64 with four operands backward).
CARDS = (
    Card((7, 5), "T4, RTX 20", 64 * _KIB, multiplies=False),
    Card((8, 0), "A100, A30", 163 * _KIB),
    Card((8, 6), "RTX 30, A10, A40, RTX A6000", 99 * _KIB),
    Card((8, 9), "RTX 40, L4, L40S", 99 * _KIB),
    Card((9, 0), "H100, H200", 227 * _KIB, copies_tiles=True, has_wgmma=True, prefers_cudnn=True, flash4_head=256),
    Card((10, 0), "B200", 227 * _KIB, copies_tiles=True, prefers_cudnn=True, flash4_head=128),
    Card((10, 3), "B300", 227 * _KIB, copies_tiles=True, prefers_cudnn=True, flash4_head=128),
    Card((12, 0), "RTX 50, RTX PRO 6000", 99 * _KIB, flash4_head=128),
    Card((12, 1), "DGX Spark", 99 * _KIB, flash4_head=128),
)
"""In ascending order."""


def of_capability(capability: Capability) -> Card:
    """A card that is not known has the least that newer ones have, or, if it is older, no kernel of ours."""
    for card in CARDS:
        if card.capability == capability:
            return card
    is_older = capability < CARDS[0].capability
    return Card(capability, "not known", 48 * _KIB if is_older else 99 * _KIB, multiplies=not is_older)


@functools.cache
def of_device(device: torch.device) -> Card | None:
    """None: it is not one of NVIDIA's."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return of_capability(torch.cuda.get_device_capability(device))


def has_wgmma(device: torch.device) -> bool:
    """Does the card of a device have Hopper's own instructions of products?"""
    card = of_device(device)
    return card is not None and card.has_wgmma


def named(name: str) -> Card:
    """The card of a name such as ``"sm_89"``, ``"8.9"`` or that of a product, ``"RTX 4090"``.

    Raises:
        GlueOptionError: there is none; it names the nearest.
    """
    wanted = name.lower().replace(" ", "")
    capability = "sm_" + wanted.removeprefix("sm").removeprefix("_").replace(".", "")
    for card in CARDS:
        products = card.products.lower().replace(" ", "").split(",")
        if card.name == capability or any(wanted.startswith(product) for product in products):
            return card
    nearest = capability if capability[3:].isdigit() and len(capability) <= len("sm_120") else name
    message = unknown_name("card", nearest, [card.name for card in CARDS], list_as="Cards")
    raise GlueOptionError(f"{message} Products: {', '.join(card.products for card in CARDS)}.")
