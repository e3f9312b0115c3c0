"""Masks that are not proved: attention reads them when it runs, and visits the blocks in which they show a key."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from glue_compiler.compat.attention import has_flex_gradient, most_score_bytes
from glue_compiler.fx.gradients import Gradients
from glue_compiler.fx.index_expressions import IndexReader, Unreadable
from glue_compiler.fx.index_numbers import as_number, holds_where, is_selected_constant
from glue_compiler.fx.index_views import Element, NotAView, broadcast_index
from glue_compiler.fx.operators import UNTRACKED, Operators, Value
from glue_compiler.fx.value_numbering import Scope
from glue_compiler.fx.values import expression, requires_grad, storages_of, value_of, values_of
from glue_compiler.ops.mask_blocks import EmptyRows, Kind
from glue_compiler.passes.specialize_attention.attention_parts import AttentionSite, Mask
from glue_compiler.passes.specialize_attention.masks import UnknownMask
from glue_compiler.passes.specialize_attention.operands import elements_behind, places

aten = torch.ops.aten
_GIVEN = ("placeholder", "get_attr")


@dataclass(frozen=True)
class Elements:
    """A tensor of which attention reads an element for each score.

    Attributes:
        node: of the site's graph. The attention finds in its memory what it has made. Its sizes are 1, or those of
            the site's scores ``[B, Hq, Q, K]``, whose last ones they are.
        scope, source: the outermost graph around the site in which the tensor is at hand, and its node.
        number: equal for tensors that are equal when they are made.
        dtype: that autocast casts it to; None: it stays as it is.
        is_given: it lies in memory that the graph is given, and that is not written before backward.
        has_gradient: the attention gives it one.
        factor: that it is multiplied by, with the scores.
        heads: in which its first dimension of three is told apart from rows; None: it is not.
    """

    node: fx.Node
    scope: Scope
    source: fx.Node
    number: Any
    dtype: torch.dtype | None
    is_given: bool
    has_gradient: bool = False
    factor: float = 1.0
    heads: int | None = None


@dataclass(frozen=True)
class ScoreChange:
    """What is done to the scores: ``elements`` are added, or ``filling`` takes their place where those hide a key.

    Attributes:
        dtype: of the scores then, of what is filled in.
    """

    elements: Elements
    kind: Kind
    filling: float = 0.0
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class ListedMask:
    """A mask whose block lists are made from its ``elements``.

    Attributes:
        kind: as :attr:`Mask.role`.
        bias: numbers that are added to the scores before the mask; None: there are none.
        steps: of several that together are numbers that are added, all of them, from the first one on; of those the
            last one's elements are ``elements``.
        factors: that the scores are multiplied by before; None: they are not.
    """

    elements: Elements
    kind: Kind
    empty_rows: EmptyRows
    bias: Elements | None
    steps: tuple[ScoreChange, ...] = ()
    factors: Elements | None = None

    @property
    def has_gradient(self) -> bool:
        used = [self.elements, *(step.elements for step in self.steps), *([self.bias] if self.bias is not None else [])]
        return any(each.has_gradient for each in used)


def listed_mask(site: AttentionSite, reader: IndexReader) -> ListedMask:
    """The mask of ``site``, if it can be read when the graph runs.

    Raises:
        UnknownMask: it cannot; the message says why.
    """
    mask = site.mask
    assert mask is not None
    if any(each.empty_rows is None for each in mask.parts):
        raise UnknownMask("the masked scores are rounded or bounded, and what hides a key then is not known")
    bias = None
    if site.bias is not None:
        bias = _elements(site.bias, True, site, reader, is_merged=site.is_bias_merged)
    # Where a bias hides all keys that the mask shows, a query gets those that a finite number is filled in for.
    is_sum = bias is not None and (mask.role == "added" or math.isfinite(mask.filling))
    # What a sink leaves of a query that sees no key, numbers that are filled in say: it may be as low as those.
    is_sum = is_sum or (site.sinks is not None and mask.role != "added" and math.isfinite(mask.filling))
    if mask.also is not None or is_sum or site.factors is not None:
        return _of_steps(mask, bias, site, reader)
    assert mask.empty_rows is not None
    elements = _elements(mask.value, mask.role == "added", site, reader)
    if mask.role == "added":  # what hides keys was taken for what it is after the factor
        elements = dataclasses.replace(elements, factor=mask.factor)
    return ListedMask(elements, mask.role, mask.empty_rows, bias)


def _of_steps(mask: Mask, bias: Elements | None, site: AttentionSite, reader: IndexReader) -> ListedMask:
    """Masks and numbers as numbers that are added together, and which scores those are added to.

    A score in whose place a number is filled in is zero, gets no gradient, and that number is added to it.
    """
    if any(each.factor != 1 for each in mask.parts):
        raise UnknownMask("there are two masks, or sinks beside a finite number, and the scores are scaled afterwards")
    if any(each.role != "added" and math.isfinite(each.filling) and each.empty_rows == "nan" for each in mask.parts):
        raise UnknownMask("what is filled in is minus infinity in a narrower dtype afterwards")
    steps = [ScoreChange(bias, "added")] if bias is not None else []
    for part in mask.parts:
        elements = _elements(part.value, part.role == "added", site, reader)
        steps.append(ScoreChange(elements, part.role, part.filling, part.dtype))
    factors = None
    if site.factors is not None:
        _require_small_factors(site.factors, reader)
        factors = _elements(site.factors, reader.dtype(site.factors) != torch.bool, site, reader)
    _require_room(steps, factors, site)
    empty_rows: EmptyRows = "nan" if site.sinks is None or site.is_gated else "zeros"
    return ListedMask(steps[-1].elements, "added", empty_rows, None, tuple(steps), factors)


def _require_small_factors(factors: Value, reader: IndexReader) -> None:
    """So that the numbers that are added say how large scores are: weights are found again from that in backward."""
    if reader.dtype(factors) == torch.bool:
        return
    try:
        number = as_number(reader.read(factors, places(reader.operators.rank(factors))))
        is_small = is_selected_constant(number) and holds_where(number, _is_small) == sympy.true
    except (Unreadable, NotAView):
        is_small = False
    if not is_small:
        raise UnknownMask(
            "its scores are multiplied by numbers that may be large; a boolean mask, or ones and zeros that are made "
            "of one, would be read"
        )


def _is_small(number: Any) -> bool:
    return number.is_extended_real is True and bool(abs(number) <= 1)


def _require_room(steps: list[ScoreChange], factors: Elements | None, site: AttentionSite) -> None:
    """Of numbers alone there is some in any dtype."""
    is_filled = any(step.kind != "added" for step in steps)
    if not is_filled and factors is None:
        return
    added = [value_of(step.elements.node).dtype for step in steps if step.kind == "added"]
    filled = [step.dtype for step in steps if step.dtype is not None]
    numbers = max(torch.float32.itemsize if each == torch.float16 else each.itemsize for each in (*added, *filled))
    of_factors = torch.bool.itemsize
    if factors is not None:
        of_factors = max(value_of(factors.node).dtype.itemsize, torch.half.itemsize)
    most = most_score_bytes(value_of(site.query).device)
    if numbers + of_factors > most:
        raise UnknownMask(f"kernels would read {numbers + of_factors} bytes for each score, and take {most}")


def _elements(
    tensor: Value, is_added: bool, site: AttentionSite, reader: IndexReader, *, is_merged: bool = False
) -> Elements:
    operators, heads = reader.operators, value_of(site.query).shape[1]
    if is_merged and not isinstance(heads, int):
        raise UnknownMask("how many heads it has is not known when the graph is compiled")
    if not operators.is_tensor(tensor):
        raise UnknownMask("the mask is not a plain tensor")
    if is_added:
        _require_numbers(tensor, site, reader)
    gradients = Gradients(site.output, operators)
    has_gradient = gradients.reach(tensor)
    value, node = _smallest(tensor, site, reader, gradients, is_merged)
    if has_gradient:
        _require_gradient(node, site)
    scope, source = _outermost(value, node, site, gradients if has_gradient else None, operators)
    dtype = _cast_to(tensor, site, operators) if is_added else None
    # Backward of a sum needs none of its terms, and sdpa makes numbers of a boolean mask: others may write them before
    # backward, where a kernel reads them. What masked_fill, where and sdpa keep themselves is safe as in eager.
    may_be_written = is_added == bool(site.inside) and requires_grad(value_of(site.output))
    is_given = _is_given(value, operators) and not may_be_written
    # Equal tensors may have gradients of their own.
    number = source if has_gradient else operators.number(value)
    told_apart = heads if is_merged and value_of(node).dim() == 3 and value_of(node).shape[0] != 1 else None
    return Elements(node, scope, source, number, dtype, is_given, has_gradient, heads=told_apart)


def _outermost(
    value: Value, node: fx.Node, site: AttentionSite, gradients: Gradients | None, operators: Operators
) -> tuple[Scope, fx.Node]:
    """Where bodies around the site are passed the mask, if its sizes say for how many queries and keys it is.

    ``gradients``: that have to pass through what is made of it there; None: there are none.
    """
    scope = site.scope
    known = (1, 1, *map(expression, value_of(node).shape))[-2:]
    wanted = (expression(value_of(each).shape[2]) for each in (site.query, site.value))
    if any(size != one and not isinstance(size, int) for size, one in zip(wanted, known, strict=True)):
        return scope, node
    passed = operators.passed(value)
    while passed is not None and scope.call is not None and scope.parent is not None:
        outer = operators.operand(passed, scope.call.node)
        if outer is None or outer.graph is not scope.parent.graph:
            break
        if gradients is not None and not gradients.are_on(scope.call.node):
            break
        scope, node, passed = scope.parent, outer, operators.passed(passed)
    return scope, node


def _is_given(mask: Value, operators: Operators) -> bool:
    passed: Value | None = mask
    while passed is not None:
        mask, passed = passed, operators.passed(passed)
    numbering = operators.numbering
    given = storages_of([value_of(node) for node in numbering.root.graph.nodes if node.op in _GIVEN])
    storage = operators.storage(mask)
    return storage in given and storage not in numbering.written | numbering.unreadable


def _require_numbers(added: Value, site: AttentionSite, reader: IndexReader) -> None:
    dtype = reader.dtype(added)
    if not dtype.is_floating_point:
        raise UnknownMask(f"numbers in {dtype} are added to the scores")
    if added.step == UNTRACKED:
        raise UnknownMask("what is added to the scores is written in place, perhaps by what has a gradient")
    computed_in = torch.promote_types(value_of(site.output).dtype, torch.float32)
    if torch.promote_types(dtype, computed_in) != computed_in:
        raise UnknownMask(f"{dtype} is added to the scores, and kernels compute in {computed_in}")


def _require_gradient(node: fx.Node, site: AttentionSite) -> None:
    if torch.are_deterministic_algorithms_enabled():
        raise UnknownMask(
            "it has a gradient, which kernels sum in no fixed order, and torch.use_deterministic_algorithms is on"
        )
    tensor, query, value = values_of((node, site.query, site.value))
    if not has_flex_gradient(query.device, (*tensor.shape, query.shape[2], value.shape[2])):
        raise UnknownMask(
            "it has a gradient, whose sizes are not known when the graph is compiled, and Inductor fails on that; "
            "dynamic=False gives each size its own graph"
        )


def _cast_to(added: Value, site: AttentionSite, operators: Operators) -> torch.dtype | None:
    """Autocast casts what ``scaled_dot_product_attention`` adds, as it casts query, key and value."""
    output: torch.Tensor = value_of(site.output)
    if site.inside or operators.dtype(added) == output.dtype:
        return None
    with operators.mode(site.output).entered():
        return output.dtype if torch.is_autocast_enabled(output.device.type) else None


def _smallest(
    mask: Value, site: AttentionSite, reader: IndexReader, gradients: Gradients, is_merged: bool
) -> tuple[Value, fx.Node]:
    """The mask, or what it is expanded from, where the attention finds it; gradients of one are those of the other."""
    found = None
    for value in _same_elements(mask, site, reader, gradients, is_merged):
        node = reader.operators.operand(value, site.output)
        if node is not None and node.graph is site.output.graph:
            found = value, node
    if found is None:
        raise UnknownMask("the mask is no longer in memory, or not in that of a tensor by itself, where it is needed")
    return found


def _same_elements(
    mask: Value, site: AttentionSite, reader: IndexReader, gradients: Gradients, is_merged: bool
) -> Iterator[Value]:
    """The mask, and those that it is a view or a copy of and that are broadcast to the scores as it is."""
    sizes = (*map(expression, value_of(site.query).shape[:3]), expression(value_of(site.value).shape[2]))
    index = places(4)
    if is_merged:
        sizes, index = (sizes[0] * sizes[1], *sizes[2:]), index[1:]
    if not _fits(reader.shape(mask), sizes):
        raise UnknownMask("the sizes of the mask are not proved to be those of the scores")
    for element in elements_behind(Element(mask, _broadcast(index, reader.shape(mask))), gradients):
        shape = reader.shape(element.value)
        if _fits(shape, sizes) and element.index == _broadcast(index, shape):
            yield element.value
        if _is_detached(element.value, reader.operators):
            return


def _is_detached(value: Value, operators: Operators) -> bool:
    """Does its node say nothing of its gradients, of which it cuts off some inside?"""
    is_cut = operators.does(value, aten.detach) is not None
    return is_cut and requires_grad(values_of(value.node.all_input_nodes))


def _fits(shape: tuple[Any, ...], sizes: tuple[Any, ...]) -> bool:
    """Is ``shape`` proved to be broadcast to the scores?"""
    last = sizes[len(sizes) - len(shape) :]
    return len(shape) <= len(sizes) and all(size in (1, wanted) for size, wanted in zip(shape, last, strict=True))


def _broadcast(places: tuple[Any, ...], shape: tuple[Any, ...]) -> tuple[Any, ...]:
    return broadcast_index(places[len(places) - len(shape) :], shape)
