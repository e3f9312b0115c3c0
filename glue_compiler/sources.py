"""The source files that decide what a pass does: all of glue's, a user's module, and what that imports."""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

_GLUE = "glue_compiler"
_PASSES = f"{_GLUE}.passes"
"""Which lies elsewhere in a checkout."""


@functools.cache
def sources_of_glue() -> tuple[Path, ...]:
    """Every module of glue's. Which of them a pass uses is not asked: reading imports takes longer than hashing all."""
    spec = importlib.util.find_spec(_PASSES)
    folders = [Path(__file__).parent, *map(Path, (spec and spec.submodule_search_locations) or ())]
    return tuple(sorted({path for folder in folders for path in folder.rglob("*.py")}))


def sources_of(kind: type) -> tuple[Path, ...]:
    """The file that defines ``kind`` and those that it imports, and so on: of its own package, and of the user's other
    code. Not Python's own, nor other installed packages, nor glue's.

    Raises:
        OSError: for a class without a file, or a module that imports others by names that are computed.
    """
    own = Path(inspect.getfile(kind))
    if _is_of_glue(kind.__module__):
        return ()
    module = sys.modules.get(kind.__module__)
    if module is None or getattr(module, "__file__", None) is None:
        return (own,)
    found: dict[str, Path] = {}
    waiting = [module.__name__]
    top = module.__name__.partition(".")[0]
    while waiting:
        name = waiting.pop()
        if name in found or _is_of_glue(name) or not (name.partition(".")[0] == top or _is_the_users(name)):
            continue
        file = own if name == module.__name__ else _file_of(name)
        if file is None:
            continue
        found[name] = file
        if file.suffix == ".py":
            package = name if file.stem == "__init__" else name.rpartition(".")[0]
            waiting += [parent for parent in (name.rpartition(".")[0],) if parent]
            waiting += _imports_of(file, package)
    return tuple(sorted(set(found.values())))


def _is_of_glue(name: str) -> bool:
    return name.partition(".")[0] == _GLUE


def _file_of(name: str) -> Path | None:
    """None for what has no file, or is no module."""
    spec = _spec_of(name)
    if spec is not None and spec.origin is not None and spec.has_location:
        return Path(spec.origin)
    file = getattr(sys.modules.get(name), "__file__", None)
    return Path(file) if file is not None else None


def _spec_of(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)  # of a module that is loaded, or will be inside of a function
    except (ImportError, ValueError, AttributeError):
        return None


def _is_the_users(name: str) -> bool:
    """Is a module neither Python's own nor of an installed package?"""
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names or top in sys.builtin_module_names:
        return False
    spec = _spec_of(top)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []  # a package without __init__
    places = [place for place in (_file_of(top), *map(Path, folders)) if place is not None]
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
            parents = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)  # modules among them
        elif isinstance(node, ast.Call) and _called(node) in ("import_module", "importlib.import_module"):
            name = node.args[0] if node.args else None
            if not isinstance(name, ast.Constant) or not isinstance(name.value, str):
                raise OSError(f"{file} imports modules by names that are computed")
            yield importlib.util.resolve_name(name.value, package) if name.value.startswith(".") else name.value


def _called(call: ast.Call) -> str:
    """What is called, as it is written: a name, or a name of a name; ``""`` for anything else."""
    function = call.func
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return f"{function.value.id}.{function.attr}"
    return function.id if isinstance(function, ast.Name) else ""
