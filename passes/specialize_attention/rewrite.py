"""Writes attentions without their masks, and erases what only the masks needed."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import sympy
import torch
from sympy.core.function import AppliedUndef
from torch import fx

import glue_compiler.ops  # noqa: F401  registers torch.ops.glue
from glue_compiler import compat
from glue_compiler.errors import GlueInvariantError
from glue_compiler.fx.effects import Kind
from glue_compiler.fx.index_expressions import IndexReader
from glue_compiler.fx.value_numbering import Numbering, Scope
from glue_compiler.fx.values import expression, value_of
from glue_compiler.passes.specialize_attention.analysis import Plan, Replacement
from glue_compiler.passes.specialize_attention.documents import BATCH, KEY, TOKEN

_glue = torch.ops.glue
_COMPARISONS: dict[Any, Callable[..., Any]] = {
    sympy.Eq: torch.eq,
    sympy.Ne: torch.ne,
    sympy.Lt: torch.lt,
    sympy.Le: torch.le,
    sympy.Gt: torch.gt,
    sympy.Ge: torch.ge,
}
_MIRRORED = {
    torch.eq: torch.eq,
    torch.ne: torch.ne,
    torch.lt: torch.gt,
    torch.le: torch.ge,
    torch.gt: torch.lt,
    torch.ge: torch.le,
}


def apply_plan(plan: Plan, numbering: Numbering, reader: IndexReader, fake_mode: Any) -> Counter[str]:
    """Rewrite all sites; returns how many took each form, and how many nodes went away."""
    counts: Counter[str] = Counter()
    writer = _Writer(numbering, reader, fake_mode)
    for replacement in plan.replacements:
        writer.write(replacement)
        counts[replacement.form] += 1
    if plan.replacements:
        counts["nodes_erased"] = _erase_dead(numbering, writer.abandoned)
        for scope in numbering.scopes:
            scope.module.recompile()
    return counts


class _Writer:
    def __init__(self, numbering: Numbering, reader: IndexReader, fake_mode: Any) -> None:
        self.numbering = numbering
        self.reader = reader
        self.fake_mode = fake_mode
        self.scopes = {scope.module.graph: scope for scope in numbering.scopes}
        self.metadata: dict[Any, tuple[Scope, list[fx.Node]]] = {}
        self.operands: dict[tuple[Scope, fx.Node], fx.Node] = {}
        self.meta: dict[str, Any] = {}
        self.results: dict[fx.Node, fx.Node] = {}
        self.abandoned: list[fx.Node] = []
        """Nodes that may have lost their last user."""

    def write(self, replacement: Replacement) -> None:
        site = replacement.site
        # An operand may be the result of an attention that has been written already.
        query, key, value = (
            self.results.get(node, node) for node in (site.query, site.grouped_key, site.grouped_value)
        )
        packed = self._packed_metadata(replacement) if replacement.form == "packed" else None
        self.meta = {
            name: site.output.meta[name] for name in ("stack_trace", "nn_module_stack") if name in site.output.meta
        }
        graph = site.scope.module.graph
        with graph.inserting_before(site.output):
            if packed is not None:
                cu_seqlens, *blocks = packed
                length = self._size(graph, query, 2)
                visibility = replacement.visibility
                settings = (visibility.is_causal, visibility.window, site.scale, blocks or None)
                result = self._call(
                    graph, _glue.packed_attention.default, query, key, value, cu_seqlens, length, *settings
                )
            elif replacement.form == "causal" and not site.dropout and _has_fixed_heads(query, key):
                result = self._call(graph, _glue.causal_attention.default, query, key, value, site.scale)
            else:
                result = self._call(
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
            result = self._with_strides_of(site.output, result)
        # On record is what autocast and autograd make of it.
        result.meta["example_value"] = value_of(site.output)
        site.output.replace_all_uses_with(result)
        self.results[site.output] = result
        self.abandoned += [*site.output.all_input_nodes, *(n for i in site.inside for n in i.all_input_nodes)]
        for node in (site.output, *site.inside):
            graph.erase_node(node)

    # -- metadata of a packed batch

    def _packed_metadata(self, replacement: Replacement) -> list[fx.Node]:
        """``cu_seqlens``, and the block lists where the kernel takes them, as nodes of the site's graph."""
        site, visibility = replacement.site, replacement.visibility
        scope = self._home((*visibility.documents, *visibility.keys), site.scope)
        sizes = tuple(str(expression(size)) for size in (value_of(site.query).shape[0], value_of(site.query).shape[2]))
        blocks = (visibility.is_causal, visibility.window) if replacement.kernel == "flex" else ()
        key = (
            scope,
            visibility.documents,
            visibility.keys,
            sizes,
            replacement.kernel,
            blocks,
            value_of(site.query).device,
        )
        if key not in self.metadata:
            self.metadata[key] = (scope, self._write_metadata(replacement, scope))
        return [self._brought_to(node, scope, site.scope) for node in self.metadata[key][1]]

    def _home(self, documents: Iterable[Any], scope: Scope) -> Scope:
        """The outermost graph around ``scope`` in which the documents' leaves are known."""
        names = [call.func.__name__ for vector in documents for call in vector.atoms(AppliedUndef)]
        path = [scope]
        while path[0].parent is not None:
            path.insert(0, path[0].parent)
        for i, outer in enumerate(path[:-1]):
            before = path[i + 1].called_at
            if all(self._leaf(name, outer, before) is not None for name in names):
                return outer
        return scope

    def _leaf(self, name: str, scope: Scope, before: float = math.inf) -> tuple[fx.Node, Scope] | None:
        """Where a leaf's value is computed, or passed in, in ``scope`` or around it."""
        number = self.numbering.numbers[self.reader.leaves[name]]
        occurrences = self.numbering.occurrences[number]
        found = next(((o.node, scope) for o in occurrences if o.scope is scope and o.time < before), None)
        if found is None and scope.parent is not None:
            return self._leaf(name, scope.parent, scope.called_at)
        return found

    def _write_metadata(self, replacement: Replacement, scope: Scope) -> list[fx.Node]:
        site = replacement.site
        graph = scope.module.graph
        self.meta = {}
        with graph.inserting_before(self._anchor(site.output, site.scope, scope)):
            batch, length = (self._size_in(scope, site.query, site.scope, dim) for dim in (0, 2))
            starts = self._starts(graph, replacement, batch, length)
            exact = replacement.kernel == "varlen" and value_of(site.query).is_cuda
            offsets = _glue.exact_document_offsets.default if exact else _glue.document_offsets.default
            found = [self._call(graph, offsets, starts)]
            if replacement.kernel == "flex":
                visibility = replacement.visibility
                settings: tuple[Any, ...] = (batch, length, visibility.is_causal, visibility.window)
                if visibility.keys:
                    settings = (*settings, self._seen(graph, replacement, batch, length))
                blocks = self._call(graph, _glue.document_blocks.default, found[0], *settings)
                found += [self._call(graph, operator.getitem, blocks, i) for i in range(len(value_of(blocks)))]
        return found

    def _starts(self, graph: fx.Graph, replacement: Replacement, batch: Any, length: Any) -> fx.Node:
        """bool ``[B, T]``: a document begins at the token. What the first of a row says does not matter."""
        device = value_of(replacement.site.query).device
        starts = None
        for vector in replacement.visibility.documents:
            ids = self._vector(graph, vector, length, device)
            previous = self._call(graph, torch.roll, ids, 1, -1)
            differs = self._call(graph, torch.ne, ids, previous)
            starts = differs if starts is None else self._call(graph, torch.logical_or, starts, differs)
        if starts is None:
            return self._call(graph, torch.zeros, (batch, length), dtype=torch.bool, device=device)
        return self._method(graph, "expand", starts, batch, length)

    def _seen(self, graph: fx.Graph, replacement: Replacement, batch: Any, length: Any) -> fx.Node:
        """bool ``[B, T]``: the key may be seen."""
        device = value_of(replacement.site.query).device
        seen = self._condition(graph, sympy.And(*replacement.visibility.keys), length, device)
        return self._method(graph, "expand", seen, batch, length)

    def _condition(self, graph: fx.Graph, condition: Any, length: Any, device: torch.device) -> fx.Node:
        """The values of a boolean expression of ``BATCH`` and ``KEY``: ``[B or 1, T or 1]``."""
        if isinstance(condition, sympy.Not):
            return self._call(graph, torch.logical_not, self._condition(graph, condition.args[0], length, device))
        if isinstance(condition, sympy.And | sympy.Or):
            combine = torch.logical_and if isinstance(condition, sympy.And) else torch.logical_or
            found, *rest = (self._condition(graph, part, length, device) for part in condition.args)
            for part in rest:
                found = self._call(graph, combine, found, part)
            return found
        compare = _COMPARISONS.get(condition.func)
        if compare is None:
            raise GlueInvariantError(f"{condition} is no condition that can be computed")
        sides = [self._vector(graph, side, length, device) for side in condition.args]
        if not isinstance(sides[0], fx.Node):
            sides, compare = sides[::-1], _MIRRORED[compare]
        return self._call(graph, compare, *sides)

    def _vector(self, graph: fx.Graph, vector: Any, length: Any, device: torch.device) -> Any:
        """An expression of ``BATCH`` and ``TOKEN`` or ``KEY``, computed: ``[B or 1, T or 1]``, ``[]``, or a number."""
        if vector.is_number:
            return int(vector)
        if vector in (TOKEN, KEY):
            tokens = self._call(graph, torch.arange, length, device=device)
            return self._method(graph, "unsqueeze", tokens, 0)
        if isinstance(vector, sympy.Add | sympy.Mul):
            combine = torch.add if isinstance(vector, sympy.Add) else torch.mul
            terms = [self._vector(graph, term, length, device) for term in vector.args]
            terms.sort(key=lambda term: not isinstance(term, fx.Node))
            found = terms[0]
            for term in terms[1:]:
                found = self._call(graph, combine, found, term)
            return found
        if isinstance(vector, sympy.floor):
            numerator, denominator = sympy.fraction(sympy.together(vector.args[0]))
            return self._call(
                graph, torch.floor_divide, self._vector(graph, numerator, length, device), int(denominator)
            )
        return self._leaf_vector(graph, vector)

    def _leaf_vector(self, graph: fx.Graph, vector: Any) -> fx.Node:
        found_at = self._leaf(vector.func.__name__, self.scopes[graph])
        if found_at is None:
            raise GlueInvariantError(f"document ids {vector} are not known where they are needed")
        node = self._brought_to(*found_at, self.scopes[graph])
        places = [i for i in vector.args if i in (BATCH, TOKEN, KEY)]
        if places not in ([TOKEN], [BATCH, TOKEN], [KEY], [BATCH, KEY], [BATCH], []) or any(
            not i.is_Integer for i in vector.args if i not in places
        ):
            raise GlueInvariantError(f"document ids {vector} are no vector over tokens")
        taken = tuple(slice(None) if i in places else int(i) for i in vector.args)
        found = self._call(graph, operator.getitem, node, taken) if taken != (slice(None),) * len(taken) else node
        if len(places) != 1:
            return found
        return self._method(graph, "unsqueeze", found, 1 if places == [BATCH] else 0)

    # -- between graphs

    def _anchor(self, node: fx.Node, inner: Scope, outer: Scope) -> fx.Node:
        """The node of ``outer`` before which a value is ready for ``node`` of ``inner``."""
        while inner is not outer:
            assert inner.call is not None
            assert inner.parent is not None
            node, inner = inner.call.node, inner.parent
        return node

    def _brought_to(self, node: fx.Node, outer: Scope, inner: Scope) -> fx.Node:
        """A value of ``outer``, passed into ``inner`` as an operand of the calls between them."""
        if inner is outer:
            return node
        assert inner.parent is not None
        assert inner.call is not None
        node = self._brought_to(node, outer, inner.parent)
        if (inner, node) not in self.operands:
            self.operands[inner, node] = inner.call.append_operand(node)
        return self.operands[inner, node]

    def _size_in(self, scope: Scope, node: fx.Node, home: Scope, dim: int) -> Any:
        """A size of a site's tensor, in the graph of the metadata."""
        size = value_of(node).shape[dim]
        if isinstance(size, int):
            return size
        if scope is home:
            return self._size(scope.module.graph, node, dim)
        wanted = expression(size)
        for other in scope.module.graph.nodes:
            if isinstance(value_of(other), torch.SymInt) and expression(value_of(other)) == wanted:
                return other
        raise GlueInvariantError(f"no node holds the size {wanted}")

    def _size(self, graph: fx.Graph, node: fx.Node, dim: int) -> Any:
        size = value_of(node).shape[dim]
        return size if isinstance(size, int) else self._call(graph, torch.ops.aten.sym_size.int, node, dim)

    # -- nodes

    def _with_strides_of(self, old: fx.Node, new: fx.Node) -> fx.Node:
        """``new`` laid out in memory as ``old`` is, for views of it downstream."""
        graph, strides = new.graph, value_of(old).stride()
        if value_of(new).stride() == strides:
            return new
        if value_of(old).is_contiguous():
            return self._method(graph, "contiguous", new)
        if value_of(old).transpose(1, 2).is_contiguous():
            swapped = self._method(graph, "transpose", new, 1, 2)
            return self._method(graph, "transpose", self._method(graph, "contiguous", swapped), 1, 2)
        return new

    def _call(self, graph: fx.Graph, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return self._made(graph.call_function(target, args, kwargs))

    def _method(self, graph: fx.Graph, name: str, *args: Any) -> fx.Node:
        return self._made(graph.call_method(name, args))

    def _made(self, node: fx.Node) -> fx.Node:
        args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
        shape_env = getattr(self.fake_mode, "shape_env", None)
        with compat.speculation(self.fake_mode, shape_env):
            if node.op == "call_method":
                value = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                value = node.target(*args, **kwargs)  # type: ignore[operator]
        node.meta.update({**self.meta, "example_value": value})
        return node


def _has_fixed_heads(*nodes: fx.Node) -> bool:
    # causal_attention compares the numbers of heads, which would guard on symbolic ones.
    return all(isinstance(value_of(node).shape[1], int) for node in nodes)


def _erase_dead(numbering: Numbering, candidates: list[fx.Node]) -> int:
    """Erase pure nodes without users, beginning at ``candidates``, and operands that bodies no longer use."""
    calls = {
        placeholder: scope.call for scope in numbering.scopes if scope.call for placeholder in scope.call.placeholders
    }
    erased = 0
    waiting = list(dict.fromkeys(candidates))
    while waiting:
        node = waiting.pop()
        if node.users or node._erased:
            continue
        if node in calls:
            call = calls[node]
            operand = call.operands[call.placeholders.index(node)]
            call.drop_operand(node)
            waiting += [operand] if isinstance(operand, fx.Node) else []
        elif node in numbering.effects and numbering.effects[node].kind is Kind.PURE:
            waiting += node.all_input_nodes
            node.graph.erase_node(node)
            erased += 1
    return erased
