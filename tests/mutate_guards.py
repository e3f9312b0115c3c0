"""Takes guards out of a pass one by one and says which test sees it: ``python -m tests.mutate_guards --help``.

A guard is an ``if`` whose body ends in a return or a raise and that has no ``else``: mutated, its condition is False.
Each mutant runs the pass's fast tests in a process of its own, forked after torch was imported, until one fails.
"""

from __future__ import annotations

import argparse
import ast
import importlib.machinery
import os
import random
import signal
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

import pytest
import torch
import torch._dynamo

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Guard:
    path: Path
    at: int
    """Number of the ``if`` among those of the file."""
    line: int
    text: str

    def mutated(self) -> CodeType:
        tree = ast.parse(self.path.read_text(encoding="utf-8"))
        _ifs(tree)[self.at].test = ast.Constant(value=False)
        return compile(ast.fix_missing_locations(tree), str(self.path), "exec")

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.text}"


def guards_in(path: Path) -> list[Guard]:
    source = path.read_text(encoding="utf-8")
    found = enumerate(_ifs(ast.parse(source)))
    return [Guard(path, at, each.lineno, ast.unparse(each.test)) for at, each in found if _is_guard(each)]


def _ifs(tree: ast.AST) -> list[ast.If]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.If)]


def _is_guard(statement: ast.If) -> bool:
    return not statement.orelse and isinstance(statement.body[-1], ast.Return | ast.Raise | ast.Continue)


class _FirstFailure:
    def __init__(self) -> None:
        self.name = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.name = self.name or (report.nodeid if report.failed else "")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.name = self.name or (f"import of {report.nodeid}" if report.failed else "")


def killer_of(guard: Guard | None, tests: list[str], seconds: int) -> str | None:
    """The first test that fails without ``guard``; None if all pass."""
    with tempfile.NamedTemporaryFile("r+", encoding="utf-8") as out:
        child = os.fork()
        if not child:
            _run(guard, tests, out.name)
        end = threading.Timer(seconds, os.kill, (child, signal.SIGKILL))  # pytest-timeout has the process's own alarm
        end.start()
        os.waitpid(child, 0)
        end.cancel()
        return out.read() or None


def _run(guard: Guard | None, tests: list[str], out: str) -> None:
    Path(out).write_text("no end in time", encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    original = importlib.machinery.SourceFileLoader.get_code

    def get_code(loader: importlib.machinery.SourceFileLoader, name: str) -> CodeType | None:
        is_mutated = guard is not None and Path(loader.path).resolve() == guard.path
        return guard.mutated() if is_mutated else original(loader, name)

    importlib.machinery.SourceFileLoader.get_code = get_code
    first = _FirstFailure()
    # --assert=plain: pytest would load the package by itself, to rewrite its assertions.
    how = ["-q", "-x", "--assert=plain", "-m", "not slow", "-p", "no:cacheprovider"]
    failed = pytest.main([*how, *tests], plugins=[first])
    Path(out).write_text(first.name or ("pytest itself" if failed else ""), encoding="utf-8")
    os._exit(0)


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.mutate_guards", description="Which test sees a guard go?")
    parser.add_argument("source", type=Path, help="a file or folder")
    parser.add_argument("tests", nargs="+", help="files or folders, those that fail first first")
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="which guards are drawn")
    parser.add_argument("--seconds", type=int, default=300, help="for one mutant")
    given = parser.parse_args()
    source = given.source.resolve()
    files = sorted(source.rglob("*.py")) if source.is_dir() else [source]
    guards = [guard for path in files for guard in guards_in(path)]
    torch.set_num_threads(1)
    if failed := killer_of(None, given.tests, given.seconds):
        print(f"the tests fail as it is: {failed}")
        return 2
    alive = 0
    for guard in random.Random(given.seed).sample(guards, min(given.count, len(guards))):
        killer = killer_of(guard, given.tests, given.seconds)
        alive += killer is None
        print(f"{guard}\n    {killer or 'ALIVE'}", flush=True)
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
