"""The text of a script that shows one failure, and runs alone."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.fuzz import harness, small_steps
from tools.fuzz.programs import Program

MAIN = """
def program():
    namespace = {"__name__": "fuzzed_program"}
    with open(__file__, encoding="utf-8") as file:
        exec(compile(file.read(), __file__, "exec"), namespace)
    return namespace


def main(backend="glue"):
    from torch._inductor.utils import fresh_cache

    if torch.cuda.is_available():
        torch.cuda.init()  # Dynamo does in its first compile, and a checkpoint whose forward is that one refuses to run
    options = HOW["options"] if backend == "glue" else None
    expected, found = observe(program()), []
    with small_steps_count(), fresh_cache():
        for _ in range(1 + TWICE):
            torch._dynamo.reset()
            new = program()
            actual = observe(new, lambda f: torch.compile(f, backend=backend, dynamic=HOW["dynamic"], options=options))
            found += differences(new, expected, actual)
            del actual
    print("\\\\n".join(found) or "as eager")
    return 1 if found else 0


if __name__ == "__main__":
    import sys

    sys.exit(main(*sys.argv[1:]))
"""


def script_of(program: Program, wrong: list[str], note: str) -> str:
    """A module with the program, what was seen, and the code that compares it with eager.

    ``python script.py`` compiles with glue; ``python script.py aot_eager`` with another backend.
    """
    seen = "\n".join(f"# {line}" for each in (note, *wrong[:6]) for line in each.splitlines())
    own = "\n\n".join(Path(str(each.__file__)).read_text(encoding="utf-8") for each in (small_steps, harness))
    return f"{seen}\n{program.source()}\n# From here on: how it is run.\n{own}{MAIN}"


def fails_alone(script: str, seconds: float = 300.0) -> bool:
    """Does it, in a process of its own?"""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "script.py"
        file.write_text(script, encoding="utf-8")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            done = subprocess.run([sys.executable, file], capture_output=True, timeout=seconds, env=environment)
        except subprocess.TimeoutExpired:
            return False
    # A script that cannot run at all says nothing on its standard output, and one that crashes ends by a signal.
    return done.returncode < 0 or (done.returncode == 1 and bool(done.stdout.strip()))
