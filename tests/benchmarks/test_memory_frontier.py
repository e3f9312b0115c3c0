"""Rows of the frontier: what each hands to torch.compile."""

from unittest import mock

import pytest
import torch

from benchmarks.memory_frontier import Stepper, prepare


def test_rows_of_glue_can_be_unshared():
    for row in ("keep", "offload", "plan-24GiB"):
        run, settings = prepare(row)
        unshared_run, unshared = prepare(f"{row}-unshared")
        options = {**settings.get("options", {}), "passes": {"share_layers": False}}
        assert (unshared_run, unshared) == (run, {**settings, "options": options})


@pytest.mark.parametrize("row", ["inductor-unshared", "checkpoints-unshared", "nonsense"])
def test_other_rows_are_refused(row):
    with pytest.raises(ValueError, match=row):
        prepare(row)


def test_plans_are_of_regions():
    options = prepare("regions")[1]["options"]
    assert options["regions"] == "auto"
    assert options["memory_budget"] is None
    assert prepare("plan-24GiB")[1]["options"] == {**options, "memory_budget": "24GiB"}


@pytest.mark.parametrize(("row", "compiled"), [("inductor", "model"), ("inductor-layers", "layer")])
def test_rows_by_layers_compile_what_runs_a_layer(row, compiled, monkeypatch):
    given = []
    monkeypatch.setattr(torch, "compile", lambda what, **_: given.append(what) or what)
    decoder = mock.Mock(return_value=mock.sentinel.model)
    monkeypatch.setattr("benchmarks.memory_frontier.Decoder", decoder)
    monkeypatch.setattr("benchmarks.memory_frontier.batch_of", mock.Mock())
    step = Stepper(row, mock.Mock(), torch.device("cpu"))
    run_layer = decoder.call_args.kwargs["run_layer"]
    assert given == [mock.sentinel.model if compiled == "model" else run_layer]
    assert step.call is mock.sentinel.model
