"""Which operators of a graph are written for rows of tokens, and where tokens are put back. Reads only."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from glue_compiler.fx.effects import Kind
from glue_compiler.fx.flow import Refused
from glue_compiler.fx.normal import LISTS
from glue_compiler.fx.operators import OWN, UNTRACKED, Call, Operators, Value, given_leaves
from glue_compiler.fx.value_numbering import Scope
from glue_compiler.fx.values import (
    StorageKey,
    Symbolic,
    expression,
    is_call,
    leaves,
    makes_tensor,
    storages_of,
    value_of,
)
from glue_compiler.passes.drop_padding.domain import Attention, Domain
from glue_compiler.passes.drop_padding.functions import is_function, operands_of, result_for_tokens
from glue_compiler.passes.drop_padding.picks import picks_single_tokens
from glue_compiler.passes.drop_padding.rules import begins, rule_of
from glue_compiler.passes.drop_padding.steps import Entering, Reading, Same, Step, require_views
from glue_compiler.passes.drop_padding.token_facts import Tokens, is_token, plain, symbols_in
from glue_compiler.passes.specialize_attention.mask_reader import MaskReader

aten = torch.ops.aten


@dataclass
class Plan:
    """What is to be written.

    Attributes:
        facts: where tokens are in values, those of bodies too.
        steps: of each node that is written, what takes the place of its values, in order.
        attentions: of tokens. packed: those that are computed of the tokens that count; others' results are taken.
        borders: nodes that find tokens put back in what they take: in which operands, and of which values.
        results: of calls of bodies, those with tokens: (value, what the body returns, its place).
        functions: autograd functions, and which operand of theirs has tokens.
        begun: where tokens begin.
        same: of ``share_prefixes``; None: each row's tokens are computed. earlier: nodes to move in front of them.
    """

    domain: Domain
    facts: dict[Value, Tokens] = field(default_factory=dict)
    steps: dict[fx.Node, list[tuple[Value, Step | Same]]] = field(default_factory=dict)
    attentions: dict[fx.Node, Attention] = field(default_factory=dict)
    packed: dict[fx.Node, tuple[Value, ...]] = field(default_factory=dict)
    borders: dict[fx.Node, dict[fx.Node, Value]] = field(default_factory=dict)
    results: dict[fx.Node, list[tuple[Value, Value, int]]] = field(default_factory=dict)
    functions: dict[fx.Node, tuple[int, Value]] = field(default_factory=dict)
    begun: tuple[fx.Node, ...] = ()
    same: tuple[Entering, ...] | None = None
    earlier: tuple[fx.Node, ...] = ()


def plan_rows(reader: MaskReader, domain: Domain, *, in_layers: bool = False) -> Plan:
    """What to write for the tokens that count.

    Args:
        in_layers: inputs may be results of another such graph, which has zeros in them.

    Raises:
        Refused: something reads tokens that are hidden, in a way that shows.
    """
    others: set[fx.Node] = set()
    while True:
        planner = _Planner(reader, domain, others, knows_inputs=not in_layers and not domain.is_given)
        planner.read(reader.operators.numbering.root)
        if domain.is_given or not (found := planner.unattended()):
            break
        others |= found
    planner.check()
    planner.plan.begun = tuple(planner.begun)
    return planner.plan


class _Planner:
    """``others``: where tokens begin that are not under the mask. ``knows_inputs``: hidden inputs are eager's."""

    def __init__(self, reader: MaskReader, domain: Domain, others: Collection[fx.Node], *, knows_inputs: bool) -> None:
        self.reader, self.domain = reader, domain
        self.operators: Operators = reader.operators
        self.numbering = reader.operators.numbering
        self.plan = Plan(domain)
        self.others, self.begun, self.knows_inputs = others, dict[fx.Node, None](), knows_inputs
        self.written: dict[StorageKey, fx.Node] = {}
        self.unfollowed: set[StorageKey] = set()
        self.inside = {node for each in domain.attentions.values() for node in each.site.inside}

    def tokens_of(self, value: Any) -> Tokens | None:
        found = resolved(value, self.plan.facts, self.operators)
        return None if found is None else self.plan.facts[found]

    def _resolved(self, value: Value) -> Value:
        found = resolved(value, self.plan.facts, self.operators)
        assert found is not None
        return found

    def check(self) -> None:
        kept = self.numbering.inputs | self.numbering.returned | self.unfollowed
        for storage, node in self.written.items():
            if storage in kept:
                raise Refused("it writes to memory that others see", node)
        if not self.plan.attentions and not self.domain.is_given:
            raise Refused("no attention under the padding mask was reached from token ids or embeddings")

    def unattended(self) -> set[fx.Node]:
        """Where tokens begin that are not those of the keys of any attention under the padding mask.

        A mask hides keys. Of queries that are other tokens, as of a decoder, it says nothing.
        """
        waiting = [self.operators.read(each.site.key, node) for node, each in self.plan.attentions.items()]
        seen, found = set[Value](), set(self.begun)
        while waiting:
            value = resolved(waiting.pop(), self.plan.facts, self.operators)
            if value is None or value in seen:
                continue
            seen.add(value)
            found.discard(value.node)
            if value.node in self.plan.results:
                waiting += [inner for result, inner, _ in self.plan.results[value.node] if result == value]
            elif value.node in self.plan.attentions:  # its rows are the query's
                waiting.append(self.operators.read(self.plan.attentions[value.node].site.query, value.node))
            elif value.node not in self.begun:
                waiting += self._read_tokens(value.node)
        root = self.numbering.root.graph
        return {node for node in found if node.graph is root}

    # -- in the order in which nodes run

    def read(self, scope: Scope) -> None:
        bodies = scope.bodies
        if scope.parent is None:
            self._begin(scope)
        for node in scope.graph.nodes:
            if node in bodies:
                self.read(bodies[node])
                self._take_results(node, bodies[node])
            elif node in self.inside or (node in self.domain.attentions and self._attends(node)):
                continue
            elif is_call(node):
                self._read_node(node)
            elif node.op == "output" and scope.parent is None:
                self._put_back_for(node)

    def _begin(self, scope: Scope) -> None:
        """Embeddings that the graph is given, if it is not given ids; or those alone that are computed elsewhere."""
        if not self.domain.is_given and any(
            self.operators.dispatches(node, {aten.embedding}) and self._begins(node) for node in self.numbering.nodes
        ):
            return
        whole = self.domain.whole
        for node in scope.graph.nodes:
            value = value_of(node)
            if node.op != "placeholder" or not self.operators.is_tensor(Value(node)) or not value.is_floating_point():
                continue
            shape = self.operators.shape(Value(node))
            is_meant = node in self.domain.given if self.domain.is_given else node not in self.others
            is_rank = len(shape) > 2 if self.domain.is_given else len(shape) == 3
            if is_meant and is_rank and shape[:2] == (self.domain.batch, self.domain.length):
                self.begun[node] = None
                self.plan.facts[Value(node)] = Tokens((*whole.dims, *map(plain, shape[2:])))

    def _begins(self, node: fx.Node) -> bool:
        if self.domain.is_given or node in self.others or not is_call(node):
            return False
        calls = self.operators.calls(node) or ()
        found = any(begins(self._reading(node, i, 0, c)) for i, c in enumerate(calls))
        self.begun |= dict.fromkeys([node] if found else [])
        return found

    def _read_tokens(self, node: fx.Node) -> list[Value]:
        """The values with tokens that ``node`` reads."""
        found = []
        for arg, leaf in given_leaves(node):
            value = self.operators.read(arg, node, leaf)
            if value.step == UNTRACKED:
                self.unfollowed |= storages_of(value_of(arg))
            elif self.tokens_of(value) is not None:
                found.append(value)
        return found

    def _take_results(self, node: fx.Node, scope: Scope) -> None:
        output = scope.graph.output_node()
        returned: Any = output.args[0]
        for place, each in enumerate(returned if isinstance(returned, tuple | list) else ()):
            if isinstance(each, fx.Node) and makes_tensor(each):
                value = self.operators.read(each, output)
                if (tokens := self.tokens_of(value)) is not None:
                    result = Value(node, OWN, place)
                    self.plan.facts[result] = tokens
                    self.plan.results.setdefault(node, []).append((result, value, place))
        if self.tokens_of(Value(node)) is None and not isinstance(returned, tuple | list):
            raise Refused("a body gives no tuple", node)

    # -- attention

    def _attends(self, node: fx.Node) -> bool:
        """Is it attention of tokens? Then it is under the padding mask."""
        attention = self.domain.attentions[node]
        site = attention.site
        found = [self.tokens_of(self.operators.read(each, node)) for each in (site.query, site.key, site.value)]
        others = [each for each in (site.bias, site.factors) if each is not None]
        others += [each.value for each in site.mask.parts] if site.mask is not None else []
        others += [self.operators.read(site.sinks, node)] if site.sinks is not None else []
        if any(self.tokens_of(each) is not None for each in others):
            raise Refused("the scores of an attention are changed by what is computed of its tokens", node)
        if all(each is None for each in found):
            if any(self._read_tokens(each) for each in (*site.inside, node)):
                raise Refused("a part of an attention reads tokens", node)
            return False
        rows, (span,) = self.domain.whole.dims
        for tokens, place in zip(found, (2, 3 if site.is_key_transposed else 2, 2), strict=True):
            wanted = {0: rows, place: (span,)}
            if tokens is None or any(
                wanted.get(i, ()) != tuple(filter(is_token, dim)) or (i in wanted and dim != wanted[i])
                for i, dim in enumerate(tokens.dims)
            ):
                raise Refused("query, key and value of an attention are not all of the tokens", node)
        if not self.domain.hides_padding(attention):
            raise Refused("an attention sees keys that the padding mask hides elsewhere", node)
        shape = self.operators.shape(self.operators.value(node))
        heads = self.operators.shape(self.operators.read(site.query, node))[1]
        first = ((*rows, *plain(heads)),) if len(shape) == 3 else (rows, plain(heads))
        self.plan.facts[self.operators.value(node)] = Tokens((*first, (span,), plain(shape[-1])))
        self.plan.attentions[node] = attention
        if attention.kernel is not None:
            given = [self._operand(each, node) for each in (site.query, site.grouped_key, site.grouped_value)]
            if all(each is not None for each in given):
                self.plan.packed[node] = tuple(each for each in given if each is not None)
                return True
        for each in (*site.inside, node):
            self._put_back_for(each)
        for whole, grouped in ((site.key, site.grouped_key), (site.value, site.grouped_value)):
            self._put_back_before_repeat(node, whole, grouped)
        return True

    def _operand(self, operand: fx.Node, node: fx.Node) -> Value | None:
        """The value with tokens ``[B, H, T, D]`` that an attention finds in an operand."""
        value = resolved(self.operators.read(operand, node), self.plan.facts, self.operators)
        if value is None:
            return None
        rows, (span,) = self.domain.whole.dims
        dims = self.plan.facts[value].dims
        places = (dims[0], dims[2]) if len(dims) == 4 else ()
        return value if places == (rows, (span,)) else None

    def _put_back_before_repeat(self, node: fx.Node, whole: fx.Node, grouped: fx.Node) -> None:
        """Heads that are repeated for the query's are put back as they were before."""
        readers = [each for each, operands in self.plan.borders.items() if whole in operands]
        if whole is grouped or not readers or not self.operators.is_kept(self.operators.value(grouped), node):
            return
        waiting = [whole]
        while waiting:
            each = waiting.pop()
            if grouped in each.all_input_nodes:
                self._put_back_for(each)
            else:
                given = each.all_input_nodes
                waiting += [arg for arg in given if self.tokens_of(self.operators.value(arg)) is not None]
        for each in readers:
            del self.plan.borders[each][whole]

    # -- operators

    def _read_node(self, node: fx.Node) -> None:
        found = self._read_tokens(node)
        if not found and not self._begins(node):
            return
        if node.target is operator.getitem and self.tokens_of(self.operators.value(node)) is not None:
            self.plan.steps[node] = []  # an item of several results
            return
        effects = self.numbering.effects[node]
        if effects.kind is Kind.ASSERT:
            raise Refused("an assertion reads tokens", node)
        if effects.kind is Kind.NOTHING or (effects.kind is Kind.PURE and not node.users):
            return
        if node in self.domain.unknown:
            raise Refused(self.domain.unknown[node], node)
        try:
            if is_function(node):
                self.plan.functions[node] = self._function(node)
            else:
                self.plan.steps[node] = list(self._steps(node))
        except Refused as refusal:
            for value in [each for each in self.plan.facts if each.node is node]:
                del self.plan.facts[value]
            if effects.writes or not self._may_read(node, found):
                raise Refused(f"{refusal.reason}, and padding is read there", node) from None
            self._put_back_for(node)
            return
        if effects.writes:
            self.written |= dict.fromkeys(effects.writes, node)

    def _function(self, node: fx.Node) -> tuple[int, Value]:
        """The operand of an autograd function that has tokens, if its result has one row for each, too."""
        read = [self.operators.read(each, node) if isinstance(each, fx.Node) else None for each in operands_of(node)]
        found = [(i, value) for i, value in enumerate(read) if value is not None and self.tokens_of(value) is not None]
        if len(found) != 1 or self._start_of(node) is not node:
            raise Refused("an autograd function does not take one operand of tokens")
        ((place, value),) = found
        tokens, whole = self.tokens_of(value), self.domain.whole.dims
        if tokens is None or tokens.dims[: len(whole)] != whole or any(map(tokens.holds, range(2, len(tokens.dims)))):
            raise Refused("an autograd function takes tokens that are not the outermost of its operand")
        result, sizes = result_for_tokens(node, place, len(whole), self.reader.operators.analysis.fake_mode)
        self.plan.facts[Value(node, OWN, result)] = Tokens((*whole, *map(plain, sizes)))
        return place, value

    def _steps(self, node: fx.Node) -> Iterator[tuple[Value, Step | Same]]:
        calls = self.operators.calls(node)
        record = self.operators.record(node)
        if calls is None or record is None:
            raise Refused(f"'{node.target}' is not looked into")
        for number, call in enumerate(calls):
            used = [each for each in leaves(list(call.arguments.values())) if isinstance(each, Value)]
            for leaf in range(len(call.recorded.results)) if call.operator in LISTS else (0,):
                value = Value(node, number, leaf)
                made = self._reading(node, number, leaf, call)
                is_of_tokens = any(self.tokens_of(each) is not None for each in used)
                is_of_tokens |= node in self.begun and begins(made)
                self._require_own_writes(call)
                if not is_of_tokens:
                    continue
                rule = rule_of(made)
                if rule is None:
                    raise Refused(f"{call.overload} is not known to compute token by token")
                try:
                    step = rule(made)
                except Refused as refusal:
                    raise Refused(f"{call.overload}: {refusal.reason}") from None
                results = (step.tokens,) if isinstance(step, Same) else step.results
                for place, tokens in enumerate(results):
                    if tokens is not None:
                        self.plan.facts[Value(node, number, leaf + place)] = tokens
                yield value, self._with_operands(node, step)

    def _require_own_writes(self, call: Call) -> None:
        """What is written for rows of tokens writes to memory of tokens alone."""
        _, given = self.operators.as_called(call)
        if any(self.tokens_of(given[name]) is None for name in call.written):
            raise Refused(f"{call.overload} writes to memory that holds no tokens")

    def _reading(self, node: fx.Node, number: int, leaf: int, call: Call) -> Reading:
        shapes = tuple(getattr(each, "shape", None) for each in call.recorded.results)
        if call.operator in LISTS:
            found = self.operators.does(Value(node, number, leaf))
            if found is None:
                raise Refused("a list that is written into")
            call, shapes, leaf = found, shapes[leaf : leaf + 1], 0
        return Reading(call, leaf, self.operators, self.tokens_of, self._shows, self.domain.whole, shapes)

    def _shows(self, value: Value, tokens: Tokens) -> Any:
        return self.domain.shows(value, tokens, self.reader)

    def _with_operands(self, node: fx.Node, step: Step | Same) -> Step | Same:
        """With nodes for sizes that are no numbers.

        Raises:
            Refused: an operand is not at hand where the step is written.
        """
        at = self._start_of(node)
        if at is not node and self.operators.mode(at) != self.operators.mode(node):
            raise Refused("it runs in another mode than what stands behind the mask")
        if isinstance(step, Same):
            return step

        def argument(each: Any) -> Any:
            value = each.value if isinstance(each, Entering) else each
            if isinstance(each, Entering):
                require_views(each.tokens)
            if isinstance(value, Value) and self.tokens_of(value) is None:
                if self.operators.operand(value, at) is None:
                    raise Refused("an operand is not in memory any more")
            elif getattr(value, "free_symbols", None):
                return self._symbol(value, at)
            return each

        arguments = {name: fx.node.map_aggregate(each, argument) for name, each in step.arguments.items()}
        return replace(step, arguments=arguments)

    def _symbol(self, symbol: Any, at: fx.Node) -> Value:
        for node in at.graph.nodes:
            if node is at:
                break
            if isinstance(value_of(node), Symbolic) and expression(value_of(node)) == symbol:
                return self.operators.value(node)
        raise Refused("a size is not known when the graph is compiled")

    def _start_of(self, node: fx.Node) -> fx.Node:
        """Before which node ``node`` is written: the tokens must be known there."""
        start = self.domain.start
        is_before = node.graph is start.graph and node < start
        return start if is_before else node

    # -- where tokens are put back

    def _put_back_for(self, node: fx.Node) -> None:
        found = {}
        for arg, leaf in given_leaves(node):
            value = self.operators.read(arg, node, leaf)
            if value.step == UNTRACKED:
                self.unfollowed |= storages_of(value_of(arg))
            known = resolved(value, self.plan.facts, self.operators)
            if known is not None and known.node.op == "placeholder":
                continue  # an input is whole
            if known is not None and makes_tensor(arg):
                require_views(self.plan.facts[known])
                shared = storages_of(value_of(arg)) & storages_of(value_of(node)) if node.op != "output" else ()
                if not self.numbering.is_unwritten_after(shared, node):
                    raise Refused("memory is written that a view of what is put back shares", node)
                self._require_same_sizes(self.plan.facts[known], arg, node)
                found[arg] = known
            elif known is not None:
                raise Refused("a list of what is computed of tokens is taken whole", node)
        if found:
            self.plan.borders[node] = found

    def _require_same_sizes(self, tokens: Tokens, arg: fx.Node, node: fx.Node) -> None:
        """Labels may have symbols of their own for the sizes of ids; what a loss of each token is read as, has them."""
        others = symbols_in(map(expression, value_of(arg).shape)) - symbols_in(tokens.shape)
        made = [each for each in leaves(value_of(node)) if node.op != "output" and isinstance(each, torch.Tensor)]
        if others & symbols_in(expression(size) for each in made for size in each.shape):
            raise Refused("sizes of inputs are not known to be equal", node)

    def _may_read(self, node: fx.Node, found: list[Value]) -> bool:
        """Does ``node`` find what it finds in eager, or one token of each row, in what is put back with zeros?"""
        found = [each for each in map(self._resolved, found) if each.node.op != "placeholder" or not self.knows_inputs]
        if all(self.plan.facts[each].is_zero for each in found):
            return True
        return picks_single_tokens(node, self.tokens_of, self.reader)


def resolved(value: Any, facts: dict[Value, Tokens], operators: Operators) -> Value | None:
    """The value with tokens that ``value`` is: itself, or what the callers of bodies pass; None if it has none."""
    while isinstance(value, Value) and value not in facts:
        value = operators.passed(value)
    return value if isinstance(value, Value) else None
