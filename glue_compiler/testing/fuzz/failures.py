"""What is done about a program that glue compiles wrongly: whose fault it is, the least program, a script."""

from __future__ import annotations

import re
from dataclasses import dataclass

from glue_compiler import registry
from glue_compiler.testing.fuzz.check import NotAProgram, eager_results, is_torchs_own, verdict
from glue_compiler.testing.fuzz.programs import Program
from glue_compiler.testing.fuzz.script import script_of
from glue_compiler.testing.fuzz.shrink import shrunk


@dataclass(frozen=True)
class Failure:
    """One program that failed.

    Attributes:
        owner: the pass without which it does not fail; ``"capture"``, if it fails without any.
        cause: equal for failures that are probably one.
        wrong: what differs from eager, in words.
        script: text that runs alone.
        origin: the seed and number to draw the program again.
    """

    owner: str
    cause: str
    wrong: tuple[str, ...]
    script: str
    origin: str


def kind_of(wrong: list[str]) -> str:
    """The first difference without its numbers."""
    first = next((w for w in wrong if w.startswith("warnings")), wrong[0])
    first = re.sub(r"object at 0x\w+|\d+(\.\d+)?(e[-+]\d+)?", "#", first)
    label, _, rest = first.partition(": ")
    if label.startswith("call #"):
        label, _, rest = rest.partition(": ")
    if label == "warnings" or label.endswith("error") or label.startswith("left behind"):
        return f"{label}: {rest[:160]}"
    return label


def examined(program: Program, wrong: list[str], seconds: float, origin: str) -> Failure | None:
    """None: torch's own ``aot_eager`` is as wrong."""
    kind = kind_of(wrong)
    if is_torchs_own(program, eager_results(program)):
        return None

    def fails_alike(candidate: Program) -> bool:
        found = _wrong(candidate)
        return bool(found) and kind_of(found) == kind

    small = shrunk(program, fails_alike, seconds)
    if is_torchs_own(small, eager_results(small)):  # a program that is wrong for two reasons
        small = program
    final = _wrong(small) or wrong
    owner = _owner(small)
    cause = f"{owner} | {kind}"
    return Failure(owner, cause, tuple(final), script_of(small, final, f"{origin}; {owner}"), origin)


def _wrong(program: Program, off: tuple[str, ...] = ()) -> list[str]:
    try:
        return verdict(program, eager_results(program), off).wrong
    except NotAProgram:
        return []


def _owner(program: Program) -> str:
    """The pass without which the program is right."""
    fired = verdict(program).fired
    for name in dict.fromkeys((*fired, *registry.pass_names())):
        if not _wrong(program, (name,)):
            return name
    return "capture" if _wrong(program, (*fired, *registry.pass_names())) else "several passes"
