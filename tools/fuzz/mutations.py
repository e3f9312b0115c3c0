"""Random changes of a captured graph: what another program of the same kind would have looked like."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import fx

from glue_compiler.compat.switches import ENTER_AUTOCAST, EXIT_AUTOCAST
from glue_compiler.fx.bodies import CHECKPOINT

Mutation = Callable[[fx.Graph, Random], bool]
_SKIPPED = ("_assert", "_check", "sym_constrain", "sym_size", "_set_grad", "_enter_autocast", "_exit_autocast")


def mutate(gm: fx.GraphModule, random: Random) -> str | None:
    """One change of the graph of ``gm`` or of one of its bodies, in place: its name, or None if nothing was found.

    Their code stays as it was.
    """
    graphs = [gm.graph]
    for node in gm.graph.find_nodes(op="get_attr"):
        body = getattr(gm, str(node.target), None)
        if isinstance(body, fx.GraphModule):
            graphs += [body.graph] * 2
    graph = random.choice(graphs)
    chosen = random.choices(MUTATIONS, WEIGHTS)[0]
    return chosen.__name__ if chosen(graph, random) else None


def _value(node: fx.Node) -> Any:
    return node.meta.get("example_value")


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(_value(node), torch.Tensor)


def _tensors(graph: fx.Graph) -> list[fx.Node]:
    return [
        node for node in graph.nodes if node.op in ("call_function", "call_method", "placeholder") and _is_tensor(node)
    ]


def _calls(graph: fx.Graph) -> list[fx.Node]:
    return [
        node
        for node in graph.nodes
        if node.op in ("call_function", "call_method")
        and not any(part in str(node.target) for part in _SKIPPED)
        and node.target is not CHECKPOINT
    ]


def _place_after(graph: fx.Graph, node: fx.Node, random: Random, tail: bool = True) -> fx.Node:
    """A node behind which something that reads ``node`` may stand."""
    nodes = list(graph.nodes)
    first = nodes.index(node)
    last_placeholder = max((i for i, n in enumerate(nodes) if n.op == "placeholder"), default=-1)
    first = max(first, last_placeholder)
    last = len(nodes) - 2
    if first >= last:
        return nodes[first]
    # Mostly soon: what reads the value is near.
    return (
        nodes[min(last, first + int(random.expovariate(0.25)))]
        if random.random() < 0.7
        else nodes[random.randint(first, last)]
    )


def _pick(graph: fx.Graph, random: Random) -> fx.Node | None:
    """A tensor, rather one of integers or booleans."""
    found = _tensors(graph)
    if not found:
        return None
    weights = [1 if _value(node).is_floating_point() else 3 for node in found]
    return random.choices(found, weights)[0]


def write(graph: fx.Graph, random: Random) -> bool:
    """A write in place, maybe through a view."""
    node = _pick(graph, random)
    if node is None or (node.op == "placeholder" and _value(node).requires_grad):
        return False
    value = _value(node)
    place = _place_after(graph, node, random)
    with graph.inserting_after(place):
        target = node
        if random.random() < 0.35:
            target, *others = _view(graph, node, value, random)
            for other in others:
                place = other
            place = _place_after(graph, target, random) if random.random() < 0.3 else target
        with graph.inserting_after(place):
            _write_call(graph, target, value, random)
    return True


def _view(graph: fx.Graph, node: fx.Node, value: torch.Tensor, random: Random) -> list[fx.Node]:
    dims = value.dim()
    options: list[tuple[str, tuple[Any, ...]]] = [("detach", ()), ("view_as", (node,)), ("unsqueeze", (0,))]
    if dims:
        options += [("reshape", (-1,)), ("view", (-1,)), ("narrow", (0, 0, 1)), ("select", (0, 0))]
    if dims > 1:
        options += [("transpose", (0, 1)), ("flatten", ())]
    if dims and random.random() < 0.3:
        index: Any = random.choice([0, slice(None, 2), slice(1, None), (Ellipsis, slice(0, 1))])
        return [graph.call_function(operator.getitem, (node, index))]
    name, args = random.choice(options)
    return [graph.call_method(name, (node, *args))]


def _write_call(graph: fx.Graph, node: fx.Node, value: torch.Tensor, random: Random) -> None:
    if value.dtype == torch.bool:
        options: list[tuple[str, tuple[Any, ...]]] = [
            ("logical_not_", ()),
            ("fill_", (True,)),
            ("zero_", ()),
            ("bitwise_xor_", (True,)),
        ]
    elif value.is_floating_point():
        options = [("mul_", (0.5,)), ("add_", (0.25,)), ("clamp_", (-0.5, 0.5)), ("zero_", ()), ("neg_", ())]
    else:
        options = [("add_", (1,)), ("mul_", (2,)), ("clamp_", (0, 1)), ("zero_", ()), ("sub_", (1,)), ("fill_", (1,))]
    if value.dim() and random.random() < 0.25:
        index: Any = random.choice([0, -1, slice(1, None), (Ellipsis, 0), slice(None, None, 2)])
        graph.call_function(operator.setitem, (node, index, options[0][0] == "logical_not_" or 1))
        return
    name, args = random.choice(options)
    graph.call_method(name, (node, *args))


def wrap_operand(graph: fx.Graph, random: Random) -> bool:
    """An operand goes through a cast, a copy, another layout, or another order."""
    uses = [(user, node) for user in _calls(graph) for node in user.all_input_nodes if _is_tensor(node)]
    if not uses:
        return False
    user, node = random.choice(uses)
    value = _value(node)
    options: list[tuple[str, tuple[Any, ...]]] = [
        ("clone", ()),
        ("contiguous", ()),
        ("detach", ()),
        ("view_as", (node,)),
        ("type_as", (node,)),
        ("view", (value.dtype,)),
        ("to", (value.dtype,)),
    ]
    if value.dim():
        options += [("flip", (-1,)), ("roll", (1, 0))]
    chain: list[tuple[str, tuple[Any, ...]]] = [random.choice(options)]
    if random.random() < 0.5:
        if value.dtype == torch.bool:
            chain = random.choice(
                [
                    [("to", (torch.int8,)), ("to", (torch.bool,))],
                    [("logical_not", ())],
                    [("float", ()), ("bool", ())],
                    [("view", (torch.uint8,)), ("view", (torch.bool,))],
                ]
            )
        elif value.is_floating_point():
            chain = random.choice(
                [
                    [("half", ()), ("to", (value.dtype,))],
                    [("bfloat16", ()), ("double", ())],
                    [("float", ()), ("type_as", (node,))],
                    [("mul", (1,))],
                    [("neg", ())],
                    [("round", ())],
                ]
            )
        else:
            chain = random.choice(
                [
                    [("to", (torch.int8,)), ("to", (value.dtype,))],
                    [("half", ()), ("long", ())],
                    [("bool", ()), ("long", ())],
                    [("int", ())],
                    [("clamp", (0, 2))],
                    [("add", (1,))],
                    [("abs", ())],
                    [("neg", ())],
                    [("remainder", (3,))],
                ]
            )
    new = node
    with graph.inserting_before(user):
        for name, args in chain:
            new = graph.call_method(name, (new, *args))
    user.replace_input_with(node, new)
    return True


def rewire(graph: fx.Graph, random: Random) -> bool:
    """An operand becomes another value of the same shape and dtype."""
    uses = [(user, node) for user in _calls(graph) for node in user.all_input_nodes if _is_tensor(node)]
    random.shuffle(uses)
    order = {node: i for i, node in enumerate(graph.nodes)}
    for user, node in uses[:10]:
        value = _value(node)
        others = [
            other
            for other in _tensors(graph)
            if other is not node
            and order[other] < order[user]
            and _value(other).dtype == value.dtype
            and _value(other).dim() == value.dim()
            and _same_shape(_value(other), value)
        ]
        if others:
            user.replace_input_with(node, random.choice(others))
            return True
    return False


def _same_shape(left: torch.Tensor, right: torch.Tensor) -> bool:
    return [str(size) for size in left.shape] == [str(size) for size in right.shape]


_AXIS = ("dim", "axis")
_METHODS = {
    "sum",
    "cumsum",
    "any",
    "argsort",
    "softmax",
    "max",
    "eq",
    "ne",
    "ge",
    "le",
    "gt",
    "lt",
    "masked_fill",
    "where",
    "nonzero",
    "tril",
    "triu",
    "unsqueeze",
    "transpose",
    "matmul",
    "topk",
    "diff",
    "clamp",
    "index_select",
    "repeat_interleave",
}


def respell(graph: fx.Graph, random: Random) -> bool:
    """A method becomes a function, a function a method, an operand a keyword, ``dim`` becomes ``axis``."""
    found = _calls(graph)
    random.shuffle(found)
    for node in found:
        name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
        given: list[Any] = list(node.args)
        if "dim" in node.kwargs and random.random() < 0.5:
            node.kwargs = {("axis" if key == "dim" else key): value for key, value in node.kwargs.items()}
            return True
        if name not in _METHODS or not node.args or not isinstance(node.args[0], fx.Node):
            continue
        if node.op == "call_method" and hasattr(torch, name):
            node.op, node.target = "call_function", getattr(torch, name)
            if random.random() < 0.5 and len(given) == 1:
                node.args, node.kwargs = (), {"input": given[0], **node.kwargs}
            return True
        if node.op == "call_function" and node.target is getattr(torch, name, None) and name != "where":
            node.op, node.target = "call_method", name
            return True
        if name in ("cumsum", "softmax", "argsort", "sum", "any") and len(given) == 2 and isinstance(given[1], int):
            node.args, node.kwargs = tuple(given[:1]), {random.choice(_AXIS): given[1], **node.kwargs}
            return True
        if name in ("add", "sub") and "alpha" not in node.kwargs and node.op == "call_function":
            node.kwargs = {**node.kwargs, "alpha": random.choice([1, 2])}
            return True
    return False


def change_constant(graph: fx.Graph, random: Random) -> bool:
    """A number in a call becomes another."""
    found: list[tuple[fx.Node, int | str]] = []
    for node in _calls(graph):
        if node.target is operator.getitem and not _is_tensor(node.args[0]):  # type: ignore[arg-type]
            continue
        for position, arg in enumerate(node.args):
            if isinstance(arg, bool | int | float) or _has_number(arg):
                found.append((node, position))
        found += [(node, key) for key, arg in node.kwargs.items() if isinstance(arg, bool | int | float)]
    if not found:
        return False
    node, where = random.choice(found)
    if isinstance(where, int):
        args = list(node.args)
        args[where] = _other(args[where], random)
        node.args = tuple(args)
    else:
        node.kwargs = {**node.kwargs, where: _other(node.kwargs[where], random)}
    return True


def _has_number(arg: Any) -> bool:
    return isinstance(arg, tuple | list) and any(type(item) in (int, float) for item in arg)


def _other(value: Any, random: Random) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return random.choice([value + 1, value - 1, -value, 0])
    if isinstance(value, float):
        if abs(value) >= 1e9:  # what a mask adds
            return random.choice([-value, 0.0, -10.0, -1e30, -math.inf])
        return random.choice([-value, 0.0, value * 2, 1.0])
    changed = list(value)
    chosen = random.choice([i for i, item in enumerate(changed) if type(item) in (int, float)])
    changed[chosen] = _other(changed[chosen], random)
    return type(value)(changed)


def another_mode(graph: fx.Graph, random: Random) -> bool:
    """A run of nodes without gradients, or under autocast."""
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    if not nodes:
        return False
    start = random.randrange(len(nodes))
    end = min(len(nodes) - 1, start + int(random.expovariate(0.3)))
    if random.random() < 0.7:
        with graph.inserting_before(nodes[start]):
            graph.call_function(torch._C._set_grad_enabled, (False,))
        with graph.inserting_after(nodes[end]):
            graph.call_function(torch._C._set_grad_enabled, (True,))
        return True
    with graph.inserting_before(nodes[start]):
        entered = graph.call_function(ENTER_AUTOCAST, ("cpu", torch.bfloat16, True, None))
    with graph.inserting_after(nodes[end]):
        graph.call_function(EXIT_AUTOCAST, (entered,))
    return True


def compute_again(graph: fx.Graph, random: Random) -> bool:
    """A value is computed a second time, later, for some of those that use it."""
    found = [node for node in _calls(graph) if _is_tensor(node) and node.users]
    if not found:
        return False
    node = random.choice(found)
    users = [user for user in node.users if user.op != "output"]
    if not users:
        return False
    user = random.choice(users)
    with graph.inserting_before(user):
        again = graph.node_copy(node)
    user.replace_input_with(node, again)
    return True


def one_more_output(graph: fx.Graph, random: Random) -> bool:
    node = _pick(graph, random)
    output = graph.output_node()
    if node is None or not isinstance(output.args[0], tuple | list) or node in output.args[0]:
        return False
    if graph.owning_module is None or any(n.op == "placeholder" and "body" in str(n.target) for n in graph.nodes):
        return False
    output.args = ((*output.args[0], node),)
    return True


def write_out_of_sight(graph: fx.Graph, random: Random) -> bool:
    """A user's operator that writes, or that is only opaque."""
    node = _pick(graph, random)
    if node is None or (node.op == "placeholder" and _value(node).requires_grad):
        return False
    define_operators()
    place = _place_after(graph, node, random)
    with graph.inserting_after(place):
        if random.random() < 0.6:
            graph.call_function(torch.ops.fuzzed.write.default, (node,))
        else:
            new = graph.call_function(torch.ops.fuzzed.look.default, (node,))
            users = [user for user in node.users if user is not new and _is_before(graph, new, user)]
            if not users:
                return False
            random.choice(users).replace_input_with(node, new)
    return True


def _is_before(graph: fx.Graph, first: fx.Node, second: fx.Node) -> bool:
    nodes = list(graph.nodes)
    return nodes.index(first) < nodes.index(second) and second.op != "output"


def swap(graph: fx.Graph, random: Random) -> bool:
    """Two neighbours change places."""
    nodes = _calls(graph)
    pairs = [(a, b) for a, b in itertools.pairwise(nodes) if a.next is b and a not in b.all_input_nodes]
    if not pairs:
        return False
    first, second = random.choice(pairs)
    first.prepend(second)
    return True


def define_operators() -> None:
    """The operators of :data:`twists.OPERATORS`."""
    from tools.fuzz.twists import OPERATORS

    exec(OPERATORS, {"torch": torch})


MUTATIONS: tuple[Mutation, ...] = (
    write,
    wrap_operand,
    rewire,
    respell,
    change_constant,
    another_mode,
    compute_again,
    one_more_output,
    write_out_of_sight,
    swap,
)
WEIGHTS = (6, 5, 3, 3, 3, 2, 3, 1, 1, 1)
