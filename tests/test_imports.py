"""The house: each room stands on the rooms below it, no modules import each other in a circle, few files lie loose."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = (
    {"errors", "byte_sizes"},
    {"compat"},
    {"fx"},
    {"integrations"},
    {"options"},
    {"ops", "deferred", "capture"},
    {"pipeline"},
    {"passes"},
    {"memory"},
    {"report"},
    {"verify"},
    {"handoff"},
    {"backend"},
    {"testing", "cli"},
)
"""From the ground up. The package's own ``__init__`` offers names of all floors and belongs to none."""
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def modules(root: Path) -> dict[str, Path]:
    """By name, those of a checkout."""
    found = {}
    for folder, package in ((root / "glue_compiler", "glue_compiler"), (root / "passes", "glue_compiler.passes")):
        for path in folder.rglob("*.py"):
            parts = [part for part in path.relative_to(folder).with_suffix("").parts if part != "__init__"]
            found[".".join([package, *parts])] = path
    return found


def imports(path: Path) -> Iterator[str]:
    """Everywhere in a module, for type checkers and in functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def import_graph(root: Path = ROOT) -> dict[str, set[str]]:
    paths = modules(root)

    def module_of(name: str) -> str:
        while name and name not in paths:
            name = name.rpartition(".")[0]
        return name

    return {name: {module_of(each) for each in imports(path)} - {"", name} for name, path in paths.items()}


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Sets of modules that reach each other."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for each in graph[waiting.pop()] - seen:
                seen.add(each)
                waiting.append(each)
        return seen

    reaches = {name: reached(name) for name in graph}
    of_each = [frozenset(other for other in reaches[name] if name in reaches[other]) for name in graph]
    return [set(circle) for circle in set(of_each) if circle]


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def climbs(graph: dict[str, set[str]]) -> list[tuple[str, str]]:
    found = []
    for name, others in graph.items():
        for other in others:
            here, there = room_of(name), room_of(other)
            if here and there and here != there and FLOOR[there] >= FLOOR[here]:
                found.append((name, other))
    return found


def test_no_circles():
    assert circles(import_graph()) == []


@pytest.mark.slow
def test_no_import_climbs():
    assert climbs(import_graph()) == []


def test_every_room_has_a_floor():
    assert {room_of(name) for name in modules(ROOT)} - {""} == set(FLOOR)


def test_few_files_lie_loose():
    assert len([path for path in (ROOT / "glue_compiler").glob("*.py") if path.name != "__init__.py"]) <= 4


@pytest.mark.parametrize(
    ("text", "circle", "climb"),
    [
        ("from glue_compiler.fx import b", True, False),
        ("if TYPE_CHECKING:\n    from glue_compiler.fx.b import B", True, False),
        ("def f():\n    import glue_compiler.fx.b", True, False),
        ("from glue_compiler.ops import c", False, True),
        ("from glue_compiler import errors", False, False),
    ],
)
def test_what_the_tests_above_find(tmp_path, text, circle, climb):
    for folder in ("fx", "ops"):
        (tmp_path / "glue_compiler" / folder).mkdir(parents=True)
    (tmp_path / "glue_compiler" / "errors.py").touch()
    (tmp_path / "glue_compiler" / "fx" / "a.py").write_text(text)
    (tmp_path / "glue_compiler" / "fx" / "b.py").write_text("from glue_compiler.fx import a")
    (tmp_path / "glue_compiler" / "ops" / "c.py").touch()
    graph = import_graph(tmp_path)
    assert bool(circles(graph)) is circle
    assert bool(climbs(graph)) is climb
