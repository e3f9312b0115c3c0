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
    lines = text.encode().splitlines()  # ast counts columns in bytes
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


def _nodes(forward: ast.FunctionDef, lines: list[bytes]) -> tuple[NodeLine, ...]:
    arguments = [*forward.args.posonlyargs, *forward.args.args]
    nodes = [NodeLine(arg.arg, "input", _shape(arg.annotation)) for arg in arguments if arg.arg != "self"]
    source = code = layer = ""
    place = forward.lineno
    for _, group in groupby(forward.body, key=lambda statement: statement.lineno):
        statements = list(group)
        for line in lines[place : statements[0].lineno - 1]:
            comment = line.decode().strip()
            if match := _SOURCE.match(comment):
                source, code = match["source"], match["code"]
            elif match := _LAYER.match(comment):
                layer = "" if match["layer"] == "none" else match["layer"]
            elif comment.startswith("# No stacktrace"):
                source = code = ""
        place = statements[-1].end_lineno or statements[-1].lineno
        for name, shape, text in _statements(statements, lines):
            at = ("", "", "") if name == "return" else (source, code, layer)
            nodes.append(NodeLine(name, text, shape, *at))
    return tuple(nodes)


def _statements(statements: list[ast.stmt], lines: list[bytes]) -> list[tuple[str, str, str]]:
    """(name, shape, text) of what one line computes; ``x = None`` after it only frees memory."""
    found: list[tuple[str, str, str]] = []
    for number, statement in enumerate(statements):
        if isinstance(statement, ast.Return):
            found.append(("return", "", _segment(statement.value, lines) if statement.value else ""))
        elif isinstance(statement, ast.AnnAssign | ast.Assign):
            target = statement.target if isinstance(statement, ast.AnnAssign) else statement.targets[0]
            value = statement.value
            if number and isinstance(value, ast.Constant) and value.value is None:
                continue
            annotation = statement.annotation if isinstance(statement, ast.AnnAssign) else None
            if number and found and not found[-1][0] and isinstance(value, ast.Name):
                # `x[0] = y;  setitem = x`: the node is the write, and its name follows.
                found[-1] = (_segment(target, lines), _shape(annotation), found[-1][2])
            elif isinstance(target, ast.Name):
                found.append((target.id, _shape(annotation), _segment(value, lines) if value else ""))
            else:
                found.append(("", "", _segment(statement, lines)))
        else:
            found.append(("", "", _segment(statement, lines)))
    return found


def _shape(annotation: ast.expr | None) -> str:
    return str(annotation.value) if isinstance(annotation, ast.Constant) else ""


def _segment(node: ast.expr | ast.stmt, lines: list[bytes]) -> str:
    end_line, end = node.end_lineno or node.lineno, node.end_col_offset
    if end_line == node.lineno:
        return lines[node.lineno - 1][node.col_offset : end].decode()
    parts = [lines[node.lineno - 1][node.col_offset :], *lines[node.lineno : end_line - 1], lines[end_line - 1][:end]]
    return " ".join(part.decode().strip() for part in parts)
