"""The benchmark's layers route the same in every dtype, and its smoke run shows what the pass promises."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.expert_routing_measure import host_waits, largest_error, milliseconds_in_turn

pytest.importorskip("transformers", minversion="5.0")

from benchmarks.expert_routing import main
from benchmarks.expert_routing_layers import LAYERS, build_layer, random_tokens, small
from tests.slow import slow_but


def run(tmp_path, monkeypatch, *arguments):
    monkeypatch.setenv("GLUE_COMPILER", "aot_eager")  # Inductor's compile time is not what is tested
    file = tmp_path / "cells.json"
    main(["--quick", "--json", str(file), *arguments])
    return {(cell["model"], cell["mode"], cell["row"]): cell for cell in json.loads(file.read_text())}


@pytest.mark.parametrize("model", slow_but(("qwen3",), LAYERS))
def test_a_step_of_glue_is_one_graph_that_never_waits(tmp_path, monkeypatch, model):
    cells = run(tmp_path, monkeypatch, "--models", model, "--rows", "eager,glue", "--modes", "training")
    glue, eager = cells[model, "training", "glue"], cells[model, "training", "eager"]
    assert not glue["failed"]
    assert glue["error"] < 1e-5
    assert glue["waits"] == {}
    assert glue["graphs"] == 1
    assert glue["nodes"] < 150
    assert eager["waits"]["nonzero"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("model", [pytest.param("gpt_oss", marks=pytest.mark.slow), "mixtral_list"])
def test_adapted_experts_stay_grouped(tmp_path, monkeypatch, model):
    modes = ["lora_input", "lora_experts"]
    cells = run(tmp_path, monkeypatch, "--models", model, "--rows", "eager,glue", "--modes", ",".join(modes))
    for mode in modes:
        assert cells[model, mode, "glue"]["error"] < 1e-5
        assert cells[model, mode, "glue"]["waits"] == {}


def test_equal_layers_are_compiled_once(tmp_path, monkeypatch, capsys):
    run(tmp_path, monkeypatch, "--models", "qwen3", "--rows", "glue", "--modes", "none", "--layers", "2")
    assert "| glue | 1 |" in capsys.readouterr().out


def test_a_cell_that_fails_says_why_and_stops_no_other(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.expert_routing.compile_layer", fails_for_glue)
    cells = run(tmp_path, monkeypatch, "--models", "qwen3", "--rows", "glue,eager", "--modes", "forward")
    assert cells["qwen3", "forward", "glue"]["failed"] == "RuntimeError: not today"
    assert cells["qwen3", "forward", "eager"]["ms"] > 0
    assert "| glue | RuntimeError: not today |" in capsys.readouterr().out


def fails_for_glue(layer, row, session):
    if row == "glue":
        raise RuntimeError("not today")
    return layer


@pytest.mark.parametrize("model", LAYERS)
def test_bf16_routes_as_fp32_does(model):
    kind = small(LAYERS[model])
    chosen = []
    for dtype in (torch.float32, torch.bfloat16):
        layer = build_layer(kind, "eager", dtype, "cpu").layer
        router = getattr(layer, "router", None) or layer.gate
        logits = router(random_tokens(kind.shape, dtype, "cpu")[0])
        logits = logits[0] if isinstance(logits, tuple) else logits
        chosen.append(logits.topk(kind.shape.top_k).indices)
    assert torch.equal(*chosen)


def test_an_error_is_found_in_any_tensor():
    want = {"output": torch.ones(3), "grad": torch.tensor([4.0, 0.0])}
    assert largest_error(dict(want), want)[0] == 0
    assert largest_error({**want, "grad": torch.tensor([4.0, 1.0])}, want) == (0.25, "grad")
    assert largest_error({**want, "grad": torch.tensor([4.0, float("nan")])}, want)[1] == "grad"
    assert largest_error({"output": want["output"]}, want) == (float("inf"), "no grad")


def test_host_waits_are_counted():
    values = torch.tensor([0, 1, 1])
    assert host_waits(lambda: values.nonzero().sum().item()) == {"nonzero": 1, "item": 1}
    assert host_waits(lambda: values + 1) == {}


def test_all_steps_run_in_every_round():
    calls = []
    times = milliseconds_in_turn({name: lambda name=name: calls.append(name) for name in "ab"}, rounds=3)
    assert set(times) == {"a", "b"}
    assert calls.count("a") >= 6
    assert calls.count("b") >= 6
