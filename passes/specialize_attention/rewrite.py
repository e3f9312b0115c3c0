"""Writes attentions without their masks, or over block lists of them, and erases what only the masks needed."""

from __future__ import annotations

import math
import operator
from collections import Counter
from typing import Any

import torch
from torch import fx

import glue_compiler.ops  # noqa: F401  registers torch.ops.glue
from glue_compiler.errors import GlueInvariantError
from glue_compiler.fx.dead_nodes import erase_dead
from glue_compiler.fx.index_expressions import IndexReader
from glue_compiler.fx.node_maker import NodeMaker
from glue_compiler.fx.value_numbering import Numbering, Scope
from glue_compiler.fx.values import expression, requires_grad, storages_of, value_of
from glue_compiler.ops.document_blocks import BLOCK
from glue_compiler.ops.mask_blocks import to_whole_blocks, whole_blocks_pay
from glue_compiler.passes.specialize_attention.analysis import Plan, Replacement
from glue_compiler.passes.specialize_attention.attention_parts import AttentionSite
from glue_compiler.passes.specialize_attention.listed_masks import Elements, ListedMask, Step
from glue_compiler.passes.specialize_attention.memory_layouts import has_layout, layout_of
from glue_compiler.passes.specialize_attention.metadata_places import MetadataPlace, anchor
from glue_compiler.passes.specialize_attention.metadata_vectors import MetadataVectors

_glue = torch.ops.glue


def apply_plan(plan: Plan, numbering: Numbering, reader: IndexReader, fake_mode: Any) -> Counter[str]:
    """Rewrite all sites; returns how many took each form, and how many nodes went away."""
    counts: Counter[str] = Counter()
    writer = _Writer(reader, fake_mode)
    for replacement in plan.replacements:
        writer.write(replacement)
        counts[replacement.form] += 1
    if plan.replacements:
        counts["nodes_erased"] = erase_dead(numbering, writer.abandoned)
        for scope in numbering.scopes:
            scope.module.recompile()
    return counts


class _Writer:
    def __init__(self, reader: IndexReader, fake_mode: Any) -> None:
        self.reader = reader
        self.make = NodeMaker(fake_mode)
        self.metadata: dict[Any, list[fx.Node]] = {}
        self.lists: dict[Any, list[fx.Node]] = {}
        self.copies: dict[Any, fx.Node] = {}
        self.kept: dict[Any, list[fx.Node]] = {}
        self.results: dict[fx.Node, fx.Node] = {}
        self.abandoned: list[fx.Node] = []
        """Nodes that may have lost their last user."""

    def write(self, replacement: Replacement) -> None:
        site = replacement.site
        packed = self._packed_metadata(replacement) if replacement.metadata is not None else None
        mask = replacement.mask
        listed = self._lists(site, mask) if mask is not None else None
        biased = mask.bias if mask is not None else None
        bias = self._in_memory(site, biased) if biased is not None else None
        visibility = replacement.visibility
        self.make.meta = {
            name: site.output.meta[name] for name in ("stack_trace", "nn_module_stack") if name in site.output.meta
        }
        self.make.mode = self.reader.operators.mode(site.output)
        graph = site.scope.module.graph
        expected = value_of(site.output)
        with graph.inserting_before(site.output):
            query, key, value = self._operands(site, expected.dtype)
            scale = site.scale
            if replacement.call is not None and value_of(query).shape[3] != value_of(value).shape[3]:
                scale = 1 / math.sqrt(value_of(query).shape[3]) if scale is None else scale
                query, key, value = (self._widened(each, replacement.call.head_size) for each in (query, key, value))
            if mask is not None and listed is not None:
                result = self._listed(replacement, (query, key, value), scale, *listed, bias)
            elif packed is not None:
                assert visibility is not None
                cu_seqlens, *blocks = packed
                length = self.make.size(graph, query, 2)
                implementation = "flash4" if replacement.kernel == "flash4" else "flash2"
                settings = (visibility.is_causal, visibility.window, scale, blocks or None, implementation)
                result = self.make.call(
                    graph,
                    _glue.packed_attention.default,
                    query,
                    key,
                    value,
                    cu_seqlens,
                    length,
                    *settings,
                    **self._sinks(site),
                )
            elif replacement.form == "causal" and not site.dropout and _has_fixed_heads(query, key):
                result = self.make.call(graph, _glue.causal_attention.default, query, key, value, site.scale)
            else:
                result = self.make.call(
                    graph,
                    torch.nn.functional.scaled_dot_product_attention,
                    query,
                    key,
                    value,
                    dropout_p=site.dropout,
                    is_causal=replacement.form == "causal",
                    scale=site.scale,
                    enable_gqa=site.is_grouped,
                )
            if replacement.call is not None and value_of(result).shape[3] != expected.shape[-1]:
                result = self.make.method(graph, "narrow", result, 3, 0, expected.shape[-1])
            if expected.dim() == 3:
                result = self.make.method(graph, "flatten", result, 0, 1)
            result = self._not_saved(replacement, self._laid_out_as(expected, result))
        found = value_of(result)
        if (found.dtype, found.device, _sizes(found)) != (expected.dtype, expected.device, _sizes(expected)):
            raise GlueInvariantError(f"attention without a mask gives another tensor than '{site.output.name}'")
        result.meta["example_value"] = expected
        site.output.replace_all_uses_with(result)
        self.results[site.output] = result
        self._expand_without_scores(site)
        self.abandoned += [*site.output.all_input_nodes, *(n for i in site.inside for n in i.all_input_nodes)]
        for node in (site.output, *site.inside):
            graph.erase_node(node)

    def _operands(self, site: AttentionSite, dtype: torch.dtype) -> list[fx.Node]:
        """Query, key and value in the dtype that the attention computes in: autocast may have cast them.

        What was copied for the attention, such as heads that are repeated, it did not save: others may write it.
        """
        numbering, is_saved = self.reader.operators.numbering, requires_grad(value_of(site.output))
        read = storages_of([value_of(arg) for each in (site.output, *site.inside) for arg in each.all_input_nodes])
        found = []
        for node in (site.query, site.grouped_key, site.grouped_value):
            storages = storages_of(value_of(node))
            node = self.results.get(node, node)  # the result of an attention that has been written already
            if value_of(node).dtype != dtype:
                node = self.make.call(node.graph, torch.Tensor.to, node, dtype)
            elif is_saved and storages.isdisjoint(read) and not numbering.is_private_after(storages, site.output):
                node = self.make.call(node.graph, _glue.private_copy.default, node)
            found.append(node)
        if site.is_key_transposed:
            found[1] = self.make.method(found[1].graph, "transpose", found[1], -1, -2)
        return found

    def _widened(self, node: fx.Node, size: int | torch.SymInt) -> fx.Node:
        """Heads of ``size``, with zeros at their end."""
        missing = size - value_of(node).shape[3]
        return self.make.call(node.graph, torch.nn.functional.pad, node, (0, missing)) if missing else node

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
            return self.make.call(result.graph, _glue.private_copy.default, result)
        return result

    def _sinks(self, site: AttentionSite) -> dict[str, fx.Node]:
        """A copy, if there is a backward: a column of scores was not saved for it, and a caller may write them."""
        if site.sinks is None:
            return {}
        sinks = self.results.get(site.sinks, site.sinks)
        if requires_grad(value_of(site.output)):
            sinks = self.make.call(site.scope.module.graph, _glue.private_copy.default, sinks)
        return {"sinks": sinks}

    # -- attention under a mask that is read

    def _listed(
        self,
        replacement: Replacement,
        operands: tuple[fx.Node, fx.Node, fx.Node],
        scale: float | None,
        node: fx.Node,
        lists: list[fx.Node],
        bias: fx.Node | None,
    ) -> fx.Node:
        site, mask = replacement.site, replacement.mask
        assert mask is not None
        settings = (mask.kind, mask.empty_rows, scale, site.softcap)
        others: dict[str, Any] = self._sinks(site)
        if _is_in_whole_blocks(site, mask):
            others["in_whole_blocks"] = True
        if mask.steps:
            scope = self._scope_of(site, mask)
            for kept in self._steps_in_memory(site, scope, mask)[1:]:
                others["factors"] = self.make.brought_to(kept, scope, site.scope)
        if bias is not None:
            others["bias"] = bias
            lists = [*lists, self._row_offsets(site, mask)]
        graph = site.scope.module.graph
        return self.make.call(graph, _glue.masked_attention.default, *operands, node, lists, *settings, **others)

    def _lists(self, site: AttentionSite, mask: ListedMask) -> tuple[fx.Node, list[fx.Node]]:
        """The mask and its block lists, as nodes of the site's graph."""
        scope = self._scope_of(site, mask)
        read = self._steps_in_memory(site, scope, mask)[0] if mask.steps else self._made_in_memory(site, mask.elements)
        sizes = tuple(str(expression(value_of(node).shape[2])) for node in (site.query, site.value))
        of_steps = tuple(map(_copy_of_step, mask.steps)) or _copy_of(mask.elements)
        shared = (of_steps, mask.kind, mask.empty_rows, sizes, scope)
        is_whole = _is_in_whole_blocks(site, mask)
        if (shared, is_whole) not in self.lists:
            self.lists[shared, is_whole] = self._write_lists(site, mask, scope, read)
        lists = [self.make.brought_to(each, scope, site.scope) for each in self.lists[shared, is_whole]]
        if is_whole:
            return lists[-1], lists[:-1]
        return self.make.brought_to(read, scope, site.scope) if mask.steps else self._in_memory(
            site, mask.elements
        ), lists

    def _scope_of(self, site: AttentionSite, mask: ListedMask) -> Scope:
        """The outermost scope in which all that the mask is made of is at hand, or the site's."""
        parts = [mask.elements, *(step.elements for step in mask.steps), *([mask.factors] if mask.factors else [])]
        scopes = {elements.scope for elements in parts}
        return scopes.pop() if len(scopes) == 1 else site.scope

    def _write_lists(self, site: AttentionSite, mask: ListedMask, scope: Scope, node: fx.Node) -> list[fx.Node]:
        graph, before = self._set_before(site, scope)
        with graph.inserting_before(before):
            sizes = [self._size_of_scores(dim, site, node) for dim in (-2, -1)]
            read, others = self._without_gradient(graph, node), []
            if _is_in_whole_blocks(site, mask):
                read = self.make.call(graph, _glue.mask_in_whole_blocks.default, read, *sizes, mask.kind)
                others, sizes = [read], [self._to_whole_blocks(graph, size) for size in sizes]
            blocks = self.make.call(graph, _glue.mask_blocks.default, read, *sizes, mask.kind, mask.empty_rows)
            return [
                *(self.make.call(graph, operator.getitem, blocks, i) for i in range(len(value_of(blocks)))),
                *others,
            ]

    def _to_whole_blocks(self, graph: fx.Graph, size: Any) -> Any:
        if not isinstance(size, fx.Node):
            return to_whole_blocks(size)
        whole = self.make.call(graph, operator.add, self.make.call(graph, operator.floordiv, size, BLOCK), 1)
        return self.make.call(graph, operator.mul, whole, BLOCK)

    def _row_offsets(self, site: AttentionSite, mask: ListedMask) -> fx.Node:
        """Of a bias beside a boolean mask, as a node of the site's graph."""
        assert mask.bias is not None
        parts = (mask.elements, mask.bias)
        scope = mask.bias.scope if mask.elements.scope is mask.bias.scope else site.scope
        shared = (scope, *map(_copy_of, parts), mask.kind)
        if shared not in self.copies:
            made = self._made_in_memory if scope is mask.bias.scope is mask.elements.scope else self._in_memory
            nodes = [made(site, each) for each in parts]
            graph, before = self._set_before(site, scope)
            with graph.inserting_before(before):
                read, bias = (self._without_gradient(graph, node) for node in nodes)
                self.copies[shared] = self.make.call(graph, _glue.row_offsets.default, read, bias, mask.kind)
        return self.make.brought_to(self.copies[shared], scope, site.scope)

    def _in_memory(self, site: AttentionSite, elements: Elements) -> fx.Node:
        """What the kernels of backward find in memory too, and nobody writes before; a node of the site's graph."""
        if _is_at_hand(elements):
            return self.results.get(elements.node, elements.node)
        return self.make.brought_to(self._made_in_memory(site, elements), elements.scope, site.scope)

    def _made_in_memory(self, site: AttentionSite, elements: Elements) -> fx.Node:
        """The same, as a node of the outermost graph in which the tensor is at hand."""
        if _is_at_hand(elements):
            return self.results.get(elements.source, elements.source)
        shared = _copy_of(elements)
        if shared not in self.copies:
            graph, before = self._set_before(site, elements.scope)
            with graph.inserting_before(before):
                self.copies[shared] = self._copy(graph, self._converted(elements, elements.source))
        return self.copies[shared]

    def _steps_in_memory(self, site: AttentionSite, scope: Scope, mask: ListedMask) -> list[fx.Node]:
        """What all steps add to the scores together, and, if not to all scores, what those are multiplied by before.

        They are nodes of ``scope``. Scores in whose place something is filled in are none, which a factor of NaN says.
        """
        factors = mask.factors
        shared = (scope, *map(_copy_of_step, mask.steps), None if factors is None else _copy_of(factors))
        if shared not in self.kept:
            graph, before = self._set_before(site, scope)
            with graph.inserting_before(before):
                numbers: fx.Node | None = None
                kept: fx.Node | None = None
                for step in mask.steps:
                    node = self._of_scope(scope, step.elements)
                    if step.kind == "added":
                        # In fp16 a mask's least number and a bias may be minus infinity together.
                        is_half = value_of(node).dtype == torch.float16
                        node = self.make.method(graph, "float", node) if is_half else node
                        numbers = node if numbers is None else self.make.call(graph, torch.add, numbers, node)
                        continue
                    numbers = self._filled(graph, step, node, numbers)
                    shows = self.make.call(graph, torch.logical_not, node) if step.kind == "hides" else node
                    kept = shows if kept is None else self.make.call(graph, torch.logical_and, kept, shows)
                assert numbers is not None
                if factors is not None:
                    node = self._of_scope(scope, factors)
                    if value_of(node).dtype == torch.bool:  # a product with False is NaN if a score is infinite
                        node = self.make.method(graph, "half", node)
                    kept = node if kept is None else self.make.call(graph, torch.where, kept, node, math.nan)
                parts = [numbers] if kept is None else [numbers, kept]
                copies = self.make.call(graph, _glue.materialized.default, parts)
                self.kept[shared] = [self.make.call(graph, operator.getitem, copies, i) for i in range(len(parts))]
        return self.kept[shared]

    def _filled(self, graph: fx.Graph, step: Step, hidden: fx.Node, numbers: fx.Node | None) -> fx.Node:
        """``numbers`` with what ``step`` fills in, in a dtype that holds it."""
        assert step.dtype is not None
        dtype = torch.float32 if step.dtype == torch.float16 else step.dtype
        if numbers is None:
            device = value_of(hidden).device
            numbers = self.make.call(graph, torch.zeros, (), dtype=dtype, device=device)
        elif value_of(numbers).dtype != dtype:
            numbers = self.make.method(graph, "to", numbers, torch.promote_types(value_of(numbers).dtype, dtype))
        if step.kind == "hides":
            return self.make.call(graph, torch.where, hidden, step.filling, numbers)
        return self.make.call(graph, torch.where, hidden, numbers, step.filling)

    def _of_scope(self, scope: Scope, elements: Elements) -> fx.Node:
        return self._converted(elements, elements.source if elements.scope is scope else elements.node)

    def _converted(self, elements: Elements, node: fx.Node) -> fx.Node:
        """The tensor in ``node`` as it is added to the scores."""
        node = self.results.get(node, node)
        if elements.dtype is not None:
            node = self.make.method(node.graph, "to", node, elements.dtype)
        if elements.heads is not None:
            node = self.make.method(node.graph, "unflatten", node, 0, (-1, elements.heads))
        return self.make.call(node.graph, torch.mul, node, elements.factor) if elements.factor != 1 else node

    def _without_gradient(self, graph: fx.Graph, node: fx.Node) -> fx.Node:
        return self.make.method(graph, "detach", node) if requires_grad(value_of(node)) else node

    def _copy(self, graph: fx.Graph, node: fx.Node) -> fx.Node:
        copies = self.make.call(graph, _glue.materialized.default, [node])
        return self.make.call(graph, operator.getitem, copies, 0)

    def _set_before(self, site: AttentionSite, scope: Scope) -> tuple[fx.Graph, fx.Node]:
        """Where in ``scope`` is written what the site needs; takes over the modes there."""
        before = anchor(site.output, site.scope, scope)
        self.make.meta, self.make.mode = {}, self.reader.operators.mode(before)
        return scope.module.graph, before

    def _size_of_scores(self, dim: int, site: AttentionSite, mask: fx.Node) -> Any:
        """A size of the mask if it is that, so that lists depend on the mask alone, which layers share."""
        operand = site.query if dim == -2 else site.value
        shape = value_of(mask).shape
        if len(shape) >= -dim and expression(shape[dim]) == expression(value_of(operand).shape[2]):
            return self.make.size(mask.graph, mask, len(shape) + dim)
        return self.make.size(mask.graph, self.results.get(operand, operand), 2)

    def _expand_without_scores(self, site: AttentionSite) -> None:
        """What is expanded to the sizes of the scores is expanded to those of query and key."""
        inside = {site.output, *site.inside}
        for node in site.inside:
            for user in [user for user in node.users if user not in inside]:
                (expanded,) = (each for each in user.all_input_nodes if each is not node)
                with user.graph.inserting_before(user):
                    query, key = (self.results.get(each, each) for each in (site.query, site.key))
                    sizes = [self.make.size(user.graph, query, dim) for dim in range(3)]
                    sizes.append(self.make.size(user.graph, key, 3 if site.is_key_transposed else 2))
                # The node stays the same one: the mask of another attention may be it.
                user.op, user.target, user.args, user.kwargs = "call_method", "expand", (expanded, *sizes), {}

    # -- metadata of a packed batch

    def _packed_metadata(self, replacement: Replacement) -> list[fx.Node]:
        """``cu_seqlens``, and the block lists where the kernel takes them, as nodes of the site's graph."""
        site, visibility, place = replacement.site, replacement.visibility, replacement.metadata
        assert place is not None
        assert visibility is not None
        sizes = tuple(str(expression(size)) for size in (value_of(site.query).shape[0], value_of(site.query).shape[2]))
        blocks = (visibility.is_causal, visibility.window) if replacement.kernel == "flex" else ()
        key = (
            place.scope,
            visibility.documents,
            visibility.keys,
            sizes,
            replacement.kernel,
            blocks,
            value_of(site.query).device,
        )
        if key not in self.metadata:
            self.metadata[key] = self._write_metadata(replacement, place)
        return [self.make.brought_to(node, place.scope, site.scope) for node in self.metadata[key]]

    def _write_metadata(self, replacement: Replacement, place: MetadataPlace) -> list[fx.Node]:
        site, visibility = replacement.site, replacement.visibility
        assert visibility is not None
        graph = place.scope.module.graph
        self.make.meta, self.make.mode = {}, self.reader.operators.mode(place.before)
        with graph.inserting_before(place.before):
            batch, length = (
                self.make.size(graph, self.results.get(site.query, site.query), dim) if size is None else size
                for dim, size in ((0, place.batch), (2, place.length))
            )
            device = value_of(site.query).device
            vectors = MetadataVectors(self.make, self.reader, place, self.results, batch, length, device)
            exact = replacement.kernel != "flex" and value_of(site.query).is_cuda
            offsets = _glue.exact_document_offsets.default if exact else _glue.document_offsets.default
            found = [self.make.call(graph, offsets, vectors.starts(visibility.documents))]
            if replacement.kernel == "flex":
                settings: tuple[Any, ...] = (batch, length, visibility.is_causal, visibility.window)
                if visibility.keys:
                    settings = (*settings, vectors.seen(visibility.keys))
                blocks = self.make.call(graph, _glue.document_blocks.default, found[0], *settings)
                found += [self.make.call(graph, operator.getitem, blocks, i) for i in range(len(value_of(blocks)))]
        return found

    def _laid_out_as(self, expected: torch.Tensor, result: fx.Node) -> fx.Node:
        """``result`` in memory as ``expected`` is, for views of it downstream."""
        layout = layout_of(expected)
        assert layout is not None
        shape, strides = _sizes(value_of(result)), tuple(map(expression, value_of(result).stride()))
        if has_layout(shape, strides, layout):
            return result
        if layout == tuple(range(len(layout))):
            return self.make.method(result.graph, "contiguous", result)
        back = tuple(layout.index(dim) for dim in range(len(layout)))
        for name, args in (("permute", (layout,)), ("contiguous", ()), ("permute", (back,))):
            result = self.make.method(result.graph, name, result, *args)
        return result


def _is_in_whole_blocks(site: AttentionSite, mask: ListedMask) -> bool:
    query, value = value_of(site.query), value_of(site.value)
    has_factors = mask.factors is not None or any(step.kind != "added" for step in mask.steps)
    is_alone = mask.bias is None and not has_factors and not mask.has_gradient
    # To a mean belong all keys that there are, also those behind the last one.
    is_mean = mask.empty_rows == "mean" and mask.kind != "added"
    return is_alone and not is_mean and whole_blocks_pay(query.shape[2], value.shape[2], query.device)


def _copy_of(elements: Elements) -> Any:
    return elements.scope, elements.number, elements.dtype, elements.factor, elements.heads


def _copy_of_step(step: Step) -> Any:
    return _copy_of(step.elements), step.kind, step.filling, step.dtype


def _is_at_hand(elements: Elements) -> bool:
    """Is the tensor in memory as it is added to the scores, and stays so?"""
    return elements.is_given and elements.dtype is None and elements.factor == 1 and elements.heads is None


def _sizes(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(map(expression, tensor.shape))


def _has_fixed_heads(*nodes: fx.Node) -> bool:
    # causal_attention compares the numbers of heads, which would guard on symbolic ones.
    return all(isinstance(value_of(node).shape[1], int) for node in nodes)
