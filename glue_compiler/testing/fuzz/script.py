"""The text of a script that shows one failure, and runs alone."""

from __future__ import annotations

from pathlib import Path

from glue_compiler.testing.fuzz import harness
from glue_compiler.testing.fuzz.programs import Program

MAIN = """
if __name__ == "__main__":
    import sys

    backend = sys.argv[1] if len(sys.argv) > 1 else "glue"
    options = HOW["options"] if backend == "glue" else None
    expected = observe(dict(globals()))
    program = dict(globals())
    actual = observe(program, lambda f: torch.compile(f, backend=backend, dynamic=HOW["dynamic"], options=options))
    found = differences(program, expected, actual)
    print("\\n".join(found) or "as eager")
    sys.exit(1 if found else 0)
"""


def script_of(program: Program, wrong: list[str], note: str) -> str:
    """A module with the program, what was seen, and the code that compares it with eager.

    ``python script.py`` compiles with glue; ``python script.py aot_eager`` with another backend.
    """
    own = Path(harness.__file__).read_text(encoding="utf-8")
    seen = "\n".join(f"# {line}" for each in (note, *wrong[:6]) for line in each.splitlines())
    return f"{seen}\n{program.source()}\n# From here on: how it is run.\n{own}{MAIN}"
