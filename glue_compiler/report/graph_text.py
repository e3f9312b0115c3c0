"""Reads dumped graph files back: one entry for each node, with its shape, source line and layer."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from itertools import groupby

from glue_compiler.errors import GlueError

_SOURCE = re.compile(r"# File: (?P<source>.+?:\d+ in .+?), code: (?P<code>.*)")
_LAYER = re.compile(r"# Layer: (?P<layer>.*)")


class DumpError(GlueError):
    """A folder or a file that is no dump of glue, or not a whole one."""


@dataclass(frozen=True)
class NodeLine:
    """One node of a dumped graph.

    Attributes:
        name: of the node.
        text: what it computes; ``"input"`` for an input of the graph.
        shape: dtype and sizes as torch prints them, ``f32[2, s0]``; ``""`` for what is no tensor.
        source: the user's line, ``file.py:12 in forward``; ``""`` where the graph does not know it.
        code: the text of that line.
        layer: path of the module, ``model.layers.3.mlp``; ``""`` where none is known.
    """

    name: str
    text: str
    shape: str = ""
    source: str = ""
    code: str = ""
    layer: str = ""


@dataclass(frozen=True)
class GraphText:
    """A graph, or a body inside of one: ``"graph"``, the name of a body, ``"forward"`` or ``"backward"``."""

    name: str
    nodes: tuple[NodeLine, ...]


def read_graphs(text: str) -> tuple[GraphText, ...]:
    """The graphs of a dumped file: each whole graph, followed by its bodies in the order in which they are called.

    A file with two whole graphs holds the forward and the backward of a training step.

    Raises:
        DumpError: ``text`` is no dumped graph.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise DumpError(f"this is no dumped graph: {error}") from error
    lines = text.split("\n")
    wholes: list[list[GraphText]] = [[]]
    for statement in tree.body:
        if isinstance(statement, ast.ClassDef):
            forward = next((s for s in statement.body if isinstance(s, ast.FunctionDef) and s.name == "forward"), None)
            if forward is not None:
                wholes[-1].insert(0, GraphText(statement.name, _nodes(forward, lines)))
                if statement.name == "GraphModule":  # bodies come before the graph that calls them
                    wholes.append([])
    wholes = [whole for whole in wholes if whole]
    if not wholes:
        raise DumpError("this is no dumped graph: it has no class with a forward")
    names = ("forward", "backward") if len(wholes) == 2 else ("graph",)
    return tuple(
        GraphText(name if graph.name == "GraphModule" else graph.name, graph.nodes)
        for name, whole in zip(names, wholes, strict=True)
        for graph in whole
    )


def _nodes(forward: ast.FunctionDef, lines: list[str]) -> tuple[NodeLine, ...]:
    arguments = [*forward.args.posonlyargs, *forward.args.args]
    nodes = [NodeLine(arg.arg, "input", _shape(arg)) for arg in arguments if arg.arg != "self"]
    source = code = layer = ""
    place = forward.lineno
    for line_number, group in groupby(forward.body, key=lambda statement: statement.lineno):
        statements = list(group)
        for comment in map(str.strip, lines[place : line_number - 1]):
            if match := _SOURCE.match(comment):
                source, code = match["source"], match["code"]
            elif match := _LAYER.match(comment):
                layer = "" if match["layer"] == "none" else match["layer"]
            elif comment.startswith("# No stacktrace"):
                source = code = ""
        place = statements[-1].end_lineno or line_number
        name, text, shape = _node(statements)
        nodes.append(NodeLine(name, text, shape, *(("", "", "") if name == "return" else (source, code, layer))))
    return tuple(nodes)


def _node(statements: list[ast.stmt]) -> tuple[str, str, str]:
    """(name, text, shape) of what one line computes; ``x = None`` behind it only frees memory."""
    first, *others = statements
    if isinstance(first, ast.Return):
        return "return", ast.unparse(first.value) if first.value else "", ""
    if target := _assigned(first):
        return target, ast.unparse(first.value), _shape(first)  # type: ignore[attr-defined]
    # `x[0] = y;  setitem = x`: the node is the write, and its name follows.
    named = next((each for each in others if isinstance(getattr(each, "value", None), ast.Name)), None)
    return (_assigned(named), ast.unparse(first), _shape(named)) if named else ("", ast.unparse(first), "")


def _assigned(statement: ast.stmt) -> str:
    """The name that is assigned to; ``""`` if none is."""
    target = statement.targets[0] if isinstance(statement, ast.Assign) else getattr(statement, "target", None)
    return target.id if isinstance(target, ast.Name) else ""


def _shape(annotated: ast.AST) -> str:
    annotation = getattr(annotated, "annotation", None)
    return str(annotation.value) if isinstance(annotation, ast.Constant) else ""
