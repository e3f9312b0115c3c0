"""What follows a graph through a compile follows one whose logits are deferred: dumps, replays, checks, reports."""

import json

import pytest
import torch
import torch.nn.functional as F

import glue_compiler
from glue_compiler.errors import GlueVerifyError
from glue_compiler.passes.chunk_loss import groups
from glue_compiler.passes.chunk_loss.wide_values import Scores
from glue_compiler.testing import assert_equivalent, capture, run_pass
from glue_compiler.verify.replay import replay
from tests.passes.chunk_loss.runs import CLASSES, rows_and_head


def model(hidden, weight, target):
    logits = torch.tanh(F.linear(hidden, weight) / 5) * 5
    return F.cross_entropy(logits.view(-1, CLASSES), target.view(-1)), logits


def test_run_pass_shows_a_graph_that_makes_the_logits():
    hidden, weight, target = rows_and_head()
    (graph,) = capture(model, hidden, weight, target)
    result = run_pass(graph, "chunk_loss")
    assert result.counts["deferred"] == 1
    order = [str(node.target) for node in result.before.graph.find_nodes(op="placeholder")]
    inputs = [{"L_hidden_": hidden, "L_weight_": weight, "L_target_": target}[name] for name in order]
    assert_equivalent(result.before, result.after, inputs, numerics=glue_compiler.pipeline.graph_pass.Numerics.CLOSE)


@pytest.mark.parametrize("form", ["after", "whole"])
def test_a_dumped_graph_is_replayed(tmp_path, form):
    options = {"compiler": "aot_eager", "dump": str(tmp_path), "strict": True}
    loss, logits = torch.compile(model, backend="glue", options=options)(*rows_and_head())
    (loss + logits.sum()).backward()
    (file,) = tmp_path.rglob(f"*chunk_loss.{form}.py")
    (found,) = replay(file)
    assert not found.differences
    (graph,) = json.loads((tmp_path / "summary.json").read_text())["graphs"]
    (done,) = [p for p in graph["passes"] if p["name"] == "chunk_loss"]
    assert done["counts"]["deferred"] == 1


def test_every_call_is_verified():
    inputs = rows_and_head()
    options = {"compiler": "aot_eager", "verify": True, "strict": True}
    loss, logits = torch.compile(model, backend="glue", options=options)(*inputs)
    (loss + logits.sum()).backward()
    assert inputs[1].grad is not None


def test_a_wrong_loss_is_found(monkeypatch, tmp_path):
    monkeypatch.setattr(groups, "scores_of", lambda steps: Scores(2.0, 0.0))
    options = {"compiler": "aot_eager", "verify": True, "strict": True, "dump": str(tmp_path)}
    with pytest.raises(GlueVerifyError, match="chunk_loss"):
        torch.compile(model, backend="glue", options=options)(*rows_and_head())


def test_explain_says_what_is_deferred():
    report = str(glue_compiler.explain(model, *rows_and_head(), options={"compiler": "aot_eager"}))
    assert "losses 1" in report
    assert "deferred 1" in report


def test_explain_says_why_logits_are_kept():
    report = str(glue_compiler.explain(model, *rows_and_head(), options={"logits": "kept"}))
    assert "logits='kept'" in report
