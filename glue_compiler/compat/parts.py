"""Private parts of torch: a feature asks once whether all that it needs are as they were tested, or it is off.

A feature that is off leaves the program to torch as it is: one warning says which part has changed. Parts are given as
``"module:Class.attribute"``; ``"module:Class().attribute"`` is one of an object.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch

from glue_compiler.errors import GlueWarning


@dataclass(frozen=True)
class Uses:
    """What a part must look like.

    ``parameters``: its leading ones. ``names``: that its code mentions. ``texts``: in its code, or items of it.
    """

    parameters: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()


ANY = Uses()


@dataclass
class Feature:
    """``name``: in words, as the warning says it. ``parts``: path → what it must look like."""

    name: str
    parts: Mapping[str, Uses]
    _is_available: bool | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def is_available(self) -> bool:
        """Are all parts as they were tested? Warns the first time that they are not."""
        with self._lock:
            if self._is_available is None:
                changed = next((reason for path, uses in self.parts.items() if (reason := _changed(path, uses))), None)
                self._is_available = changed is None
                if changed is not None:
                    warnings.warn(
                        f"glue's {self.name} is off with torch {torch.__version__}: {changed}. Models compile and "
                        "train without it; a newer glue may know this torch.",
                        GlueWarning,
                        stacklevel=3,
                    )
            return self._is_available


def _changed(path: str, uses: Uses) -> str | None:
    """How a part differs from what was tested; None if it does not."""
    module, _, attributes = path.partition(":")
    try:
        owner: Any = importlib.import_module(module)
    except ImportError:
        return f"there is no module {module}"
    for name in attributes.split("."):
        is_made = name.endswith("()")
        name = name.removesuffix("()")
        if not hasattr(owner, name):
            near = difflib.get_close_matches(name, dir(owner), n=1)
            return f"{path} is gone" + (f" (is it '{near[0]}' now?)" if near else "")
        owner = getattr(owner, name)
        owner = owner() if is_made else owner
    if uses.parameters:
        try:
            found = tuple(inspect.signature(owner).parameters)
        except (TypeError, ValueError):
            return f"{path} has no signature"
        if found[: len(uses.parameters)] != uses.parameters:
            return f"{path} takes ({', '.join(found)})"
    code = getattr(inspect.unwrap(owner) if callable(owner) else None, "__code__", None)
    missing = [name for name in uses.names if code is None or name not in code.co_names]
    missing += [text for text in uses.texts if text not in (_texts(code) if code is not None else owner)]
    return f"{path} does not use '{missing[0]}'" if missing else None


def _texts(code: CodeType) -> set[str]:
    """The strings in a function, and in those that it defines."""
    found = {constant for constant in code.co_consts if isinstance(constant, str)}
    return found.union(*(_texts(inner) for inner in code.co_consts if isinstance(inner, CodeType)))
