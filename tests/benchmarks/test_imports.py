"""Benchmarks that import each other do not do so in a circle, inside of functions neither."""

import ast
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "benchmarks"


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "benchmarks":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("benchmarks."):
            yield node.module.removeprefix("benchmarks.")


def test_no_benchmark_imports_itself_through_others():
    waiting = {path.stem: set(imports(path)) for path in FOLDER.glob("*.py")}
    assert any(waiting.values())
    while ready := [name for name, needed in waiting.items() if not needed & waiting.keys()]:
        for name in ready:
            del waiting[name]
    assert not waiting
