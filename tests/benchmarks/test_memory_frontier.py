"""Rows of the frontier: what each hands to torch.compile."""

import pytest

from benchmarks.memory_frontier import prepare


def test_rows_of_glue_can_be_unshared(monkeypatch):
    monkeypatch.setenv("FRONTIER_DUMP", "folder")
    for row in ("keep", "offload", "plan-24GiB", "plan-24GiB-checkpoints"):
        run, settings = prepare(row)
        unshared_run, unshared = prepare(f"{row}-unshared")
        options = {**settings.get("options", {}), "passes": {"share_layers": False}}
        assert (unshared_run, unshared) == (run, {**settings, "options": options})


@pytest.mark.parametrize("row", ["inductor-unshared", "checkpoints-unshared", "nonsense"])
def test_other_rows_are_refused(row):
    with pytest.raises(ValueError, match=row):
        prepare(row)
