"""Graphs as Python files that can be read, diffed and run."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from glue_compiler import compat
from glue_compiler.compat import layers
from glue_compiler.fx import bodies
from glue_compiler.fx.values import Symbolic, expression, is_plain, value_of

_HEADER = '''"""A graph that Dynamo captured, written by glue.

Runs alone: `python {{this file}}` calls the graph on random inputs of the recorded shapes.
"""

import torch
from torch import device, inf, nan
{imports}

def checkpoint_body(body, *args, **kwargs):
    """What torch.ops.higher_order.tag_activation_checkpoint stands for."""
    return torch.utils.checkpoint.checkpoint(body, *args, use_reentrant=False)


def random_tensor(shape, stride, dtype, device, requires_grad):
    size = 1 + sum((n - 1) * s for n, s in zip(shape, stride)) if all(shape) else 0
    if dtype.is_floating_point or dtype.is_complex:
        storage = torch.randn(size, device=device).to(dtype)
    else:  # small, so that an index stays inside of what it indexes
        storage = torch.randint(0, 2, (size,), device=device).to(dtype)
    return storage.as_strided(shape, stride).requires_grad_(requires_grad)


'''

_MAIN = """
def make_inputs():
    return [
{inputs}
    ]


if __name__ == "__main__":
    torch.manual_seed(0)
    outputs = GraphModule()(*make_inputs())
    for i, output in enumerate(outputs if isinstance(outputs, (tuple, list)) else [outputs]):
        shown = tuple(output.shape) if isinstance(output, torch.Tensor) else output
        print(f"output {{i}}: {{shown}}")
"""


def render_graph(gm: fx.GraphModule) -> str:
    """``gm`` and its bodies as one Python file."""
    modules = {id(module): name for module, name in _named_modules(gm)}
    imports: dict[str, str] = {}
    classes = [_render_class(module, modules, imports) for module, _ in _named_modules(gm)]
    inputs = "\n".join(f"        {_input(node)}," for node in gm.graph.find_nodes(op="placeholder"))
    header = _HEADER.format(imports="\n".join(imports.values()))
    return header + "\n\n".join(reversed(classes)) + _MAIN.format(inputs=inputs)


def _named_modules(gm: fx.GraphModule) -> Iterator[tuple[fx.GraphModule, str]]:
    for path, module in gm.named_modules():
        if isinstance(module, fx.GraphModule):
            yield module, path.replace(".", "_") if path else "GraphModule"


def _render_class(gm: fx.GraphModule, modules: dict[int, str], imports: dict[str, str]) -> str:
    code = gm.graph.python_code("self", verbose=True)
    for name, value in code.globals.items():
        if statement := _import(name, value):
            imports[name] = statement
    init = ["super().__init__()"]
    for node in gm.graph.find_nodes(op="get_attr"):
        value = bodies.attribute_of(gm, node)
        line = f"self.{node.target} = {_attribute(value, modules)}"
        if "." not in str(node.target) and line not in init:
            init.append(line)
    # Removing a policy from a checkpoint changes what is saved, not what is computed.
    source = code.src.replace("torch.ops.higher_order.tag_activation_checkpoint(", "checkpoint_body(")
    source = _with_layers(source, gm)
    body = "\n".join(f"    {line}" if line.strip() else "" for line in source.strip().splitlines())
    lines = "\n".join(f"        {line}" for line in init)
    return f"class {modules[id(gm)]}(torch.nn.Module):\n    def __init__(self):\n{lines}\n\n{body}\n"


def _with_layers(source: str, gm: fx.GraphModule) -> str:
    """A comment names the layer of the statements below it, wherever it changes."""
    layer_by_name = {node.name: layers.layer_of(node) for node in gm.graph.nodes if node.op.startswith("call_")}
    current = ""
    lines = []
    for line in source.splitlines():
        statement = re.match(r"( +)(\w+)(?:: \"[^\"]*\")? = ", line)
        layer = layer_by_name.get(statement[2], current) if statement else current
        if statement and layer != current:
            lines.append(f"{statement[1]}# Layer: {layer or 'none'}")
            current = layer
        lines.append(line)
    return "\n".join(lines)


def _import(name: str, value: Any) -> str | None:
    if name in ("torch", "device", "inf", "nan"):
        return None
    if value is type(None):
        return "NoneType = type(None)"
    if isinstance(value, types.ModuleType):
        return f"import {value.__name__} as {name}" if name != value.__name__ else f"import {name}"
    module, qualified = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module and qualified and "." not in qualified and "<" not in qualified:
        return f"from {module} import {qualified} as {name}"
    return f"{name} = None  # {value!r} cannot be imported".replace("\n", " ")


def _attribute(value: Any, modules: dict[int, str]) -> str:
    if isinstance(value, fx.GraphModule):
        return f"{modules[id(value)]}()"
    if isinstance(value, torch.Tensor):
        if value.numel() <= 64 and compat.is_real(value):
            return f"torch.tensor({value.tolist()!r}, dtype={value.dtype}, device={str(value.device)!r})"
        return _random(value)
    return "None"


def _input(node: fx.Node) -> str:
    value = value_of(node)
    if isinstance(value, torch.Tensor) and is_plain(value):
        return _random(value)
    if isinstance(value, Symbolic):
        return str(_hint(value))
    return repr(value)


def _random(tensor: torch.Tensor) -> str:
    shape, stride = tuple(map(_hint, tensor.shape)), tuple(map(_hint, tensor.stride()))
    needs_grad = tensor.requires_grad and tensor.is_leaf
    return f"random_tensor({shape}, {stride}, {tensor.dtype}, {str(tensor.device)!r}, {needs_grad})"


def _hint(number: Any) -> int:
    if not isinstance(number, Symbolic):
        return int(number)
    bound = compat.upper_bound(expression(number), number.node.shape_env)
    return 2 if bound is None else bound
