"""What an attention is made of: its mask, and what is read of the call."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

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
        also: another mask of the same scores; None: there is none.
    """

    value: Value
    role: Kind
    empty_rows: EmptyRows | None
    factor: float = 1.0
    also: Mask | None = None

    @property
    def parts(self) -> tuple[Mask, ...]:
        """The mask, and those beside it."""
        return (self, *(self.also.parts if self.also is not None else ()))


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
        sinks: ``[Hq]`` or ``[B, Hq, Q, 1]``, a score of each head or query for a key without a value, which no mask
            hides; None: there is none.
        bias: numbers that are added to the scores before the mask is filled in; None: there are none.
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
    bias: Value | None = None
    inside: tuple[fx.Node, ...] = ()
    is_key_transposed: bool = False
