"""The tables of docs/ and README.md say what the code says, and their links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from glue_compiler import options, registry
from glue_compiler.compat.known_problems import KNOWN_PROBLEMS
from glue_compiler.compat.versions import NEWEST_TORCH, OLDEST_TORCH
from glue_compiler.options import GlueOptions
from glue_compiler.report.environment import pass_states

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
VARIABLES = {key: variable for variable, key in options._ENVIRONMENT.items()}


def table(path: Path, first_header: str) -> list[dict[str, str]]:
    """The rows of the table of a page whose first column is called ``first_header``, by header."""
    lines = path.read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| {first_header} |"))
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start:]]
    header = cells[0]
    rows = []
    for line, row in zip(lines[start + 2 :], cells[2:], strict=True):
        if not line.startswith("|"):
            break
        rows.append(dict(zip(header, row, strict=True)))
    return rows


def code(cell: str) -> str:
    """What stands between backticks first."""
    found = re.search(r"`([^`]+)`", cell)
    return found[1] if found else ""


@pytest.mark.parametrize(("path", "header"), [("docs/options.md", "option"), ("README.md", "key")])
def test_the_table_of_options_is_that_of_the_code(path, header):
    rows = table(ROOT / path, header)
    assert {code(row[header]) for row in rows} == set(options.OWN_KEYS)
    for row in rows:
        assert code(row["variable"]).split("=")[0] == VARIABLES.get(code(row[header]), "")


def test_the_defaults_are_those_of_the_code():
    for row in table(ROOT / "docs/options.md", "option"):
        default, shown = getattr(GlueOptions(), code(row["option"])), row["default"].strip("`")
        if shown == "none":
            assert default is None
        elif isinstance(default, int) and not isinstance(default, bool):
            assert options.parse_bytes(shown) == default
        elif shown in ("{}", "[]"):
            assert not default
        else:
            assert shown in (repr(default), f'"{default}"')


def test_the_table_of_passes_is_that_of_the_code():
    rows = table(ROOT / "docs/passes.md", "rewrite")
    passes = registry.all_passes()
    assert [code(row["rewrite"]) for row in rows] == [p.name for p in passes]
    for row, graph_pass, state in zip(rows, passes, pass_states(GlueOptions()), strict=True):
        assert row["default"] == ("on" if state.runs else "off")
        assert row["numerics"] == graph_pass.numerics.value
        assert row["stage"] == graph_pass.stage.value
        assert set(re.findall(r"`(\w+)`", row["option"])) <= set(options.OWN_KEYS)


def test_every_pass_has_a_page_that_says_how_to_see_it():
    for name in registry.pass_names():
        page = (ROOT / "docs" / f"{name}.md").read_text()
        assert page.startswith(f"# {name}")
        assert "**How to see it.**" in page


def test_the_known_problems_are_those_of_doctor():
    rows = table(ROOT / "docs/versions.md", "torch | problem")
    assert len(rows) == len(KNOWN_PROBLEMS)
    for row, problem in zip(rows, KNOWN_PROBLEMS, strict=True):
        everywhere = (problem.first, problem.last) == (OLDEST_TORCH, NEWEST_TORCH)
        assert row["torch"] == ("all" if everywhere else ".".join(map(str, problem.first)))


def test_the_tests_of_the_page_about_testing_pass():
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/testing.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(block, "docs/testing.md", "exec"), names)
    tests = [test for name, test in names.items() if name.startswith("test_")]
    assert len(tests) == 2
    for test in tests:
        test()


# mkdocs checks the links between pages of docs/; README.md and links out of docs/ are outside of its site.
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#\s]+)", path.read_text()):
        assert target.startswith(("http:", "https:")) or (path.parent / target).exists(), target
