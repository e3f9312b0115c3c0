"""Inputs that a pass gives a graph: what AOTAutograd wants to know of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def set_sourceless(placeholder: fx.Node) -> None:
    """Mark a placeholder that no value of the user's stands behind; AOTAutograd asks every placeholder for its source.

    None is what the DDP optimizer leaves on the inputs of its pieces (2.11 to 2.15).
    """
    placeholder._dynamo_source = None


def all_have_sources(gm: fx.GraphModule) -> bool:
    """Is ``gm`` all that Dynamo captured? A piece of it, as of the DDP optimizer, is given what others have made."""
    return all(getattr(node, "_dynamo_source", None) is not None for node in gm.graph.find_nodes(op="placeholder"))


def example_input(value: Any) -> Any:
    """A fake tensor (or a symbol) of a captured graph as an example input for the compiler.

    Must be called while a backend runs. AOTAutograd then works in another FakeTensorMode than the nodes' own, with the
    same ShapeEnv; it would give a tensor of a foreign mode new symbols (2.13), or refuse it (2.11).
    """
    context = torch._guards.TracingContext.try_get()
    if not isinstance(value, torch.Tensor) or context is None or context.fake_mode is None:
        return value
    with context.fake_mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def subclass_of(placeholder: fx.Node) -> str | None:
    """The name of the input's class, if it is one of a user's that takes part in calls of operators; else None.

    Dynamo traces what such a class does with torch functions, and hands its objects to the compiled graph.
    """
    example = getattr(placeholder.meta.get("grapharg"), "example", None)
    if not isinstance(example, torch.Tensor) or type(example) in (torch.Tensor, torch.nn.Parameter):
        return None
    kind: Any = type(example)
    is_passive = kind.__torch_function__ is torch._C._disabled_torch_function_impl
    return None if is_passive and not hasattr(kind, "__tensor_flatten__") else kind.__name__
