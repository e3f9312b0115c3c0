"""What a user may set: ``torch.compile(..., options={...})`` and ``GLUE_*`` environment variables."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from glue_compiler.compat.inductor import (
    checked_inductor_option,
    inductor_mode_options,
    inductor_option_names,
    is_inductor_option,
)
from glue_compiler.errors import GlueOptionError, GlueWarning, unknown_name
from glue_compiler.integrations import accelerate

Compiler = Literal["inductor", "aot_eager"]
Kernels = Literal["all", "torch"]
Logits = Literal["deferred", "kept"]
Regions = Literal["whole", "auto"]
MixedDocuments = Literal["warn", "ignore"]
Padding = Literal["keep", "drop"]
Prefix = Literal["keep", "share"]
ASSUMPTIONS = ("sorted_document_ids", "ranks_agree")


@dataclass(frozen=True)
class GlueOptions:
    """All options, validated. Build it with :func:`parse_options`.

    Attributes:
        compiler: what the rewritten graph is handed to: ``"inductor"``, or ``"aot_eager"`` (AOTAutograd, then eager
            operators: for debugging and for bitwise comparisons).
        kernels: ``"all"``: also those of other packages that are installed, where they are the faster ones.
            ``"torch"``: those that come with torch and glue alone.
        logits: of graphs that return the logits of a loss: ``"deferred"``: they are computed when somebody reads them.
            ``"kept"``: such graphs compute loss and logits as they are.
        regions: ``"auto"``: layers that are alike are compiled once for each kind, and Python runs their loop.
            ``"whole"``: a graph holds all that Dynamo can capture, as always with ``fullgraph=True``, ``offload``,
            ``prefix="share"`` and ``capture=False``.
        mixed_documents: ``"warn"``: once, where layers mix the documents of a packed batch that attention keeps apart.
        padding: ``"drop"``: tokens that a padding mask hides are not computed; results are zeros there, and their
            labels must be ignored. ``"keep"``: they are.
        prefix: ``"share"``, beside ``padding="drop"``: tokens behind equal beginnings of a batch's rows are computed
            once. ``"keep"``: in each row.
        capture: let Dynamo capture what it would end a graph at. False: frames are converted as Dynamo does by itself.
        dump: folder for graph dumps and ``summary.json``, or None.
        passes: pass name → on or off; passes not named keep their default.
        strict: raise when a pass fails, instead of restoring the graph and warning.
        hoist_limit: the most bytes of one tensor that ``hoist_metadata`` may keep alive by moving it out of a
            checkpoint body, unless that saves a host sync. An int, or a string such as ``"64MiB"``.
        assume: facts about inputs that no graph can prove, name → True. ``sorted_document_ids``: integer inputs that
            a mask compares for equality never decrease from a token to the next.
        memoize_threshold: ``memoize_metadata`` splits off a computation without a host sync only if it reads or makes a
            tensor of at least so many bytes.
        offload: ``"checkpoints"``: the inputs of checkpointed regions wait for backward in host memory; None: nothing
            moves.
        pinned_limit: the most bytes of page-locked host memory that this process may hold for copies; None: no limit.
            Beyond it, ordinary memory is used, which is slower. An int, or a string such as ``"8GiB"``.
        memory_budget: bytes of device memory for a training step: of layers that are checkpointed, as many keep what
            backward needs, on the device or on the host, as fit; the others compute it again. An int, ``"24GiB"``, a
            float as a share of the card, or ``"auto"``: what the card has free behind the first step, less a margin.
            Layers are regions then. None: all compute again.
        fuel: the number of the last single rewrite that is made, over all passes and graphs in order; None: all are.
        verify: check every call of a compiled graph, forward and backward, against its graph from before glue.
        extra_passes: passes of the user's own: objects, classes, or names as ``"module:Class"``.
        inductor: Inductor's own options (from ``mode=`` and from the keys of ``options=`` that Inductor knows).
    """

    compiler: Compiler = "inductor"
    kernels: Kernels = "all"
    logits: Logits = "deferred"
    regions: Regions = "auto"
    mixed_documents: MixedDocuments = "warn"
    padding: Padding = "keep"
    prefix: Prefix = "keep"
    capture: bool = True
    dump: str | None = None
    passes: Mapping[str, bool] = field(default_factory=dict)
    strict: bool = False
    hoist_limit: int = 64 * 2**20
    assume: Mapping[str, bool] = field(default_factory=dict)
    memoize_threshold: int = 2**20
    offload: Literal["checkpoints"] | None = None
    pinned_limit: int | None = None
    memory_budget: int | float | Literal["auto"] | None = None
    fuel: int | None = None
    verify: bool = False
    extra_passes: tuple[Any, ...] = ()
    inductor: Mapping[str, Any] = field(default_factory=dict)

    def is_enabled(self, name: str, default: bool) -> bool:
        return self.passes.get(name, default)


OWN_KEYS = tuple(f.name for f in fields(GlueOptions) if f.name != "inductor")
_ENVIRONMENT = {f"GLUE_{key.upper()}": key for key in OWN_KEYS if key not in ("passes", "assume")}
_ENVIRONMENT["GLUE_DISABLE"] = "passes"


def parse_options(
    options: Mapping[str, Any] | None,
    mode: str | None,
    pass_names: Collection[str],
    environment: Mapping[str, str] | None = None,
) -> GlueOptions:
    """Merge defaults, ``GLUE_*`` variables, ``mode`` and ``options`` (the later wins).

    Raises:
        GlueOptionError: for an unknown key, an unknown pass, or a value of the wrong type.
    """
    values = _from_environment(os.environ if environment is None else environment, pass_names)
    inductor: dict[str, Any] = dict(inductor_mode_options(mode))
    disabled = values.get("passes", {})
    for key, value in (options or {}).items():
        if key in OWN_KEYS:
            values[key] = _passes(value, pass_names) if key == "passes" else _CONVERT[key](value)
        elif is_inductor_option(key):
            inductor[key.replace("-", "_")] = checked_inductor_option(key, value)
        else:
            # The own keys are listed first and whole: Inductor has hundreds.
            known = [*OWN_KEYS, *inductor_option_names()]
            message = unknown_name("option", key, known)
            raise GlueOptionError(f"{message} Options: {', '.join(OWN_KEYS)}, and those of torch._inductor.config.")
    if disabled:
        # GLUE_DISABLE is for a run that one does not want to edit, so it wins over options={"passes": ...}.
        values["passes"] = {**values["passes"], **disabled}
    if values.get("memory_budget") is not None:
        _plan_regions(values)
    if values.get("prefix") == "share":
        if values.get("padding") != "drop":
            raise GlueOptionError("prefix='share' is a part of padding='drop'; set that, too")
        _require_whole(values, "prefix='share' looks at whole graphs")
    if values.get("offload") is not None:
        _require_whole(values, "'offload' looks at all layers of a step")
    return GlueOptions(**values, inductor=inductor)


def _plan_regions(values: dict[str, Any]) -> None:
    if values.setdefault("regions", "auto") != "auto":
        raise GlueOptionError("'memory_budget' is kept by layers that are regions; leave out regions='whole'")
    if values.get("offload") is not None:
        raise GlueOptionError("with a 'memory_budget' glue decides what waits on the host; leave out 'offload'")


def _require_whole(values: dict[str, Any], why: str) -> None:
    if values.setdefault("regions", "whole") == "auto":
        raise GlueOptionError(f"{why}; leave out regions='auto' and 'memory_budget'")


def extra_passes_in(options: Mapping[str, Any] | None, environment: Mapping[str, str] | None = None) -> tuple[Any, ...]:
    """The user's own passes, which must be known before :func:`parse_options` can check names of passes.

    Raises:
        GlueOptionError: if the value is no list.
    """
    environment = os.environ if environment is None else environment
    return _extra_passes((options or {}).get("extra_passes", environment.get("GLUE_EXTRA_PASSES", ())))


MOST_BYTES = 2**63 - 1


def parse_bytes(value: int | str) -> int:
    """``"64MiB"``, ``"1.5 GB"`` or an int → bytes.

    Raises:
        GlueOptionError: for anything else, such as more than an address can hold.
    """
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_BYTES:
        return value
    match = (
        re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", value, re.IGNORECASE)
        if isinstance(value, str)
        else None
    )
    if not match:
        raise GlueOptionError(
            f"{shortened(repr(value))} is not a number of bytes; write an int, or a string such as '64MiB'"
        )
    number, prefix, binary = match.groups()
    found = float(number) * (1024 if binary else 1000) ** " KMGT".index(prefix.upper() or " ")
    if found > MOST_BYTES:
        raise GlueOptionError(f"'{shortened(str(value))}' is more bytes than there can be; write for example '24GiB'")
    return int(found)


def _budget(value: Any) -> int | None:
    if value is None:
        return None
    found = parse_bytes(value)
    if isinstance(value, str) and value.strip().isdecimal() and 0 < found < 2**20:
        raise GlueOptionError(f"{value!r} has no unit; write '{value.strip()}GiB', or an int for a number of bytes")
    return found


def _memory_budget(value: Any) -> int | float | str | None:
    text = value.strip().lower() if isinstance(value, str) else ""
    if text == "auto":
        return "auto"
    if type(value) is int and value == 1:
        raise GlueOptionError("option 'memory_budget': 1 is one byte; write 1.0 for all of the card")
    share = value if isinstance(value, float) else float(text) if re.fullmatch(r"\d*\.\d+", text) else None
    if share is None:
        try:
            return _budget(value)
        except GlueOptionError as error:
            raise GlueOptionError(
                f"option 'memory_budget': {error}, 'auto', or a share of the card such as 0.8"
            ) from None
    if not 0 < share <= 1:
        raise GlueOptionError(
            f"option 'memory_budget': {value!r} is no share of the card; write a float above 0 and up to 1, an int for "
            "a number of bytes, or a string with a unit, such as '24GiB'"
        )
    return share


def shortened(text: str, most: int = 40) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


def _switches(value: Any, key: str, kind: str, known: Collection[str]) -> dict[str, bool]:
    if not isinstance(value, Mapping):
        raise GlueOptionError(f"option '{key}' is a dict of {kind} to bool, not {value!r}")
    for name, on in value.items():
        if name not in known:
            raise GlueOptionError(unknown_name(kind, str(name), known))
        if not isinstance(on, bool):
            raise GlueOptionError(f"option '{key}': '{name}' is True or False, not {on!r}")
    return dict(value)


def _passes(value: Any, pass_names: Collection[str]) -> dict[str, bool]:
    return _switches(value, "passes", "pass", pass_names)


def _dump(value: Any) -> str | None:
    if value is not None and not isinstance(value, str | os.PathLike):
        raise GlueOptionError(f"option 'dump' is a folder, not {value!r}")
    return os.fspath(value) if value else None


def _choice(key: str, choices: Collection[str], none: Collection[Any] = ()) -> Callable[[Any], Any]:
    """One of ``choices``; ``none``: what stands for None."""

    def convert(value: Any) -> str | None:
        if value in none:
            return None
        if value not in choices:
            raise GlueOptionError(unknown_name(key, str(value), choices, list_as="Choices"))
        return str(value)

    return convert


def _flag(name: str) -> Callable[[Any], bool]:
    def convert(value: Any) -> bool:
        if not isinstance(value, bool):
            raise GlueOptionError(f"option '{name}' is True or False, not {value!r}")
        return value

    return convert


def _fuel(value: Any) -> int | None:
    if isinstance(value, str) and value.isdigit():
        value = int(value)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise GlueOptionError(f"option 'fuel' is a number of rewrites, 0 or more, not {value!r}")
    return value


def _extra_passes(value: Any) -> tuple[Any, ...]:
    if isinstance(value, str):
        return tuple(name for name in re.split(r"[,\s]+", value) if name)
    if not isinstance(value, list | tuple):
        raise GlueOptionError(f"option 'extra_passes' is a list of passes, not {value!r}")
    return tuple(value)


# Of all but "passes", which asks for the names of passes.
_CONVERT: dict[str, Callable[[Any], Any]] = {
    "compiler": _choice("compiler", get_args(Compiler)),
    "kernels": _choice("kernels", get_args(Kernels)),
    "logits": _choice("logits", get_args(Logits)),
    "regions": _choice("regions", get_args(Regions)),
    "mixed_documents": _choice("mixed_documents", get_args(MixedDocuments)),
    "padding": _choice("padding", get_args(Padding)),
    "prefix": _choice("prefix", get_args(Prefix)),
    "capture": _flag("capture"),
    "dump": _dump,
    "strict": _flag("strict"),
    "hoist_limit": parse_bytes,
    "assume": lambda value: _switches(value, "assume", "assumption", ASSUMPTIONS),
    "memoize_threshold": parse_bytes,
    "offload": _choice("offload", ["checkpoints"], none=(None, "", "none")),
    "pinned_limit": _budget,
    "memory_budget": _memory_budget,
    "fuel": _fuel,
    "verify": _flag("verify"),
    "extra_passes": _extra_passes,
}


def _from_environment(environment: Mapping[str, str], pass_names: Collection[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for variable, text in environment.items():
        if not variable.startswith("GLUE_") or variable == accelerate.SWITCH:
            continue
        key = _ENVIRONMENT.get(variable)
        if key is None:
            # Another program may own the name, so this cannot be an error.
            warnings.warn(
                unknown_name("variable", variable, _ENVIRONMENT, list_as="Variables"), GlueWarning, stacklevel=2
            )
            continue
        try:
            values[key] = _written(key, text, pass_names)
        except GlueOptionError as error:
            raise GlueOptionError(f"{variable}: {error}") from None
    return values


def _written(key: str, text: str, pass_names: Collection[str]) -> Any:
    """An option's value from a variable's text."""
    if key == "passes":
        return _passes(dict.fromkeys(filter(None, re.split(r"[,\s]+", text)), False), pass_names)
    if key in ("strict", "verify", "capture"):
        flags = {"1": True, "true": True, "0": False, "": False, "false": False}
        return _CONVERT[key](flags.get(text.lower(), text))
    return _CONVERT[key](text)
