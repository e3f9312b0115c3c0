"""Writes a graph for the tokens that count alone."""

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
from glue_compiler.fx.node_maker import NodeMaker
from glue_compiler.fx.operators import OWN, Operators, Value
from glue_compiler.fx.value_numbering import Scope
from glue_compiler.fx.values import is_call, value_of
from glue_compiler.passes.drop_padding.plan import Plan, resolved
from glue_compiler.passes.drop_padding.steps import Count, Entering, Same, Step, taken_sizes
from glue_compiler.passes.drop_padding.token_facts import Rows, Span, Tokens, behind, counted_part, is_token
from glue_compiler.passes.specialize_attention.mask_reader import MaskReader
from glue_compiler.passes.specialize_attention.memory_layouts import has_layout, layout_of
from glue_compiler.passes.specialize_attention.metadata_vectors import MetadataVectors

_glue = torch.ops.glue
_getitem = operator.getitem
aten = torch.ops.aten


def apply_plan(plan: Plan, reader: MaskReader) -> Counter[str]:
    writer = _Writer(plan, reader)
    numbering = reader.operators.numbering
    writer.begin()
    writer.write(numbering.root)
    writer.counts["nodes_erased"] = writer.erase()
    numbering.recompile()
    return writer.counts


class _Writer:
    def __init__(self, plan: Plan, reader: MaskReader) -> None:
        self.plan, self.reader, self.domain = plan, reader, plan.domain
        self.operators: Operators = reader.operators
        self.numbering = reader.operators.numbering
        self.make = NodeMaker(reader.operators.analysis.fake_mode)
        self.counts: Counter[str] = Counter()
        self.taken: dict[Value, tuple[Scope, fx.Node]] = {}
        """Values with tokens: the tokens that count of them, and where."""
        self.entered: dict[Any, fx.Node] = {}
        self.back: dict[Any, fx.Node] = {}
        self.rewritten: dict[fx.Node, None] = {}
        returned = [value for each in plan.results.values() for value, _, _ in each]
        self.changed = [self.operators.node_of(value) for value in returned]
        self.old = dict.fromkeys(self.numbering.nodes)

    def begin(self) -> None:
        """What is known of the batch, once, in front of all that reads it."""
        start, root = self.domain.start, self.numbering.root
        with self.make.before(start, self.operators.mode(start)):
            place = self.domain.place
            vectors = MetadataVectors(self.make, self.reader, place, {}, place.batch, place.length, self.domain.device)
            self.seen = self.first = vectors.seen(self.domain.keys)
            self.batch, self.length = self.make.size(self.seen, 0), self.make.size(self.seen, 1)
            if self.plan.same is not None:
                self._share(self.plan.same)
            self.rows, self.numbers, self.starts = self._rows_of(self.first)
            self.count = self.make.size(self.rows, 0)
            if self.plan.same is not None:
                self.to_all, self.all_starts, self.to_first = self._all_rows()
            for value, tokens in self.plan.facts.items():
                if value.node.op == "placeholder" and value.node.graph is start.graph:
                    self.taken[value] = root, self._take(value.node, tokens, root)

    def _rows_of(self, seen: fx.Node) -> list[fx.Node]:
        found = self.make.call(_glue.token_rows.default, seen)
        return [self.make.call(_getitem, found, i) for i in range(3)]

    def _share(self, same: tuple[Entering, ...]) -> None:
        """Tokens of several rows are one where all is the same up to there and no label of theirs counts."""
        make, start, root = self.make, self.domain.start, self.numbering.root
        for node in self.plan.earlier:
            start.prepend(node)
        equal, alone = [], []
        for each in same:
            given = self.operators.node_of(each.value)
            assert given is not None
            node, _ = self._of_all(given, each.tokens, root, each.ignored)
            if each.ignored is None:
                equal.append(node)
            else:
                alone.append(make.call(aten.ne.Scalar, node, each.ignored))
        found = make.call(_glue.shared_tokens.default, self.seen, equal, alone)
        self.first, self.of = (make.call(_getitem, found, i) for i in range(2))
        self.counts["shared_prefixes"] += 1

    def _all_rows(self) -> tuple[fx.Node, fx.Node, fx.Node]:
        """Of the tokens that count in each row of the batch: which of ``self.rows`` they are, where rows begin, and
        which of them ``self.rows`` are."""
        rows, numbers, starts = self._rows_of(self.seen)
        places = self.make.call(aten.index_select.default, self.of, 0, rows)
        to_all = self.make.call(aten.index_select.default, self.numbers, 0, places)
        return to_all, starts, self.make.call(aten.index_select.default, numbers, 0, self.rows)

    # -- in the order in which nodes run

    def write(self, scope: Scope) -> None:
        bodies = scope.bodies
        for node in list(scope.graph.nodes):
            if node in bodies:
                self.write(bodies[node])
                self._return(scope, node, bodies[node])
                continue
            if node in self.plan.borders:
                self._put_back_for(scope, node)
            if node in self.plan.functions:
                self._write_function(scope, node)
            if node in self.plan.steps:
                self._write_node(scope, node)
            if node in self.plan.attentions:
                self._take_attention(scope, node)

    def _write_node(self, scope: Scope, node: fx.Node) -> None:
        start = self.domain.start
        at = start if node.graph is start.graph and node < start else node
        with self.make.before(at, self.operators.mode(at), node):
            for value, step in self.plan.steps[node]:
                if isinstance(step, Same):
                    self.taken[value] = scope, self._found(step.value, scope)
                    continue
                made = self._call(step, at, scope)
                items = value_of(made)
                for place, tokens in enumerate(step.results):
                    result = Value(node, value.step, value.leaf + place)
                    item = self.make.call(_getitem, made, place) if isinstance(items, tuple | list) else made
                    if tokens is None:
                        self._replace(result, item)
                    else:
                        self.taken[result] = scope, item
        self.rewritten[node] = None
        self.counts["operators"] += 1

    def _write_function(self, scope: Scope, node: fx.Node) -> None:
        """Its bodies, which say nothing of how many rows there are, on the tokens that count."""
        place, value = self.plan.functions[node]
        with self.make.before(node, self.operators.mode(node), node):
            taken = self._found(value, scope)
            args = list(node.args)
            args[2 + place] = taken
            values, rows = list(value_of(node)), value_of(taken).shape[:2]
            (result,) = (each for each in range(len(values)) if Value(node, OWN, each) in self.plan.facts)
            before = values[result]
            made = value_of(taken).new_empty((*rows, *before.shape[2:]), dtype=before.dtype)
            values[result] = made.requires_grad_(before.requires_grad)
            written = self.make.known(tuple(values), node.target, *args, **node.kwargs)
            self.taken[Value(node, OWN, result)] = scope, self.make.call(_getitem, written, result)
        self.rewritten[node] = None
        self.counts["operators"] += 1

    def _replace(self, value: Value, item: fx.Node) -> None:
        old = self.operators.node_of(value)
        if old is not None:
            old.replace_all_uses_with(item)

    def _call(self, step: Step, at: fx.Node, scope: Scope) -> fx.Node:
        positional, named = [], {}
        for argument in step.overload._schema.arguments:
            if argument.name in step.arguments:
                value = self._argument(step.arguments[argument.name], at, scope)
                if argument.kwarg_only:
                    named[argument.name] = value
                else:
                    positional.append(value)
        return self.make.call(step.overload, *positional, **named)

    def _argument(self, given: Any, at: fx.Node, scope: Scope) -> Any:
        if isinstance(given, tuple | list):
            return [self._argument(each, at, scope) for each in given]
        if isinstance(given, Count):
            return self._brought(self.count, scope)
        if isinstance(given, Entering):
            key = (self.operators.number(given.value), given.tokens, given.ignored, scope, self.make.mode)
            if key not in self.entered:
                node = self.operators.operand(given.value, at)
                assert node is not None
                self.entered[key] = self._take(node, given.tokens, scope, given.ignored)
            return self.entered[key]
        if isinstance(given, Value):
            if resolved(given, self.plan.facts, self.operators) is not None:
                return self._found(given, scope)
            return self.operators.operand(given, at)
        return given

    def _found(self, value: Value, scope: Scope) -> fx.Node:
        """What is taken of a value, in ``scope``."""
        known = resolved(value, self.plan.facts, self.operators)
        assert known is not None
        where, node = self.taken[known]
        return self._brought(node, scope, where)

    def _brought(self, node: Any, scope: Scope, where: Scope | None = None) -> Any:
        if not isinstance(node, fx.Node):
            return node
        return self.make.brought_to(node, where or self.numbering.root, scope)

    # -- bodies, attention and borders

    def _return(self, scope: Scope, node: fx.Node, body: Scope) -> None:
        found = self.plan.results.get(node, ())
        if not found:
            return
        output = body.graph.output_node()
        returned, values = list(output.args[0]), list(value_of(node))  # type: ignore[arg-type]
        for _, value, place in found:
            item = self._found(value, body)
            returned[place], values[place] = item, value_of(item)
        output.args = (tuple(returned),)
        node.meta["example_value"] = tuple(values)
        with self.make.before(node.next, self.operators.mode(node), node):
            for result, _, place in found:
                self.taken[result] = scope, self.make.call(_getitem, node, place)

    def _put_back_for(self, scope: Scope, node: fx.Node) -> None:
        with self.make.before(node, self.operators.mode(node), node):
            for arg, value in self.plan.borders[node].items():
                node.replace_input_with(arg, self._put(value, arg, scope))

    def _take_attention(self, scope: Scope, node: fx.Node) -> None:
        value = self.operators.value(node)
        if node in self.plan.packed:
            with self.make.before(node, self.operators.mode(node), node):
                self.taken[value] = scope, self._packed(scope, node)
            self.rewritten |= dict.fromkeys((*reversed(self.plan.attentions[node].site.inside), node))
            self.counts["packed"] += 1
            return
        with self.make.before(node.next, self.operators.mode(node), node):
            self.taken[value] = scope, self._take(node, self.plan.facts[value], scope)
        self.counts["attentions"] += 1

    def _packed(self, scope: Scope, node: fx.Node) -> fx.Node:
        """Attention with a document for each row of the batch."""
        make, attention = self.make, self.plan.attentions[node]
        operands = [self._found(each, scope) for each in self.plan.packed[node]]
        starts = self.starts
        if self.plan.same is not None:  # each row of the batch is a whole document
            starts = self.all_starts
            operands = [self._spread(each, self.to_all, scope) for each in operands]
        expected = value_of(node)
        operands = [
            each if value_of(each).dtype == expected.dtype else make.call(aten.to.dtype, each, expected.dtype)
            for each in operands
        ]
        is_swapped = self.domain.batch != 1  # [tokens, H, 1, D]
        if is_swapped:
            operands = [make.call(aten.transpose.int, each, 0, 2) for each in operands]
        starts, length = self._brought(starts, scope), self._brought(self.length, scope)
        implementation = "flash4" if attention.kernel == "flash4" else "flash2"
        settings = (attention.visibility.is_causal, -1, attention.site.scale, None, implementation)
        result = make.call(_glue.packed_attention.default, *operands, starts, length, *settings)
        result = make.call(aten.transpose.int, result, 0, 2) if is_swapped else result
        if self.plan.same is not None:
            result = self._spread(result, self.to_first, scope)
        return result if expected.dim() == 4 else make.call(aten.flatten.using_ints, result, 0, 1)

    def _spread(self, node: fx.Node, index: fx.Node, scope: Scope) -> fx.Node:
        return self.make.call(_glue.spread_rows.default, node, self._brought(index, scope))

    # -- between tokens and rows of them

    def _context(self, scope: Scope) -> list[fx.Node]:
        return [self._brought(each, scope) for each in (self.rows, self.numbers, self.first, self.starts)]

    def _take(self, node: fx.Node, tokens: Tokens, scope: Scope, ignored: int | None = None) -> fx.Node:
        """``[B, T, ...]`` in whatever order → the same with one row of the tokens that count."""
        make = self.make
        node, order = self._of_all(node, tokens, scope, ignored)
        if ignored is not None:
            rows, starts, seen = (self._brought(each, scope) for each in (self.rows, self.starts, self.seen))
            node = make.call(_glue.target_rows.default, node, rows, seen, starts, ignored)
        else:
            node = make.call(aten.flatten.using_ints, node, 0, 1)
            node = make.call(_glue.take_rows.default, node, *self._context(scope))
        if any(isinstance(part, Rows) for part in tokens.parts):
            node = make.call(aten.unsqueeze.default, node, 1)
        node = self._permuted(node, _inverse(order))
        if tokens.is_split:
            return node
        return make.call(aten.reshape.default, node, self._argument(taken_sizes(tokens), node, scope))

    def _of_all(self, node: fx.Node, tokens: Tokens, scope: Scope, ignored: int | None) -> tuple[fx.Node, list[int]]:
        """``[B, T, ...]`` in that order, and which of its dimensions each of ``tokens`` is."""
        make, parts = self.make, tokens.parts
        rows, span, order = _places(parts)
        missing = len(tokens.dims) - value_of(node).dim()
        for _ in range(missing):
            node = make.call(aten.unsqueeze.default, node, 0)
        if not tokens.is_split:
            sizes: list[Any] = []
            for place, dim in enumerate(tokens.dims):
                if len(dim) == 1:
                    sizes.append(make.size(node, place))
                else:
                    sizes += [self._size(part, scope) if is_token(part) else part for part in dim]
            node = make.call(aten.reshape.default, node, sizes)
        node = self._permuted(node, order)
        if rows is None:
            node = make.call(aten.unsqueeze.default, node, 0)
        others = value_of(node).dim() - 2
        batch, length = self._brought(self.batch, scope), self._brought(self.length, scope)
        node = self._widened(node, parts[span], length, others, ignored)
        return make.call(aten.expand.default, node, [batch, length, *[-1] * others]), order

    def _put(self, known: Value, old: fx.Node, scope: Scope) -> fx.Node:
        """The tensor that a reader of ``old`` finds, with zeros for tokens that are hidden."""
        where, node = self.taken[known]
        key = (known, scope, self.make.mode)
        if key in self.back:
            return self.back[key]
        make, tokens = self.make, self.plan.facts[known]
        node = self._brought(node, scope, where)
        parts = tokens.parts
        rows, span, order = _places(parts)
        if not tokens.is_split:
            counted = counted_part(tokens)
            sizes = [-1 if part is counted else 1 if is_token(part) else part for part in parts]
            node = make.call(aten.reshape.default, node, sizes)
        node = self._permuted(node, order)
        if rows is not None:
            node = make.call(aten.squeeze.dim, node, 1)
        node = make.call(_glue.put_rows.default, node, *self._context(scope))
        if self.plan.same is not None:
            node = self._spread(node, self.of, scope)
        batch, length = self._brought(self.batch, scope), self._brought(self.length, scope)
        if rows is not None:
            node = make.call(aten.unflatten.int, node, 0, [batch, length])
        if (parts[span].start, parts[span].size) != (0, self.domain.length):
            last = behind(parts[span], self.domain.length)
            end = -last if last else None
            node = make.call(aten.slice.Tensor, node, int(rows is not None), parts[span].start, end)
        node = self._permuted(node, _inverse(order))
        if not tokens.is_split:
            sizes = [self._eager_size(dim, scope) for dim in tokens.dims]
            node = make.call(aten.reshape.default, node, sizes)
        node = self._laid_out_as(value_of(old), node)
        self.back[key] = node
        return node

    def _eager_size(self, dim: Any, scope: Scope) -> Any:
        if any(isinstance(part, Span) for part in dim):
            return -1
        size = math.prod(part for part in dim if not is_token(part))
        if not any(isinstance(part, Rows) for part in dim):
            return size
        batch = self._brought(self.batch, scope)
        return batch * size if isinstance(batch, int) else (self.make.proxy(batch) * size).node

    def _size(self, part: Any, scope: Scope) -> Any:
        return self._brought(self.batch, scope) if isinstance(part, Rows) else -1

    def _permuted(self, node: fx.Node, order: list[int]) -> fx.Node:
        return node if order == sorted(order) else self.make.call(aten.permute.default, node, order)

    def _widened(self, node: fx.Node, span: Span, length: Any, others: int, ignored: int | None) -> fx.Node:
        """``[B, span, ...]`` to all tokens: the others have numbers of one in the span, and labels that are ignored."""
        if (span.start, span.size) == (0, self.domain.length) or value_of(node).shape[1] == 1:
            return node
        make = self.make
        if ignored is None:
            places = make.proxy(make.call(torch.arange, length, device=value_of(node).device)) - span.start
            last = (make.proxy(node).size(1) - 1).node if not isinstance(span.size, int) else span.size - 1
            return make.call(aten.index_select.default, node, 1, places.clamp(0, last).node)
        last = behind(span, self.domain.length)
        return make.call(aten.constant_pad_nd.default, node, [0, 0] * others + [span.start, last], ignored)

    def _laid_out_as(self, expected: torch.Tensor, node: fx.Node) -> fx.Node:
        layout = layout_of(expected) if expected.dim() <= 5 else None
        if layout is None or has_layout(value_of(node), layout):
            return node
        node = self.make.call(aten.permute.default, node, list(layout))
        node = self.make.call(aten.contiguous.default, node)
        return self.make.call(aten.permute.default, node, _inverse(list(layout)))

    # -- what is left

    def erase(self) -> int:
        """Erase what was written anew, and what was written for nothing.

        Raises:
            GlueInvariantError: something still reads the result of a body as it was.
        """
        inputs = [each for scope in self.numbering.scopes if scope.call for each in scope.call.placeholders]
        left, before = list(self.rewritten), -1
        while len(left) != before:  # what bodies do not take any more may have been all that used others
            before = len(left)
            for node in (each for scope in self.numbering.scopes for each in reversed(scope.graph.nodes)):
                if not node.users and is_call(node) and (node in self.rewritten or node not in self.old):
                    node.graph.erase_node(node)
            calls = [each for each in self.old if not each._erased and is_call(each)]
            erase_dead(self.numbering, [*(each for each in inputs if not each._erased), *calls])
            left = [each for each in left if not each._erased]
        for old in self.changed:
            if old is not None and not old._erased and old.users:
                raise GlueInvariantError(f"'{next(iter(old.users))}' reads '{old.name}', which holds other rows now")
        return sum(each._erased and is_call(each) for each in self.old)


def _places(parts: tuple[Any, ...]) -> tuple[int | None, int, list[int]]:
    """Of rows and span; and all places, those two first."""
    rows = next((i for i, part in enumerate(parts) if isinstance(part, Rows)), None)
    span = next(i for i, part in enumerate(parts) if isinstance(part, Span))
    return rows, span, sorted(range(len(parts)), key=lambda i: (i != rows, i != span))


def _inverse(order: list[int]) -> list[int]:
    return [order.index(i) for i in range(len(order))]
