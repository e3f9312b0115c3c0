"""The operator calls of a forward or a backward graph that a shared body may hold, in order."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from glue_compiler.compat import operators, rng_states
from glue_compiler.compat.symbols import unbacked_symbols
from glue_compiler.fx.values import Symbolic, expression, expressions_of, has_value, is_plain, leaves, value_of
from glue_compiler.ops.offload import TRANSFERS

_SEEDS = {"inductor_seeds", "inductor_lookup_seed"}
"""The seeds of a graph's random numbers, which each call of a body takes its own of."""


class UnknownStep(Exception):
    """Why a node is no step that a body may hold."""


@dataclass(frozen=True)
class Steps:
    """``nodes`` in order; the rest of the graph's nodes are made before any of them.

    Attributes:
        place: of each node in ``nodes``.
        closed: places of nodes that no body may hold, with the reason.
        local: for each node a number, equal for two that do the same to operands of the same kind.
        kinds: of the values of all nodes: dtypes, devices, sizes and strides; None where a body cannot take them.
        symbols: of the sizes in a node's value, where there are any.
        sizes: the graph's inputs that are a size, by its symbol.
    """

    nodes: tuple[fx.Node, ...]
    place: dict[fx.Node, int]
    closed: dict[int, str]
    local: tuple[int, ...]
    kinds: dict[fx.Node, Hashable]
    symbols: dict[fx.Node, frozenset[Any]]
    sizes: dict[Any, fx.Node]


def read_steps(graph: fx.Graph, *, random_numbers: bool) -> Steps:
    """``random_numbers``: may a body draw some? They are drawn in the order of the calls."""
    given = _common_to_layers(graph)
    nodes: list[fx.Node] = []
    place: dict[fx.Node, int] = {}
    closed: dict[int, str] = {}
    local: list[int] = []
    numbers: dict[Hashable, int] = {}
    kinds: dict[fx.Node, Hashable] = {}
    for node in _in_order(graph):
        kinds[node], problem = _kind(node)
        if node in given:
            continue
        try:
            if problem:
                raise UnknownStep(problem)
            if is_item(node) and (producer := place.get(node.all_input_nodes[0])) in closed:
                raise UnknownStep(closed[producer])
            what = _what(node, kinds, random_numbers)
        except UnknownStep as reason:
            closed[len(nodes)] = str(reason)
            what = ("closed", len(nodes))
        place[node] = len(nodes)
        nodes.append(node)
        local.append(numbers.setdefault(what, len(numbers)))
    inputs = [node for node in given if node.op == "placeholder" and isinstance(value_of(node), torch.SymInt)]
    sizes = {number: node for node in inputs if is_symbol(number := expression(value_of(node)))}
    symbols = {node: found for node in (*given, *nodes) if (found := _symbols(node))}
    return Steps(tuple(nodes), place, closed, tuple(local), kinds, symbols, sizes)


def _symbols(node: fx.Node) -> frozenset[Any]:
    numbers = expressions_of(value_of(node))
    return frozenset(s for n in numbers if isinstance(n, sympy.Basic) for s in n.free_symbols)


def is_symbol(number: Any) -> bool:
    return isinstance(number, sympy.Symbol)


def _kind(node: fx.Node) -> tuple[Hashable, str]:
    """Of the node's value; or None, and why a body cannot take it."""
    if not has_value(node):
        return None, "its value is not on record"
    try:
        return described(value_of(node)), ""
    except UnknownStep as reason:
        return None, str(reason)


def _in_order(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes but the output; the items of a result directly behind it, wherever the graph has them."""
    waiting = {node: None for node in graph.nodes if node.op != "output"}
    for first in list(waiting):
        if first not in waiting:
            continue
        stack = [first]
        while stack:
            node = stack.pop()
            if node in waiting:
                del waiting[node]
                yield node
                stack += [user for user in reversed(node.users) if is_item(user)]


def is_item(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem


def _common_to_layers(graph: fx.Graph) -> set[fx.Node]:
    """Inputs, and what is made of them alone for many layers (sizes, seeds, rotary tables): handed to bodies.

    Nothing of it depends on what a body computes, so a call may stand behind it.
    """
    place = {node: i for i, node in enumerate(graph.nodes)}
    long = len(place) // 3
    wanted: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        users = [user for user in node.users if user.op != "output"]
        name = getattr(node.target, "__name__", "").partition(".")[0]
        lives_long = bool(users) and max(map(place.__getitem__, users)) - place[node] > long
        is_number = name in _SEEDS or isinstance(value_of(node), (int, *Symbolic))
        if is_number or lives_long or (users and wanted.issuperset(users)):
            wanted.add(node)
    given: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr") or (node in wanted and given.issuperset(node.all_input_nodes)):
            given.add(node)
    return given


def _what(node: fx.Node, kinds: dict[fx.Node, Hashable], random_numbers: bool) -> Hashable:
    if not is_item(node):
        _check(node, random_numbers)
    operands = {operand: i for i, operand in enumerate(node.all_input_nodes)}

    def argument(value: Any) -> Hashable:
        if isinstance(value, fx.Node):
            if kinds[value] is None:
                raise UnknownStep("it takes what a body cannot take")
            return (operands[value], kinds[value])
        if isinstance(value, tuple | list):
            return (type(value).__name__, *map(argument, value))
        if isinstance(value, dict):
            return ("dict", *((key, argument(item)) for key, item in value.items()))
        if isinstance(value, (torch.Tensor, *Symbolic)):
            raise UnknownStep("a value is written into the graph")
        return (type(value).__name__, repr(value))

    seen = node.meta.get("eager_input_vals")  # layouts that some operators insist on
    return (node.target, argument(node.args), argument(node.kwargs), kinds[node], seen and described(seen))


def _check(node: fx.Node, random_numbers: bool) -> None:
    target, args, kwargs = rng_states.run_with_a_state(node) or (node.target, node.args, node.kwargs)
    if not isinstance(target, torch._ops.OpOverload) or node.op != "call_function":
        raise UnknownStep(f"'{target}' is no operator of torch's")
    if not operators.computes_alone(target) or node.is_impure(False):
        raise UnknownStep(f"'{target}' may do more than compute its result")
    if target in TRANSFERS:
        raise UnknownStep("a copy to or from the host runs beside what stands around it")
    counts_from_start = any(argument.name == "storage_offset" for argument in target._schema.arguments)
    tensors = (value for each in node.all_input_nodes if isinstance(value := value_of(each), torch.Tensor))
    counts_from_start |= "storage_offset" in target.__name__
    if counts_from_start and any(expression(tensor.storage_offset()) != 0 for tensor in tensors):
        raise UnknownStep(f"'{target}' counts from the start of a storage, of which a body takes a part")
    if draws_numbers(target, args, kwargs) and not random_numbers:
        raise UnknownStep(f"'{target}' draws random numbers, in an order that the compiler may change")


def draws_numbers(target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Attention without dropout does not, though its tags say so."""
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    for place, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":
            given = args[place] if place < len(args) else kwargs.get("dropout_p", argument.default_value)
            return given not in (0, 0.0)
    return True


def described(value: Any) -> Hashable:
    """Equal for two values that a body can take alike.

    Raises:
        UnknownStep: no body can take it.
    """
    found: list[Hashable] = []
    for leaf in leaves(value):
        if isinstance(leaf, torch.Tensor):
            if not is_plain(leaf):
                raise UnknownStep(f"a {type(leaf).__name__} is not read as a plain tensor")
            numbers = (*leaf.shape, *leaf.stride(), _alignment(leaf))
            found.append((leaf.dtype, leaf.device, leaf.dim(), tuple(map(_number, numbers))))
        elif isinstance(leaf, Symbolic):
            found.append((type(leaf).__name__, _number(leaf)))
        elif isinstance(leaf, _PLAIN):
            found.append((type(leaf).__name__, repr(leaf)))
        else:
            raise UnknownStep(f"a body cannot take a {type(leaf).__name__}")
    return (type(value).__name__, *found)


def _alignment(tensor: torch.Tensor) -> Any:
    """Of its first number, in bytes: compilers write other code for memory that is not aligned."""
    offset = tensor.storage_offset()
    return offset * tensor.element_size() % _ALIGNED if isinstance(offset, int) else offset


_ALIGNED = 16

_PLAIN = (
    int,
    float,
    str,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch._ops.OpOverload,
    type(None),
)


def _number(value: Any) -> Hashable:
    number: Hashable = expression(value)
    if isinstance(number, sympy.Basic) and unbacked_symbols(number):
        raise UnknownStep("its size is known only when the graph runs")
    return number
