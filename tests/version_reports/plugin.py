"""``pytest -p tests.version_reports.plugin``: writes the report of this environment's versions when the run ends."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
from collections import defaultdict

import pytest
import torch

from tests.version_reports.report import FileResult, Report


class Recorder:
    """Hears what each test does; with several workers, in the process that starts them."""

    def __init__(self, tests: str, is_whole: bool) -> None:
        self.tests, self.is_whole = tests, is_whole
        self.files: dict[str, FileResult] = defaultdict(FileResult)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = self.files[report.nodeid.partition("::")[0]]
        if report.failed:
            if report.nodeid not in file.failed:
                file.failed.append(report.nodeid)
        elif report.skipped:
            self._skipped(file, report)
        elif report.when == "call":
            file.passed += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that skips as a whole, or cannot be imported."""
        if report.skipped:
            self._skipped(self.files[report.nodeid], report)
        elif report.failed:
            self.files[report.nodeid.partition("::")[0]].failed.append(report.nodeid)

    def _skipped(self, file: FileResult, report: pytest.TestReport | pytest.CollectReport) -> None:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        file.skipped[reason] = file.skipped.get(reason, 0) + 1

    def pytest_sessionfinish(self) -> None:
        Report(
            torch=torch.__version__,
            transformers=_version_of("transformers"),
            python=platform.python_version(),
            tests=self.tests,
            date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            files=dict(self.files),
        ).save(self.is_whole)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole-report", action="store_true", help="forget what earlier runs of these versions found")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        recorder = Recorder(config.option.markexpr, config.getoption("--whole-report"))
        config.pluginmanager.register(recorder, "version report")


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"
