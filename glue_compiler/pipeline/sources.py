"""The source files that decide what a pass does: all of glue's, a user's module, and what that imports."""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

_GLUE = "glue_compiler"
_PASSES = f"{_GLUE}.passes"
"""Which lies elsewhere in a checkout."""


@functools.cache
def sources_of_glue() -> tuple[Path, ...]:
    """Every module of glue's. Which of them a pass uses is not asked: reading imports takes longer than hashing all."""
    specs = map(importlib.util.find_spec, (_GLUE, _PASSES))
    folders = [Path(folder) for spec in specs for folder in (spec and spec.submodule_search_locations) or ()]
    return tuple(sorted({path for folder in folders for path in folder.rglob("*.py")}))


def sources_of(kind: type) -> tuple[Path, ...]:
    """The file that defines ``kind`` and those that it imports, and so on: of its own package, and of the user's other
    code. Not Python's own, nor other installed packages, nor glue's.

    Raises:
        OSError: for a class without a file, or a module that imports others by names that are computed.
    """
    if kind.__module__.partition(".")[0] == _GLUE:
        return ()
    found: dict[str, Path] = {}
    waiting = [(kind.__module__, Path(inspect.getfile(kind)))]
    while waiting:
        name, file = waiting.pop()
        found[name] = file
        package = name if file.stem == "__init__" else name.rpartition(".")[0]
        for other in (package, *(_imports_of(file, package) if file.suffix == ".py" else ())):
            is_read = other.partition(".")[0] == kind.__module__.partition(".")[0] or _is_the_users(other)
            if other not in found and is_read and (place := _file_of(other)) is not None:
                waiting.append((other, place))
    return tuple(sorted(set(found.values())))


def _places_of(name: str) -> list[Path]:
    """The file of a module and the folders of its submodules; none for what is no module."""
    try:
        spec = importlib.util.find_spec(name)  # of a module that is loaded, or will be inside of a function
    except (ImportError, ValueError, AttributeError):
        return []
    if spec is None:
        return []
    file = spec.origin if spec.has_location else None
    return [Path(place) for place in (file, *(spec.submodule_search_locations or ())) if place]


def _file_of(name: str) -> Path | None:
    return next((place for place in _places_of(name) if place.is_file()), None)


def _is_the_users(name: str) -> bool:
    """Is a module neither Python's own nor glue's nor of an installed package?"""
    top = name.partition(".")[0]
    if not top or top == _GLUE or top in sys.stdlib_module_names:
        return False
    places = _places_of(top)
    return bool(places) and not any({"site-packages", "dist-packages"}.intersection(place.parts) for place in places)


# What a running process does is decided by what it has loaded, so each file is read once.
@functools.cache
def _imports_of(file: Path, package: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_imported(ast.parse(file.read_bytes()), package, file)))


def _imported(tree: ast.AST, package: str, file: Path) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)  # modules among them
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("import_module", "importlib.import_module"):
            name = node.args[0] if node.args else None
            if not isinstance(name, ast.Constant) or not isinstance(name.value, str):
                raise OSError(f"{file} imports modules by names that are computed")
            yield importlib.util.resolve_name(name.value, package)
