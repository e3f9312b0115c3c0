"""The table of versions in the docs is what the reports of runs say."""

import pytest

from tests.version_reports import table
from tests.version_reports.report import FileResult, Report, load, load_all

pytest_plugins = ["pytester"]
LIMIT = "torch 2.11: refuses"


def report_of(torch="2.11.0+cpu", transformers="5.1.0", **files):
    return Report(torch, transformers, "3.11.7", "not slow", "2026-01-02", {f"{k}.py": v for k, v in files.items()})


def test_the_page_says_what_the_reports_say():
    page = table.PAGE.read_text(encoding="utf-8")
    assert table.updated(page, load_all()) == page, "run: python -m tests.version_reports.table"


def test_a_run_is_counted_over_its_files():
    one = report_of(a=FileResult(3, [], {LIMIT: 1}), b=FileResult(2, ["b.py::test"], {LIMIT: 2, "needs a browser": 4}))
    lines = table.table([one]).splitlines()
    assert "| 2.11.0+cpu | 5.1.0 | 2 | 5 | 1 | 7 | 2026-01-02, Python 3.11.7 |" in lines
    assert f"| {LIMIT} | 3 | torch 2.11.0 with transformers 5.1.0 |" in lines
    assert "| `b.py::test` | torch 2.11.0 with transformers 5.1.0 |" in lines
    assert "browser" not in table.table([one])  # of the machine


def test_runs_that_share_a_limit_are_one_row():
    runs = [report_of(transformers=each, a=FileResult(1, [], {LIMIT: 1})) for each in ("5.10.0", "4.57.6")]
    assert "| torch 2.11.0 with transformers 4.57.6, 5.10.0 |" in table.table(runs).replace(f"| {LIMIT} | 1 ", "")


def test_what_is_written_by_hand_stays():
    page = f"# Title\n{table.BEGIN}\nold\n{table.END}\nby hand\n"
    new = table.updated(page, [])
    assert new.startswith("# Title\n")
    assert new.endswith("\nby hand\n")
    assert "old" not in new
    with pytest.raises(ValueError, match="has no"):
        table.updated("# Title", [])


def test_a_report_keeps_the_files_that_a_later_run_leaves_out(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.version_reports.report.FOLDER", tmp_path)
    report_of(a=FileResult(1), b=FileResult(5)).save(is_whole=True)
    later = report_of(b=FileResult(1, ["b.py::test"]))
    later.save(is_whole=False)
    (path,) = tmp_path.iterdir()
    assert load(path).files == {"a.py": FileResult(1), "b.py": FileResult(1, ["b.py::test"])}
    later.save(is_whole=True)
    assert load(path).files == later.files  # of a whole run, only its own


def test_the_plugin_records_what_tests_do(pytester, monkeypatch):
    monkeypatch.setattr("tests.version_reports.report.FOLDER", pytester.path / "reports")
    pytester.makepyfile(
        test_of_each_kind="""
        import pytest
        def test_passes(): pass
        def test_fails(): assert False
        @pytest.mark.skipif(True, reason="torch 2.11: refuses")
        def test_marked(): pass
        def test_skips(): pytest.skip("torch 2.11: refuses")
        @pytest.fixture
        def broken(): raise ValueError
        def test_has_no_fixture(broken): pass
        """,
        test_whole="import pytest; pytest.skip('torch 2.11: refuses', allow_module_level=True)",
    )
    pytester.runpytest_inprocess("-p", "tests.version_reports.plugin")
    (report,) = load_all(pytester.path / "reports")
    file = "test_of_each_kind.py"
    assert report.files[file] == FileResult(1, [f"{file}::test_fails", f"{file}::test_has_no_fixture"], {LIMIT: 2})
    assert report.skipped[LIMIT] == 3
