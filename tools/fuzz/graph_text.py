"""A captured graph as a program that Python can run, so that a graph that fails becomes a script."""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

import torch
from torch import fx

from glue_compiler.compat.switches import ENTER_AUTOCAST, EXIT_AUTOCAST
from glue_compiler.fx.bodies import CHECKPOINT
from tools.fuzz.graphs import Template
from tools.fuzz.programs import Call, Program, Statement
from tools.fuzz.twists import OPERATORS

_CHECKS = ("_assert_scalar", "_check", "sym_constrain_range", "_assert_async", "_log_api_usage_once")


def program_of(gm: fx.GraphModule, template: Template) -> Program:
    """A program whose function computes what ``gm`` does, for the inputs of ``template``."""
    prelude: list[Statement] = []
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    body, outputs = _statements(gm, prelude)
    given = {template.program.inputs[position]: name for position, name in zip(template.order, names, strict=True)}
    renamed = tuple(Statement(f"{new} = {old}") for old, new in given.items() if old != new)
    return dataclasses.replace(
        template.program,
        prelude=(*template.program.prelude, Statement(OPERATORS.strip()), *prelude),
        body=(*renamed, *body),
        outputs=tuple(outputs),
        calls=(Call("fresh", 1), Call("fresh", 2)),
    )


def _statements(gm: fx.GraphModule, prelude: list[Statement]) -> tuple[tuple[Statement, ...], list[str]]:
    blocks: list[list[Statement]] = [[]]
    headers: list[str] = []
    outputs: list[str] = []
    for node in gm.graph.nodes:
        if node.op == "output":
            returned = node.args[0]
            outputs = [_text(value) for value in (returned if isinstance(returned, tuple | list) else [returned])]
        elif node.target is ENTER_AUTOCAST:
            device, dtype, enabled, _ = node.args
            headers.append(f"with torch.autocast({device!r}, dtype={dtype}, enabled={enabled}):")
            blocks.append([])
        elif node.target is EXIT_AUTOCAST:
            block = tuple(blocks.pop())
            blocks[-1].append(Statement(headers.pop(), block))
        elif node.op == "get_attr":
            _attribute(gm, node, prelude)
        elif node.op != "placeholder" and not any(check in str(node.target) for check in _CHECKS):
            blocks[-1].append(Statement(_line(node)))
    while headers:
        block = tuple(blocks.pop())
        blocks[-1].append(Statement(headers.pop(), block))
    return tuple(blocks[0]), outputs


def _attribute(gm: fx.GraphModule, node: fx.Node, prelude: list[Statement]) -> None:
    value = getattr(gm, str(node.target))
    if isinstance(value, fx.GraphModule):
        inner, outputs = _statements(value, prelude)
        arguments = ", ".join(n.name for n in value.graph.find_nodes(op="placeholder"))
        end = Statement(f"return ({', '.join(outputs)}, )")
        prelude.append(Statement(f"def {node.name}({arguments}):", (*inner, end)))
    else:
        prelude.append(Statement(f"{node.name} = torch.tensor({value.tolist()!r}, dtype={value.dtype})"))


def _line(node: fx.Node) -> str:
    arguments = [_text(arg) for arg in node.args]
    named = [f"{key}={_text(value)}" for key, value in node.kwargs.items()]
    if node.op == "call_method":
        return f"{node.name} = {arguments[0]}.{node.target}({', '.join(arguments[1:] + named)})"
    if node.target is operator.setitem:
        return f"{arguments[0]}[{arguments[1]}] = {arguments[2]}"
    if node.target is operator.getitem:
        return f"{node.name} = {arguments[0]}[{arguments[1]}]"
    if node.target is torch._C._set_grad_enabled:
        return f"torch.set_grad_enabled({arguments[0]})"
    if node.target is CHECKPOINT:
        return f"{node.name} = checkpoint({', '.join(arguments)}, use_reentrant=False)"
    if "sym_size" in str(node.target):
        return f"{node.name} = {arguments[0]}.size({arguments[1]})"
    return f"{node.name} = {_function(node.target)}({', '.join(arguments + named)})"


def _function(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return f"torch.ops.{target}"
    name = fx.node._get_qualified_name(target)
    return name.replace("_operator.", "operator.").replace("torch._C._nn.one_hot", "F.one_hot")


def _text(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, tuple):
        return f"({''.join(_text(item) + ', ' for item in value)})"
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, slice):
        return f"slice({_text(value.start)}, {_text(value.stop)}, {_text(value.step)})"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    return "..." if value is Ellipsis else repr(value)
