"""A training step as plain data: what it computes, how large that is and how long it takes. Changes nothing."""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import fx

from glue_compiler.compat import checkpoint_tags, graph_inputs
from glue_compiler.fx import joint_graphs
from glue_compiler.fx.device_bytes import bytes_counter
from glue_compiler.fx.fused_reads import is_pointwise
from glue_compiler.fx.storage_roots import storage_root
from glue_compiler.fx.values import Symbolic, tensors_in, value_of
from glue_compiler.passes.plan_memory.costs import Cost, Costs, is_kernel


@dataclass(frozen=True)
class Value:
    """What one node computes. Values are known by their places in the joint graph.

    Attributes:
        inputs: the places that it reads.
        root: the place of what made its memory: its own, but for views.
        nbytes: of the memory that it makes; 0 for views, symbols, and what lies on another device. Of inputs, only the
            gradients that backward gets have some: they go with their last use.
        seconds: to compute it: of products and attention their time, of what a compiler fuses the time to write it.
        scratch: bytes that its kernel takes for itself while it runs.
        is_kernel: a kernel of its own under any compiler, such as a product; others are fused.
        is_tuple: several tensors, or lists of some, which have places of their own; their bytes are counted there.
        is_pointwise: each element depends on one element of each operand alone.
        is_input: of the step; always there, whatever is planned.
        is_backward: depends on a gradient.
        is_symbol: a number; costs nothing.
        may_save, may_recompute: are both possible for this value?
        must_recompute: a selective checkpoint insists on it, as long as no later segment reads the value.
    """

    inputs: tuple[int, ...]
    root: int
    nbytes: int
    seconds: float
    scratch: int = 0
    is_kernel: bool = False
    is_tuple: bool = False
    is_pointwise: bool = False
    is_input: bool = False
    is_backward: bool = False
    is_symbol: bool = False
    may_save: bool = True
    may_recompute: bool = True
    must_recompute: bool = False


@dataclass(frozen=True)
class TrainingStep:
    """Forward and backward of one step.

    Attributes:
        values: in the order of the joint graph.
        forward: places of what the forward must compute, in order.
        outputs: places of what the forward returns; gradients: of what the backward returns.
        input_bytes: of parameters and other inputs of the forward, which are there all the time.
        regions: by place, the user's checkpointed region that computes it; those outside of any have none.
    """

    values: tuple[Value, ...]
    forward: tuple[int, ...]
    outputs: tuple[int, ...]
    gradients: tuple[int, ...]
    input_bytes: int
    regions: dict[int, int]

    @functools.cached_property
    def needed(self) -> frozenset[int]:
        """What the backward reads and does not compute itself."""
        read = {place for value in self.values if value.is_backward for place in value.inputs}
        return frozenset(
            p for p in (*read, *self.gradients) if not self.values[p].is_backward and not self.values[p].is_input
        )

    @functools.cached_property
    def realised(self) -> frozenset[int]:
        """What is in memory however a compiler fuses: what kernels read and write, and what the step returns."""
        found: set[int] = set()
        for place, value in enumerate(self.values):
            if value.is_kernel:
                found.add(place)
                found.update(self.values[read].root for read in value.inputs)
            elif self.is_element(place):
                found.add(place)
        found.update(self.values[place].root for place in (*self.outputs, *self.gradients))
        return frozenset(found)

    def kernels_before(self, order: Sequence[int]) -> list[int]:
        """How many kernels stand in front of each index of ``order``, its end included."""
        return [0, *accumulate(self.values[place].is_kernel for place in order)]

    def is_element(self, place: int) -> bool:
        """Is it one of what a kernel returns as a tuple, or of a list in there? Its bytes are counted with it."""
        roots = (self.values[self.values[read].root] for read in self.values[place].inputs)
        return any(root.is_kernel and root.is_tuple for root in roots)


def read_step(
    joint: fx.GraphModule, num_outputs: int, costs: Costs, shape_env: object
) -> tuple[TrainingStep, list[fx.Node]]:
    """The step that ``joint`` computes, and its nodes by place.

    Args:
        num_outputs: how many of the joint graph's results are the forward's.
    """
    nodes = [node for node in joint.graph.nodes if node.op != "output"]
    places = {node: place for place, node in enumerate(nodes)}
    nbytes = bytes_counter([node for node in nodes if node.op == "placeholder"], shape_env)
    backward = joint_graphs.depends_on_gradients(nodes)
    written = graph_inputs.written_inputs(joint)
    outputs, gradients = joint_graphs.results_of(joint, num_outputs)
    roots = {node: _memory_of(node) for node in nodes}
    # Of a view that a policy saves, that is its memory.
    must_save = {roots[node] for node in nodes if checkpoint_tags.explicit_policy(node) == "save"}

    values = []
    for node, root in roots.items():
        value = value_of(node)
        is_input = node.op in ("placeholder", "get_attr")
        own = nbytes(node) if root is node and (not is_input or node in backward) else 0
        must_recompute = node not in must_save and checkpoint_tags.explicit_policy(node) == "recompute"
        cost = Cost(0.0) if is_input or root is not node else costs.of(node, shape_env)
        values.append(
            Value(
                inputs=tuple(places[each] for each in node.all_input_nodes),
                root=places[root],
                nbytes=own,
                seconds=cost.seconds,
                scratch=cost.scratch,
                is_kernel=root is node and is_kernel(node),  # several views are none
                is_tuple=isinstance(value, list | tuple),
                is_pointwise=is_pointwise(node),
                is_input=is_input,
                is_backward=node in backward,
                is_symbol=isinstance(value, Symbolic),
                may_save=_is_a_tensor_of_its_own(node, root),
                may_recompute=must_recompute
                or (not (is_input or node in must_save) and _gives_the_same_again(node, root, written)),
                must_recompute=must_recompute,
            )
        )
    regions = {p: region for p, node in enumerate(nodes) if (region := checkpoint_tags.region_of(node)) is not None}
    forward = ancestors([places[node] for node in outputs], values)
    step = TrainingStep(
        tuple(values),
        tuple(sorted(forward)),
        tuple(places[node] for node in outputs),
        tuple(places[node] for node in gradients),
        sum(nbytes(node) for node in nodes if node.op == "placeholder" and node not in backward),
        regions,
    )
    return step, nodes


def _memory_of(node: fx.Node) -> fx.Node:
    """What made its memory. What an operator returns as a list is none, but each tensor in there."""
    root = storage_root(node)
    is_taken_out = node.target is operator.getitem and isinstance(value_of(node), torch.Tensor)
    return node if is_taken_out and isinstance(value_of(root), list | tuple) else root


def _is_a_tensor_of_its_own(node: fx.Node, root: fx.Node) -> bool:
    """A view is computed again from the memory that it is of; what an operator returns as a list has no other name."""
    if not isinstance(value_of(node), (torch.Tensor, *Symbolic)):
        return False
    return root is node or len(tensors_in(value_of(root))) != 1 or not isinstance(value_of(root), torch.Tensor)


def _gives_the_same_again(node: fx.Node, root: fx.Node, written: Collection[fx.Node]) -> bool:
    """In backward, too, when inputs that the step writes hold something else? A view reads nothing."""
    reads = () if root is not node else node.all_input_nodes
    return joint_graphs.may_recompute(node) and not any(storage_root(read) in written for read in reads)


def ancestors(places: Iterable[int], values: Sequence[Value]) -> set[int]:
    """The values at ``places``, and all that they are computed from."""
    found: set[int] = set()
    waiting = list(places)
    while waiting:
        place = waiting.pop()
        if place not in found:
            found.add(place)
            waiting += values[place].inputs
    return found
