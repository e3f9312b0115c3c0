"""Graphs as Python files that can be read, diffed and run."""

from __future__ import annotations

import re
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from glue_compiler import compat
from glue_compiler.compat import layers
from glue_compiler.fx import bodies
from glue_compiler.fx.training_pair import TrainingPair
from glue_compiler.fx.values import Symbolic, expression, is_plain, value_of

_HEADER = '''"""A graph that Dynamo captured, written by glue.

Runs alone: `python {{this file}}` calls the graph on random inputs of the recorded shapes.
"""

import torch
from torch import device, inf, nan
{imports}
'''

HELPERS = '''
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

GRAPHS = "# The graph, its bodies first."

_STEP = '''Backward = GraphModule

saved = {saved}
taken = {taken}


def training_step(*inputs):
    """Takes the forward's inputs, then the gradients of its outputs. Returns outputs, then gradients."""
    results = Forward()(*inputs[:{inputs}])
    values = dict(zip(saved, results[{outputs}:]))
    gradients = iter(inputs[{inputs}:])
    returned = Backward()(*(values[name] if name in values else next(gradients) for name in taken))
    return (*results[:{outputs}], *returned)
'''

_MAIN = """

def make_graph():
    return {graph}


def make_inputs():
    return [
{inputs}
    ]


if __name__ == "__main__":
    torch.manual_seed(0)
    outputs = make_graph()(*make_inputs())
    for i, output in enumerate(outputs if isinstance(outputs, (tuple, list)) else [outputs]):
        shown = tuple(output.shape) if isinstance(output, torch.Tensor) else output
        print(f"output {{i}}: {{shown}}")
"""


def render_graph(gm: fx.GraphModule) -> str:
    """``gm`` and its bodies as one Python file."""
    imports: dict[str, str] = {}
    classes = _render_classes(gm, imports)
    return _file(imports, classes, "GraphModule()", gm.graph.find_nodes(op="placeholder"))


def render_pair(pair: TrainingPair) -> str:
    """The graphs of a training step as one Python file. What runs them takes the gradients of the outputs too."""
    imports: dict[str, str] = {}
    classes = [*_render_classes(pair.forward, imports), "Forward = GraphModule\n"]
    classes += _render_classes(pair.backward, imports)
    inputs, taken = (gm.graph.find_nodes(op="placeholder") for gm in (pair.forward, pair.backward))
    saved = [value.name if isinstance(value, fx.Node) else None for value in pair.returned[pair.num_outputs :]]
    gradients = [node for node in taken if node.name not in saved]
    names = [node.name for node in taken]
    classes.append(_STEP.format(inputs=len(inputs), outputs=pair.num_outputs, saved=saved, taken=names))
    return _file(imports, classes, "training_step", [*inputs, *gradients])


def _file(imports: dict[str, str], classes: Sequence[str], graph: str, inputs: Sequence[fx.Node]) -> str:
    header = _HEADER.format(imports="\n".join(imports.values()))
    listed = "\n".join(f"        {_input(node)},  # {node.name}: {type(value_of(node)).__name__}" for node in inputs)
    return f"{header}{HELPERS}{GRAPHS}\n\n" + "\n\n".join(classes) + _MAIN.format(graph=graph, inputs=listed)


def _render_classes(gm: fx.GraphModule, imports: dict[str, str]) -> list[str]:
    """``gm`` as the class ``GraphModule``, behind its bodies."""
    modules = {path: module for path, module in gm.named_modules() if isinstance(module, fx.GraphModule)}
    names = {id(module): path.replace(".", "_") if path else "GraphModule" for path, module in modules.items()}
    return [_render_class(module, names, imports) for module in reversed(modules.values())]


def _render_class(gm: fx.GraphModule, modules: dict[int, str], imports: dict[str, str]) -> str:
    code = gm.graph.python_code("self", verbose=True)
    for name, value in code.globals.items():
        if statement := _import(name, value):
            imports[name] = statement
    if any(getattr(node.target, "namespace", None) == "glue" for node in gm.graph.nodes):
        imports["glue_compiler.ops"] = "import glue_compiler.ops, glue_compiler.ops.offload  # torch.ops.glue"
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
    if isinstance(value, torch.Generator):  # flash attention that is recomputed on a GPU takes one
        return f"torch.Generator({str(value.device)!r})"
    if value is None or type(value) in (bool, int, float, complex, str):
        return repr(value)
    return "None"  # the comment beside it names the type


def _random(tensor: torch.Tensor) -> str:
    shape, stride = tuple(map(_hint, tensor.shape)), tuple(map(_hint, tensor.stride()))
    needs_grad = tensor.requires_grad and tensor.is_leaf
    return f"random_tensor({shape}, {stride}, {tensor.dtype}, {str(tensor.device)!r}, {needs_grad})"


def _hint(number: Any) -> int:
    if not isinstance(number, Symbolic):
        return int(number)
    bound = compat.upper_bound(expression(number), number.node.shape_env)
    return 2 if bound is None else bound
