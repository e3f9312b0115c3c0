"""What a graph of a training step holds on the device where it computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx

from glue_compiler.fx.storage_roots import storage_root
from glue_compiler.fx.values import most_bytes, tensors_in, value_of


def device_of(inputs: Sequence[fx.Node]) -> torch.device | None:
    """Where a graph of these inputs computes: with some on the host too, on the other device."""
    devices = [tensor.device for node in inputs for tensor in tensors_in(value_of(node))]
    return next((device for device in devices if device.type != "cpu"), devices[0] if devices else None)


def bytes_counter(inputs: Sequence[fx.Node], shape_env: object) -> Callable[[fx.Node], int]:
    """Bytes of a node's value on :func:`device_of` the inputs: where sizes are dynamic, those of the trace; where they
    are known only when the graph runs, upper bounds, and 0 without one (:func:`of_unknown_size`)."""
    device = device_of(inputs)

    def nbytes(node: fx.Node) -> int:
        value = value_of(node)
        if not isinstance(value, torch.Tensor) or value.device != device:
            return 0
        return most_bytes(value, shape_env) or 0

    return nbytes


def of_unknown_size(graph: fx.Graph, shape_env: object) -> list[fx.Node]:
    """The nodes that make a tensor whose size has no bound before the graph runs."""
    made = (node for node in graph.nodes if node.op == "call_function" and storage_root(node) is node)
    return [n for n in made if any(most_bytes(tensor, shape_env) is None for tensor in tensors_in(value_of(n)))]
