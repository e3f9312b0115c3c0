"""What is done about a program that glue compiles wrongly: whose fault it is, the least program, a script."""

from __future__ import annotations

import re
from dataclasses import dataclass

from glue_compiler.pipeline import registry
from tools.fuzz.check import NotAProgram, eager_results, is_torchs_own, verdict
from tools.fuzz.programs import Program
from tools.fuzz.script import fails_alone, script_of
from tools.fuzz.shrink import shrunk


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
    """None: torch's own compiler is as wrong."""
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
    script = script_of(small, final, f"{origin}; {owner}")
    if not fails_alone(script):
        script = f"# Right in a process of its own: what ran before it is a part of the cause.\n{script}"
    return Failure(owner, f"{owner} | {kind}", tuple(final), script, origin)


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
