"""Reading many numbers of one tensor: one copy to the host instead of a wait for each of them."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from glue_compiler.fx.values import inputs_of, value_of


def read_together(graph: fx.Graph, fake_mode: Any) -> None:
    """Let ``.item()`` of several elements of one device tensor read one host copy of it, in place.

    A captured ``tensor.tolist()`` is an index and an ``.item()`` for each element.

    Args:
        fake_mode: the mode of the graph's example values.
    """
    for node in list(graph.nodes):
        value = value_of(node)
        if not isinstance(value, torch.Tensor) or value.device.type == "cpu":
            continue
        elements = [user for user in node.users if _is_read_element(user, node)]
        if len(elements) < 2:
            continue
        after = node if node.op != "placeholder" else inputs_of(graph)[-1]
        with graph.inserting_after(after):
            host = graph.call_method("cpu", (node,))
        with fake_mode:
            host.meta["example_value"] = value.cpu()
            for element in elements:
                element.args = (host, index := element.args[1])
                element.meta["example_value"] = host.meta["example_value"][index]


def _is_read_element(user: fx.Node, tensor: fx.Node) -> bool:
    """Is it ``tensor[integer]``, used by ``.item()`` alone?"""
    return (
        user.target is operator.getitem
        and user.args[0] is tensor
        and isinstance(user.args[1], int)
        and bool(user.users)
        and all(reader.op == "call_method" and reader.target == "item" for reader in user.users)
    )
