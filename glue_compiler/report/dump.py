"""Graphs as Python files that can be read, diffed and run."""

from __future__ import annotations

import difflib
import re
import types
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from glue_compiler.compat import layers, operators, symbols
from glue_compiler.fx import bodies
from glue_compiler.fx.training_pair import TrainingPair
from glue_compiler.fx.values import Symbolic, expression, inputs_of, is_call, is_plain, tensors_in, value_of, values_of
from glue_compiler.ops.known_masks import KNOWN, MaskKind
from glue_compiler.report.dump_template import GRAPHS, HEADER, HELPERS, MAIN, STEP


def render(graph: fx.GraphModule | TrainingPair) -> str:
    """A graph, or the graphs of a training step, as one Python file."""
    return render_pair(graph) if isinstance(graph, TrainingPair) else render_graph(graph)


def render_graph(gm: fx.GraphModule) -> str:
    """``gm`` and its bodies as one Python file, with the autocast and the grad mode of now: those of the capture."""
    imports: dict[str, str] = {}
    classes = _render_classes(gm, imports)
    return _file(imports, classes, "GraphModule()", inputs_of(gm.graph), _modes(gm))


def render_pair(pair: TrainingPair) -> str:
    """The graphs of a training step as one Python file. What runs them takes the gradients of the outputs too."""
    imports: dict[str, str] = {}
    classes = [*_render_classes(pair.forward, imports), "Forward = GraphModule\n"]
    classes += _render_classes(pair.backward, imports)
    inputs, taken = (inputs_of(gm.graph) for gm in (pair.forward, pair.backward))
    saved = [value.name if isinstance(value, fx.Node) else None for value in pair.returned[pair.num_outputs :]]
    gradients = [node for node in taken if node.name not in saved]
    names = [node.name for node in taken]
    classes.append(STEP.format(inputs=len(inputs), outputs=pair.num_outputs, saved=saved, taken=names))
    return _file(imports, classes, "training_step", [*inputs, *gradients])


def graphs_in(text: str) -> str:
    """The graphs of a dumped file, without what runs them."""
    return text.partition(GRAPHS)[2].partition("\n\ndef make_graph")[0].strip()


def difference(before: str, after: str, context: int = 3) -> Iterator[str]:
    """Lines of a unified diff, with ``context`` equal lines around a change."""
    return difflib.unified_diff(before.splitlines(), after.splitlines(), "before", "after", n=context, lineterm="")


def _modes(gm: fx.GraphModule) -> list[str]:
    values = values_of(gm.graph.nodes)
    devices = dict.fromkeys(["cpu", *(tensor.device.type for tensor in tensors_in(values))])
    found = [
        f"torch.autocast({device!r}, {torch.get_autocast_dtype(device)})"
        for device in devices
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    ]
    return found if torch.is_grad_enabled() else [*found, "torch.no_grad()"]


def _file(
    imports: dict[str, str],
    classes: Sequence[str],
    graph: str,
    inputs: Sequence[fx.Node],
    modes: Sequence[str] = (),
) -> str:
    header = HEADER.format(imports="\n".join(imports.values()))
    listed = "\n".join(f"        {_input(node)},  # {node.name}: {type(value_of(node)).__name__}" for node in inputs)
    main = MAIN.format(graph=graph, inputs=listed, modes=", ".join(modes))
    return f"{header}{HELPERS}{GRAPHS}\n\n" + "\n\n".join(classes) + main


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
    for name in (name for node in gm.graph.nodes for name in operators.operators_in(node.target)):
        imports.setdefault(name, _registration(name))
    for node in gm.graph.nodes:
        if module := operators.inductors_own_in(node.target):
            imports[module] = f"import {module}"
    init = ["super().__init__()"]
    for node in gm.graph.find_nodes(op="get_attr"):
        value = bodies.attribute_of(gm, node)
        line = f"self.{node.target} = {_attribute(value, modules)}"
        if "." not in str(node.target) and line not in init:
            init.append(line)
    # Removing a policy from a checkpoint changes what is saved, not what is computed.
    source = code.src.replace("torch.ops.higher_order.tag_activation_checkpoint(", "checkpoint_body(")
    source = source.replace("torch.ops.higher_order.autograd_function_apply(", "autograd_function(")
    source = _with_layers(source, gm)
    body = "\n".join(f"    {line}" if line.strip() else "" for line in source.strip().splitlines())
    lines = "\n".join(f"        {line}" for line in init)
    return f"class {modules[id(gm)]}(torch.nn.Module):\n    def __init__(self):\n{lines}\n\n{body}\n"


def _with_layers(source: str, gm: fx.GraphModule) -> str:
    """A comment names the layer of the statements below it, wherever it changes."""
    layer_by_name = {node.name: layers.layer_of(node) for node in gm.graph.nodes if is_call(node)}
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


def _registration(name: str) -> str:
    """What makes an operator known, or says what is missing."""
    if name.startswith("glue::"):
        return "import glue_compiler.ops, glue_compiler.ops.offload  # torch.ops.glue"
    if module := operators.registering_module(name):
        return f"import {module}  # torch.ops.{name.replace('::', '.')}"
    namespace, _, short = name.partition("::")
    place = operators.registered_at(name)
    message = f"this graph calls {name}{f', registered at {place}' if place else ''}: import what registers it first"
    return f"if not hasattr(torch.ops.{namespace}, {short!r}):\n    raise ImportError({message!r})"


def _attribute(value: Any, modules: dict[int, str]) -> str:
    if isinstance(value, fx.GraphModule):
        return f"{modules[id(value)]}()"
    if isinstance(value, torch.Tensor):
        if value.numel() <= 64 and symbols.is_real(value):
            return f"torch.tensor({_literal(value.tolist())}, dtype={value.dtype}, device={str(value.device)!r})"
        return _random(value, _seed(value))
    return "None"


def _literal(value: Any) -> str:
    """What gives the value back: ``repr`` of a complex number that is not finite does not."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_literal, value))}]"
    return f"complex({value.real!r}, {value.imag!r})" if isinstance(value, complex) else repr(value)


def _seed(constant: torch.Tensor) -> int:
    """Equal for a tensor in every graph that has it, under whatever name."""
    described: list[object] = [constant.dtype, *map(_hint, constant.shape)]
    if symbols.is_real(constant) and constant.layout is torch.strided:
        places = torch.linspace(0, constant.numel() - 1, 64).long()
        described.append(constant.detach()[torch.unravel_index(places, constant.shape)].tolist())
    return zlib.crc32(repr(described).encode())


def _input(node: fx.Node) -> str:
    value = value_of(node)
    if isinstance(value, torch.Tensor) and is_plain(value):
        kind = node.meta.get(KNOWN)
        return _random(value) if kind is None else _known_mask(value, kind)
    if isinstance(value, Symbolic):
        return str(_hint(value))
    if isinstance(value, torch.Generator):  # flash attention that is recomputed on a GPU takes one
        return f"torch.Generator({str(value.device)!r})"
    if value is None or type(value) in (bool, int, float, complex, str):
        return _literal(value)
    return "None"  # the comment beside it names the type


def _random(tensor: torch.Tensor, seed: int | None = None) -> str:
    shape, stride = tuple(map(_hint, tensor.shape)), tuple(map(_hint, tensor.stride()))
    needs_grad = tensor.requires_grad and tensor.is_leaf
    seeded = "" if seed is None else f", {seed}"
    return f"random_tensor({shape}, {stride}, {tensor.dtype}, {str(tensor.device)!r}, {needs_grad}{seeded})"


def _known_mask(mask: torch.Tensor, kind: MaskKind) -> str:
    documents = 7 if kind.has_documents else None
    hidden = None if kind.hidden is None else f"float('{kind.hidden}')"
    settings = f"{documents}, {kind.is_causal}, {kind.window}, {hidden}, {kind.has_padding}"
    return f"known_mask({tuple(map(_hint, mask.shape))}, {mask.dtype}, {str(mask.device)!r}, {settings})"


def _hint(number: Any) -> int:
    if not isinstance(number, Symbolic):
        return int(number)
    bound = symbols.upper_bound(expression(number), number.node.shape_env)
    return 2 if bound is None else bound
