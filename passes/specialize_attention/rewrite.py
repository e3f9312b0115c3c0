"""Writes attentions without their masks, or over block lists of them, and erases what only the masks needed."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

import glue_compiler.ops  # noqa: F401  registers torch.ops.glue
from glue_compiler.errors import GlueInvariantError
from glue_compiler.fx.dead_nodes import erase_dead
from glue_compiler.fx.node_maker import NodeMaker
from glue_compiler.fx.value_numbering import Scope
from glue_compiler.fx.values import expression, expressions, requires_grad, storages_of, value_of
from glue_compiler.ops.attention_choice import AttentionCall, sdpa_shares_heads
from glue_compiler.ops.document_blocks import BLOCK
from glue_compiler.ops.mask_blocks import Kind, to_whole_blocks, whole_blocks_pay
from glue_compiler.passes.specialize_attention.analysis import AttentionPlan, Replacement
from glue_compiler.passes.specialize_attention.attention_parts import AttentionSite
from glue_compiler.passes.specialize_attention.listed_masks import Elements, ListedMask, ScoreChange
from glue_compiler.passes.specialize_attention.mask_reader import MaskReader
from glue_compiler.passes.specialize_attention.masks import Visibility
from glue_compiler.passes.specialize_attention.memory_layouts import has_layout, layout_of
from glue_compiler.passes.specialize_attention.metadata_places import MetadataPlace, anchor
from glue_compiler.passes.specialize_attention.metadata_vectors import MetadataVectors

_glue = torch.ops.glue


def apply_plan(plan: AttentionPlan, reader: MaskReader, *, few_sizes: bool) -> Counter[str]:
    """Rewrite all sites; returns how many took each form, and how many nodes went away.

    ``few_sizes``: of metadata, as CUDA graphs need.
    """
    counts: Counter[str] = Counter()
    writer, numbering = _Writer(reader, few_sizes), reader.operators.numbering
    for replacement in plan.replacements:
        writer.write(replacement)
        counts[replacement.form] += 1
    if plan.replacements:
        counts["nodes_erased"] = erase_dead(numbering, writer.abandoned)
        numbering.recompile()
    return counts


class _Writer:
    def __init__(self, reader: MaskReader, few_sizes: bool) -> None:
        self.reader, self.few_sizes = reader, few_sizes
        self.make = NodeMaker(reader.operators.analysis.fake_mode)
        self.shared: dict[Any, list[fx.Node]] = {}
        """What is written once for all attentions that need it, by its scope and what it is."""
        self.results: dict[fx.Node, fx.Node] = {}
        self.abandoned: list[fx.Node] = []
        """Nodes that may have lost their last user."""

    def write(self, replacement: Replacement) -> None:
        site = replacement.site
        expected = value_of(site.output)
        with self.make.before(site.output, self.reader.operators.mode(site.output), site.output):
            result = self._attention(replacement, expected)
            if replacement.call is not None and value_of(result).shape[3] != expected.shape[-1]:
                result = self.make.method("narrow", result, 3, 0, expected.shape[-1])
            if expected.dim() == 3:
                result = self.make.method("flatten", result, 0, 1)
            result = self._not_saved(replacement, self._laid_out_as(expected, result))
        found = value_of(result)
        if _kind(found) != _kind(expected):
            raise GlueInvariantError(f"attention without a mask gives another tensor than '{site.output.name}'")
        result.meta["example_value"] = expected
        site.output.replace_all_uses_with(result)
        self.results[site.output] = result
        self._expand_without_scores(site)
        self.abandoned += [*site.output.all_input_nodes, *(n for i in site.inside for n in i.all_input_nodes)]
        for node in (site.output, *site.inside):
            node.graph.erase_node(node)

    def _attention(self, replacement: Replacement, expected: torch.Tensor) -> fx.Node:
        """``[B, H, Q, D]``, where D may be wider than expected."""
        site, visibility = replacement.site, replacement.visibility
        takes_groups = replacement.kernel is not None or self._sdpa_shares_heads(site, expected.dtype)
        query, key, value = self._operands(site, expected.dtype, takes_groups)
        scale = site.scale
        if replacement.call is not None and value_of(query).shape[3] != value_of(value).shape[3]:
            scale = 1 / math.sqrt(value_of(query).shape[3]) if scale is None else scale
            query, key, value = (self._widened(each, replacement.call.head_size) for each in (query, key, value))
        if replacement.mask is not None:
            return self._listed(site, replacement.mask, (query, key, value), scale)
        if replacement.metadata is not None:
            assert visibility is not None
            cu_seqlens, *blocks = self._metadata(replacement, visibility, replacement.metadata)
            length = self.make.size(query, 2)
            implementation = "flash4" if replacement.kernel == "flash4" else "flash2"
            settings = (visibility.is_causal, visibility.window, scale, blocks or None, implementation)
            operands = (query, key, value, cu_seqlens, length)
            return self.make.call(_glue.packed_attention.default, *operands, *settings, **self._sinks(site))
        if replacement.form == "causal" and not site.dropout and _has_fixed_heads(query, key):
            return self.make.call(_glue.causal_attention.default, query, key, value, site.scale)
        return self.make.call(
            torch.nn.functional.scaled_dot_product_attention,
            query,
            key,
            value,
            dropout_p=site.dropout,
            is_causal=replacement.form == "causal",
            scale=site.scale,
            enable_gqa=site.is_grouped and value_of(query).shape[1] != value_of(key).shape[1],
        )

    @staticmethod
    def _sdpa_shares_heads(site: AttentionSite, dtype: torch.dtype) -> bool:
        operands = (value_of(each) for each in (site.query, site.grouped_key, site.grouped_value))
        return sdpa_shares_heads(replace(AttentionCall.of(*operands), dtype=dtype))

    def _once(self, site: AttentionSite, scope: Scope, what: Any, write: Callable[[], list[fx.Node]]) -> list[fx.Node]:
        """Nodes that ``write`` makes in ``scope``, before the site; ``what`` tells them apart from others."""
        if (scope, what) not in self.shared:
            before = anchor(site.output, site.scope, scope)
            with self.make.before(before, self.reader.operators.mode(before)):
                self.shared[scope, what] = write()
        return self.shared[scope, what]

    def _brought(self, site: AttentionSite, scope: Scope, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        return [self.make.brought_to(node, scope, site.scope) for node in nodes]

    def _metadata(self, replacement: Replacement, visibility: Visibility, place: MetadataPlace) -> list[fx.Node]:
        """``cu_seqlens``, and the block lists where the kernel takes them."""
        site = replacement.site
        query = self.results.get(site.query, site.query)
        tensor = value_of(site.query)
        sizes = tuple(str(expression(tensor.shape[dim])) for dim in (0, 2))
        is_flex = replacement.kernel == "flex"
        blocks = (visibility.is_causal, visibility.window) if is_flex else ()
        what = (visibility.documents, visibility.keys, sizes, replacement.kernel, blocks, tensor.device)

        def write() -> list[fx.Node]:
            batch, length = (
                self.make.size(query, dim) if size is None else size
                for dim, size in ((0, place.batch), (2, place.length))
            )
            vectors = MetadataVectors(self.make, self.reader, place, self.results, batch, length, tensor.device)
            exact = not is_flex and tensor.is_cuda
            starts = vectors.starts(visibility.documents)
            if exact:
                found = self.make.call(_glue.exact_document_offsets.default, starts, self.few_sizes)
            else:
                found = self.make.call(_glue.document_offsets.default, starts)
            if not is_flex:
                return [found]
            seen = [vectors.seen(visibility.keys)] if visibility.keys else []
            return [found, *self._items(_glue.document_blocks.default, found, batch, length, *blocks, *seen)]

        return self._brought(site, place.scope, self._once(site, place.scope, what, write))

    def _items(self, target: Callable[..., Any], *args: Any) -> list[fx.Node]:
        made = self.make.call(target, *args)
        return [self.make.call(operator.getitem, made, i) for i in range(len(value_of(made)))]

    def _operands(self, site: AttentionSite, dtype: torch.dtype, takes_groups: bool) -> list[fx.Node]:
        """Query, key and value in the dtype that the attention computes in: autocast may have cast them.

        ``takes_groups``: the heads of keys need not be repeated for those of queries.

        What was copied for the attention, such as heads that are repeated, it did not save: others may write it.
        """
        numbering, is_saved = self.reader.operators.numbering, requires_grad(value_of(site.output))
        read = storages_of([value_of(arg) for each in (site.output, *site.inside) for arg in each.all_input_nodes])
        found = []
        keys = (site.grouped_key, site.grouped_value) if takes_groups else (site.key, site.value)
        for node in (site.query, *keys):
            storages = storages_of(value_of(node))
            node = self.results.get(node, node)  # the result of an attention that has been written already
            if value_of(node).dtype != dtype:
                node = self.make.method("to", node, dtype)
            elif is_saved and storages.isdisjoint(read) and not numbering.is_private_after(storages, site.output):
                node = self.make.call(_glue.private_copy.default, node)
            found.append(node)
        if site.is_key_transposed:
            found[1] = self.make.method("transpose", found[1], -1, -2)
        return found

    def _widened(self, node: fx.Node, size: int | torch.SymInt) -> fx.Node:
        """Heads of ``size``, with zeros at their end."""
        missing = size - value_of(node).shape[3]
        return self.make.call(torch.nn.functional.pad, node, (0, missing)) if missing else node

    def _not_saved(self, replacement: Replacement, result: fx.Node) -> fx.Node:
        """Attention saves its result for backward, which one that was written out does not: a caller may write it.

        Of sdpa's own result autograd sees that it was written; of one that a view of it was saved it does not.
        """
        site = replacement.site
        expected = value_of(site.output)
        numbering = self.reader.operators.numbering
        is_returned = storages_of(expected) & numbering.returned
        is_written = site.inside and not numbering.is_unwritten_after(storages_of(expected), site.output)
        may_be_written = is_written or (is_returned and (site.inside or replacement.call is not None))
        if may_be_written and requires_grad(expected):
            return self.make.call(_glue.private_copy.default, result)
        return result

    def _sinks(self, site: AttentionSite) -> dict[str, fx.Node]:
        """A copy, if there is a backward: a column of scores was not saved for it, and a caller may write them."""
        if site.sinks is None:
            return {}
        sinks = self.results.get(site.sinks, site.sinks)
        if requires_grad(value_of(site.output)):
            sinks = self.make.call(_glue.private_copy.default, sinks)
        return {"sinks": sinks}

    # -- attention under a mask that is read

    def _listed(
        self, site: AttentionSite, mask: ListedMask, operands: tuple[fx.Node, fx.Node, fx.Node], scale: float | None
    ) -> fx.Node:
        parts = [mask.elements, *(step.elements for step in mask.steps), *([mask.factors] if mask.factors else [])]
        scope = _common_scope(site, parts)
        if mask.steps:
            read, *factors = self._steps_in_memory(site, scope, mask)
        else:
            read, factors = self._in_memory(site, mask.elements, scope), []
        is_whole = _is_in_whole_blocks(site, mask)
        sizes = tuple(str(expression(value_of(node).shape[2])) for node in (site.query, site.value))
        of_steps = tuple(map(_copy_of_step, mask.steps)) or _copy_of(mask.elements)
        what = (of_steps, mask.kind, mask.empty_rows, sizes, is_whole)
        made = self._once(site, scope, what, lambda: self._write_lists(site, mask, read, is_whole))
        lists = self._brought(site, scope, made)
        others: dict[str, Any] = self._sinks(site)
        if is_whole:
            node, others["in_whole_blocks"] = lists.pop(), True
        elif mask.steps:
            node, *factors = self._brought(site, scope, [read, *factors])
            if factors:
                others["factors"] = factors[0]
        else:
            node = self._in_memory(site, mask.elements, site.scope)
        if mask.bias is not None:
            others["bias"] = self._in_memory(site, mask.bias, site.scope)
            lists.append(self._row_offsets(site, mask.elements, mask.bias, mask.kind))
        settings = (mask.kind, mask.empty_rows, scale, site.softcap)
        return self.make.call(_glue.masked_attention.default, *operands, node, lists, *settings, **others)

    def _write_lists(self, site: AttentionSite, mask: ListedMask, node: fx.Node, is_whole: bool) -> list[fx.Node]:
        """The block lists; and the mask, if it is written in whole blocks."""
        sizes = [self._size_of_scores(dim, site, node) for dim in (-2, -1)]
        read, others = self._without_gradient(node), []
        if is_whole:
            read = self.make.call(_glue.mask_in_whole_blocks.default, read, *sizes, mask.kind)
            others, sizes = [read], [self._to_whole_blocks(size) for size in sizes]
        return [*self._items(_glue.mask_blocks.default, read, *sizes, mask.kind, mask.empty_rows), *others]

    def _to_whole_blocks(self, size: Any) -> Any:
        if not isinstance(size, fx.Node):
            return to_whole_blocks(size)
        return ((self.make.proxy(size) // BLOCK + 1) * BLOCK).node

    def _row_offsets(self, site: AttentionSite, elements: Elements, bias: Elements, kind: Kind) -> fx.Node:
        """Of a bias beside a boolean mask."""
        scope = _common_scope(site, (elements, bias))

        def write() -> list[fx.Node]:
            read = [self._without_gradient(self._in_memory(site, each, scope)) for each in (elements, bias)]
            return [self.make.call(_glue.row_offsets.default, *read, kind)]

        made = self._once(site, scope, ("offsets", _copy_of(elements), _copy_of(bias), kind), write)
        return self._brought(site, scope, made)[0]

    def _in_memory(self, site: AttentionSite, elements: Elements, scope: Scope) -> fx.Node:
        """What the kernels of backward find in memory too, and nobody writes before; a node of ``scope``."""
        if elements.is_given and (elements.dtype, elements.factor, elements.heads) == (None, 1, None):
            return self._of_scope(scope, elements)
        outermost = elements.scope
        made = self._once(
            site, outermost, _copy_of(elements), lambda: self._copies(self._of_scope(outermost, elements))
        )
        return self.make.brought_to(made[0], outermost, scope)

    def _steps_in_memory(self, site: AttentionSite, scope: Scope, mask: ListedMask) -> list[fx.Node]:
        """What all steps add to the scores together, and, if not to all scores, what those are multiplied by before.

        They are nodes of ``scope``. Scores in whose place something is filled in are none, which a factor of NaN says.
        """
        factors = mask.factors

        def write() -> list[fx.Node]:
            numbers: Any = None
            kept: Any = None
            for step in mask.steps:
                read = self.make.proxy(self._of_scope(scope, step.elements))
                if step.kind == "added":
                    # In fp16 a mask's least number and a bias may be minus infinity together.
                    read = read.float() if value_of(read.node).dtype == torch.float16 else read
                    numbers = read if numbers is None else torch.add(numbers, read)
                    continue
                numbers = self._filled(step, read, numbers)
                shows = read.logical_not() if step.kind == "hides" else read
                kept = shows if kept is None else kept.logical_and(shows)
            assert numbers is not None
            if factors is not None:
                read = self.make.proxy(self._of_scope(scope, factors))
                if value_of(read.node).dtype == torch.bool:  # a product with False is NaN if a score is infinite
                    read = read.half()
                kept = read if kept is None else torch.where(kept, read, math.nan)
            return self._copies(*(each.node for each in (numbers, kept) if each is not None))

        what = (*map(_copy_of_step, mask.steps), None if factors is None else _copy_of(factors))
        return self._once(site, scope, ("steps", what), write)

    def _filled(self, step: ScoreChange, hidden: Any, numbers: Any) -> Any:
        """``numbers`` with what ``step`` fills in, in a dtype that holds it."""
        assert step.dtype is not None
        dtype = torch.float32 if step.dtype == torch.float16 else step.dtype
        if numbers is None:
            zero = self.make.call(torch.zeros, (), dtype=dtype, device=value_of(hidden.node).device)
            numbers = self.make.proxy(zero)
        elif value_of(numbers.node).dtype != dtype:
            numbers = numbers.to(torch.promote_types(value_of(numbers.node).dtype, dtype))
        chosen = (step.filling, numbers) if step.kind == "hides" else (numbers, step.filling)
        return torch.where(hidden, *chosen)

    def _of_scope(self, scope: Scope, elements: Elements) -> fx.Node:
        """The tensor as it is added to the scores."""
        node = elements.source if elements.scope is scope else elements.node
        node = self.results.get(node, node)
        if elements.dtype is not None:
            node = self.make.method("to", node, elements.dtype)
        if elements.heads is not None:
            node = self.make.method("unflatten", node, 0, (-1, elements.heads))
        return self.make.call(torch.mul, node, elements.factor) if elements.factor != 1 else node

    def _without_gradient(self, node: fx.Node) -> fx.Node:
        return self.make.method("detach", node) if requires_grad(value_of(node)) else node

    def _copies(self, *nodes: fx.Node) -> list[fx.Node]:
        return self._items(_glue.materialized.default, list(nodes))

    def _size_of_scores(self, dim: int, site: AttentionSite, mask: fx.Node) -> Any:
        """A size of the mask if it is that, so that lists depend on the mask alone, which layers share."""
        operand = site.query if dim == -2 else site.value
        shape = value_of(mask).shape
        if len(shape) >= -dim and expression(shape[dim]) == expression(value_of(operand).shape[2]):
            return self.make.size(mask, len(shape) + dim)
        return self.make.size(self.results.get(operand, operand), 2)

    def _expand_without_scores(self, site: AttentionSite) -> None:
        """What is expanded to the sizes of the scores is expanded to those of query and key."""
        inside = {site.output, *site.inside}
        for node in site.inside:
            for user in [user for user in node.users if user not in inside]:
                (expanded,) = (each for each in user.all_input_nodes if each is not node)
                with self.make.before(user, self.reader.operators.mode(user)):
                    query, key = (self.results.get(each, each) for each in (site.query, site.key))
                    sizes = [self.make.size(query, dim) for dim in range(3)]
                    sizes.append(self.make.size(key, 3 if site.is_key_transposed else 2))
                # The node stays the same one: the mask of another attention may be it.
                user.op, user.target, user.args, user.kwargs = "call_method", "expand", (expanded, *sizes), {}

    def _laid_out_as(self, expected: torch.Tensor, result: fx.Node) -> fx.Node:
        """``result`` in memory as ``expected`` is, for views of it downstream."""
        layout = layout_of(expected)
        assert layout is not None
        if has_layout(value_of(result), layout):
            return result
        if layout == tuple(range(len(layout))):
            return self.make.method("contiguous", result)
        back = tuple(layout.index(dim) for dim in range(len(layout)))
        return self.make.proxy(result).permute(layout).contiguous().permute(back).node


def _is_in_whole_blocks(site: AttentionSite, mask: ListedMask) -> bool:
    query, value = value_of(site.query), value_of(site.value)
    has_factors = mask.factors is not None or any(step.kind != "added" for step in mask.steps)
    is_alone = mask.bias is None and not has_factors and not mask.has_gradient
    # To a mean belong all keys that there are, also those behind the last one.
    is_mean = mask.empty_rows == "mean" and mask.kind != "added"
    return is_alone and not is_mean and whole_blocks_pay(query.shape[2], value.shape[2], query.device)


def _copy_of(elements: Elements) -> Any:
    return elements.scope, elements.number, elements.dtype, elements.factor, elements.heads


def _copy_of_step(step: ScoreChange) -> Any:
    return _copy_of(step.elements), step.kind, step.filling, step.dtype


def _common_scope(site: AttentionSite, parts: Iterable[Elements]) -> Scope:
    """The outermost scope in which all ``parts`` are at hand, or the site's."""
    scopes = {elements.scope for elements in parts}
    return scopes.pop() if len(scopes) == 1 else site.scope


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.device, expressions(tensor.shape)


def _has_fixed_heads(*nodes: fx.Node) -> bool:
    # causal_attention compares the numbers of heads, which would guard on symbolic ones.
    return all(isinstance(value_of(node).shape[1], int) for node in nodes)
