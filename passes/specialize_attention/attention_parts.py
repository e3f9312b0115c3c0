"""What an attention is made of: its mask, and what is read of the call."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from glue_compiler.fx.index_views import Element
from glue_compiler.fx.operators import Value
from glue_compiler.fx.value_numbering import Scope
from glue_compiler.ops.mask_blocks import EmptyRows, Kind


class NotAttention(Exception):
    """Attention, but in a form that cannot be specialised; the message says why."""


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees.

    Attributes:
        value: True for those it ``shows`` or ``hides``, or ``added`` to the scores.
        empty_rows: what a query gets all of whose keys it hides; of what is added, by minus infinity. None: not known.
        factor: what is ``added`` is multiplied by, with the scores.
        also: another mask of the same scores, that comes after this one; None: there is none.
        filling, dtype: what takes the place of the scores that it hides, and theirs; of what is not added alone.
    """

    value: Value
    role: Kind
    empty_rows: EmptyRows | None
    factor: float = 1.0
    also: Mask | None = None
    filling: float = 0.0
    dtype: torch.dtype | None = None

    @property
    def parts(self) -> tuple[Mask, ...]:
        """The mask, and those beside it."""
        return (self, *(self.also.parts if self.also is not None else ()))


@dataclass(frozen=True)
class Filling:
    """``value`` that takes the place of ``weights`` of a softmax where ``mask`` hides; the result is ``filled``."""

    filled: Value
    weights: Value
    mask: Any
    role: Kind
    value: Any


@dataclass
class Chain:
    """Softmax between two products, read from its end: what was found so far.

    Attributes:
        links: the values between the products.
        factor: of the scores when they are masked. scale: that and those of the scores before.
        dtypes: that the masked scores are converted to before they are exponentiated, from the last one on.
        fillings: of its weights, from the last one on.
        has_floor: the masked scores are no less than a number that hides a key.
        has_sinks: the weights are all columns of the softmax but the last.
        gated: the product that is multiplied by what sinks leave of its weights; None: it is not.
        is_bias_merged: its first dimension of three is that of rows and heads.
        factors: a tensor that the scores are multiplied by before anything is added to them.
        sinks: the score of that column, or in that factor: the element that is taken for row b, head h and query t.
        inside, is_key_transposed, is_grouped: as those of the :class:`AttentionSite`.
    """

    links: list[Value] = field(default_factory=list)
    mask: Mask | None = None
    dropout: Any = 0.0
    scale: Any = 1.0
    factor: float = 1.0
    softcap: float | None = None
    has_floor: bool = False
    has_sinks: bool = False
    gated: Value | None = None
    sinks: Element | None = None
    factors: Value | None = None
    bias: Value | None = None
    is_bias_merged: bool = False
    dtypes: list[torch.dtype] = field(default_factory=list)
    fillings: list[Filling] = field(default_factory=list)
    inside: tuple[fx.Node, ...] = ()
    is_key_transposed: bool = False
    is_grouped: bool = False


@dataclass(frozen=True)
class AttentionSite:
    """One attention. ``query`` is ``[B, Hq, Q, D]``, ``key`` and ``value`` ``[B, Hkv, K, D]``.

    Attributes:
        output: the node with the result ``[B, Hq, Q, D]`` or ``[B * Hq, Q, D]``. It finds in the memory of query, key
            and value what the attention reads, whatever was written there before.
        is_key_transposed: ``key`` and ``grouped_key`` are ``[B, Hkv, D, K]``.
        grouped_key, grouped_value: key and value before their heads were repeated for the query's; the same where they
            were not.
        is_grouped: the query has more heads than ``grouped_key``, or may have.
        is_square: there are provably as many keys as queries.
        scale: None is ``1 / sqrt(D)``.
        softcap: scores are ``tanh(scores / softcap) * softcap`` before the mask; None: as they are.
        sinks: ``[Hq]``, ``[Hq, Q]``, ``[B, Hq, Q]`` or ``[B, Hq, Q, 1]``, of which sizes may be 1: a score of each head
            or query for a key without a value, which no mask hides; None: there is none. is_gated: they are those of a
            :class:`Gate`.
        factors: a tensor that the scores are multiplied by before the bias; None: they are not.
        bias: numbers that are added to the scores before the mask is filled in; None: there are none.
        is_bias_merged: rows and heads are one dimension of them, ``[B * H, Q, K]``, of which the last two may be 1.
        inside: the nodes between query, key, value and output of softmax written out between two products. Nothing
            else uses them. Empty for ``scaled_dot_product_attention``.
    """

    scope: Scope
    output: fx.Node
    query: fx.Node
    key: fx.Node
    value: fx.Node
    grouped_key: fx.Node
    grouped_value: fx.Node
    is_grouped: bool
    is_square: bool
    mask: Mask | None
    dropout: float
    scale: float | None
    softcap: float | None = None
    sinks: fx.Node | None = None
    is_gated: bool = False
    bias: Value | None = None
    is_bias_merged: bool = False
    factors: Value | None = None
    inside: tuple[fx.Node, ...] = ()
    is_key_transposed: bool = False
