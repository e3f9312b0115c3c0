"""One report: the versions of a run, and what each test file did there. Plain data, kept as JSON beside this file."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

FOLDER = Path(__file__).parent / "reports"


@dataclass
class FileResult:
    """Of one test file: how many tests passed, which failed, and how many were skipped for each reason."""

    passed: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)


@dataclass
class Report:
    """``torch`` and ``transformers``: full versions, "none" where it is not installed. ``tests``: pytest's ``-m``."""

    torch: str
    transformers: str
    python: str
    tests: str
    date: str
    files: dict[str, FileResult] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return FOLDER / f"torch-{self.torch.partition('+')[0]}-transformers-{self.transformers}.json"

    @property
    def passed(self) -> int:
        return sum(each.passed for each in self.files.values())

    @property
    def failed(self) -> list[str]:
        return [name for each in self.files.values() for name in each.failed]

    @property
    def skipped(self) -> Counter[str]:
        return sum((Counter(each.skipped) for each in self.files.values()), Counter())

    def save(self, is_whole: bool) -> None:
        """Unless this run was a whole one, keep what an earlier run of the same versions says of other files."""
        FOLDER.mkdir(exist_ok=True)
        before = load(self.path).files if self.path.exists() and not is_whole else {}
        whole = asdict(self) | {"files": {}}
        whole["files"] = {name: asdict(each) for name, each in sorted((before | self.files).items())}
        self.path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def load(path: Path) -> Report:
    data = json.loads(path.read_text(encoding="utf-8"))
    data["files"] = {name: FileResult(**each) for name, each in data["files"].items()}
    return Report(**data)


def load_all(folder: Path = FOLDER) -> list[Report]:
    """The oldest torch first."""
    return sorted(map(load, folder.glob("*.json")), key=lambda each: (number(each.torch), number(each.transformers)))


def number(version: str) -> tuple[int, ...]:
    """``"2.11.0+cpu"`` → ``(2, 11, 0)``; words count as nothing."""
    return tuple(int(part) for part in version.partition("+")[0].split(".") if part.isdigit())
