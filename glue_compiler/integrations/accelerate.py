"""Lets accelerate, and transformers' Trainer, which configures it, accept ``"glue"`` as the name of a backend.

``TrainingArguments(torch_compile_backend="glue")``, ``Accelerator(dynamo_backend="glue")`` and
``accelerate launch --dynamo_backend glue`` look names up in a closed enum of accelerate's. torch calls :func:`install`
when it is imported (entry point group ``torch.backends``), and the enum gets one member more when accelerate is. With
``GLUE_ACCELERATE=0`` nothing happens. An accelerate that knows the name by itself is left alone.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

NAME = "GLUE"
SWITCH = "GLUE_ACCELERATE"


def install() -> None:
    """From now on, add the name where accelerate keeps the names it accepts, when those modules are imported."""
    if os.environ.get(SWITCH, "1") in ("0", "false"):
        return
    for name, add in _ADD.items():
        if name in sys.modules:
            add(sys.modules[name])
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _add_member(module: ModuleType) -> None:
    kind: Any = getattr(module, "DynamoBackend", None)
    if kind is None:
        return
    try:
        kind(NAME)
    except ValueError:
        member = str.__new__(kind, NAME)
        member._name_, member._value_ = NAME, NAME
        kind._member_names_.append(NAME)
        kind._member_map_[NAME] = member
        kind._value2member_map_[NAME] = member
        type.__setattr__(kind, NAME, member)


def _add_choice(module: ModuleType) -> None:
    names = getattr(module, "DYNAMO_BACKENDS", None)
    if isinstance(names, list) and NAME not in names:
        names.append(NAME)


_ADD: dict[str, Callable[[ModuleType], None]] = {
    "accelerate.utils.dataclasses": _add_member,
    "accelerate.commands.config.config_utils": _add_choice,
}


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the two modules as the other finders do, and adds the name once they have run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _ADD:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, _ADD[fullname])
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any, add: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._add = add

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._add(module)

    def __getattr__(self, name: str) -> Any:  # resources, source text
        return getattr(self._loader, name)
