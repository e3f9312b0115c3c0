"""The demo packs its data right, its attention is exact, and its runs can be compared."""

from __future__ import annotations

import math

import pytest
import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F

from demo.packed_model import BEGIN, END, packed_batches, packed_qwen3, read_documents
from demo.train_packed import main, plot, report_losses, rewrites_text, runs_table, worth
from demo.training import Run, train
from demo.varlen_attention import document_bounds, packed_attention

DOCUMENTS = [b"first", b"the second document", b"3", b"number four", b"and the fifth one, which is the longest of all"]
PACKINGS = [[16], [5, 3, 8], [1, 14, 1], [1] * 6, [1]]


def positions(lengths: list[int]) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None]


def test_every_batch_holds_the_same_number_of_tokens():
    batches = packed_batches(6, tokens=40, documents=DOCUMENTS)
    assert {tensor.shape for batch in batches for tensor in batch.values()} == {(1, 40)}
    assert len({int((batch["position_ids"] == 0).sum()) for batch in batches}) > 1


def test_position_ids_restart_where_a_document_begins():
    for batch in packed_batches(6, tokens=40, documents=DOCUMENTS):
        begins = batch["input_ids"] == BEGIN
        assert torch.equal(batch["position_ids"] == 0, begins)
        assert bool((batch["position_ids"].diff()[~begins[:, 1:]] == 1).all())


def test_labels_are_masked_at_document_starts_only():
    for batch in packed_batches(6, tokens=40, documents=DOCUMENTS):
        begins = batch["position_ids"] == 0
        assert bool((batch["labels"][begins] == -100).all())
        assert torch.equal(batch["labels"][~begins], batch["input_ids"][~begins])


def test_prompts_are_no_part_of_the_loss():
    (batch,) = packed_batches(1, tokens=40, documents=DOCUMENTS, prompt=0.5)
    (whole,) = packed_batches(1, tokens=40, documents=DOCUMENTS)
    assert torch.equal(batch["input_ids"], whole["input_ids"])
    learned = (batch["labels"] >= 0).sum().item()
    assert 0 < learned < (whole["labels"] >= 0).sum().item()
    ends = torch.cat([(batch["position_ids"][0] == 0).nonzero().flatten()[1:] - 1, torch.tensor([39])])
    assert bool((batch["labels"][0, ends[batch["position_ids"][0, ends] > 0]] >= 0).all())  # the end is learned


def test_documents_are_packed_whole_but_for_the_last():
    token_ids = packed_batches(1, tokens=40, documents=[b"first", b"other"])[0]["input_ids"].flatten().tolist()
    texts = [bytes(i for i in part if i < BEGIN) for part in split_before(token_ids, BEGIN)]
    assert sorted(texts[:2]) == [b"first", b"other"]
    assert token_ids.count(END) == len(texts) - 1
    assert b"first".startswith(texts[-1]) or b"other".startswith(texts[-1])


def split_before(token_ids: list[int], begin: int) -> list[list[int]]:
    starts = [i for i, token in enumerate(token_ids) if token == begin]
    return [token_ids[a:b] for a, b in zip(starts, [*starts[1:], len(token_ids)], strict=True)]


def test_the_same_seed_packs_the_same_batches():
    first, again, other = (packed_batches(2, tokens=40, seed=seed, documents=DOCUMENTS) for seed in (0, 0, 1))
    assert torch.equal(first[1]["input_ids"], again[1]["input_ids"])
    assert not torch.equal(first[1]["input_ids"], other[1]["input_ids"])


def test_no_documents_are_an_error():
    with pytest.raises(ValueError, match="no documents"):
        packed_batches(1, documents=[])


def test_documents_are_the_paragraphs_of_visible_text_files(tmp_path):
    (tmp_path / "a.md").write_text("a paragraph of text\n\nshort\n\nanother one, longer")
    (tmp_path / "data.bin").write_text("not a text file, whatever is in it")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "b.py").write_text("print('hidden folders are left out')")
    assert read_documents(tmp_path) == [b"a paragraph of text", b"another one, longer"]


@pytest.mark.parametrize("lengths", PACKINGS)
def test_document_bounds_are_the_cumulative_lengths(lengths):
    cu_seqlens, max_seqlen = document_bounds(positions(lengths))
    assert cu_seqlens.dtype == torch.int32
    assert cu_seqlens.diff().tolist() == lengths
    assert max_seqlen == max(lengths)


@pytest.mark.parametrize("lengths", PACKINGS)
def test_packed_attention_equals_attention_to_each_document(lengths):
    torch.manual_seed(0)
    tokens = sum(lengths)
    query = torch.randn(1, 4, tokens, 8, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(1, 2, tokens, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    target = torch.randn(1, tokens, 4, 8, dtype=torch.float64)

    packed, _ = packed_attention(
        torch.nn.Module(), query, key, value, None, scaling=0.3, position_ids=positions(lengths)
    )
    single = torch.cat(
        [
            F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True).transpose(1, 2)
            for q, k, v in zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True)
        ],
        dim=1,
    )
    torch.testing.assert_close(packed, single)
    torch.testing.assert_close(
        torch.autograd.grad((packed * target).sum(), (query, key, value)),
        torch.autograd.grad((single * target).sum(), (query, key, value)),
    )


def test_the_loss_of_packed_documents_is_that_of_each_alone():
    model = packed_qwen3(layers=1, hidden=64, dtype=torch.float64)
    batch = packed_batches(1, tokens=60, documents=DOCUMENTS)[0]
    lengths = document_bounds(batch["position_ids"])[0].diff().tolist()
    alone = [
        {"input_ids": ids, "labels": ids, "position_ids": positions([ids.shape[1]])}
        for ids in batch["input_ids"].split(lengths, dim=1)
    ]
    predicted = [length - 1 for length in lengths]  # a document's first token is predicted from nothing
    assert len(alone) > 1
    assert min(predicted) > 0
    losses = [model(**document).loss.item() for document in alone]
    expected = sum(n * loss for n, loss in zip(predicted, losses, strict=True)) / sum(predicted)
    # Norms and the loss itself are computed in fp32.
    assert model(**batch).loss.item() == pytest.approx(expected, rel=1e-5)


def test_a_seed_draws_the_same_weights_and_leaves_the_random_state_alone():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first, again = (packed_qwen3(layers=1, hidden=64, seed=3) for _ in range(2))
    assert torch.equal(torch.rand(3), expected)
    for a, b in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_lora_trains_adapters_and_vocabulary_only():
    trained = {name for name, p in packed_qwen3(layers=1, hidden=64).named_parameters() if p.requires_grad}
    assert all(".lora_" in name or ".modules_to_save." in name for name in trained)
    assert any(".lora_" in name for name in trained)


@pytest.mark.slow
def test_glue_trains_like_eager_and_finds_documents_once_a_step():
    batches = packed_batches(4, tokens=64, documents=DOCUMENTS)
    eager, glue = (
        train(packed_qwen3(layers=2, hidden=64), batches, backend, options)
        for backend, options in (("eager", None), ("glue", {"compiler": "aot_eager"}))
    )
    assert glue.max_loss_difference(eager) < 1e-4
    assert glue.graphs == 1
    assert (eager.nonzeros, eager.host_reads) == (4, 4)  # two layers, forward and recomputed
    # The documents, and on a CPU the rows that count in the loss.
    assert (glue.nonzeros, glue.host_reads) == (2, 2)


def test_losses_that_differ_or_rise_fail_the_demo():
    console = Console(quiet=True)
    eager = Run("eager", losses=[2.0, 1.0])
    assert report_losses([eager, Run("glue", losses=[2.0, 1.0 + 1e-5])], console) == 0
    assert report_losses([eager, Run("glue", losses=[2.0, 1.1])], console) == 1
    assert report_losses([eager, Run("glue", losses=[2.0, math.nan])], console) == 1
    assert report_losses([Run("eager", losses=[1.0, 2.0])], console) == 1


def test_the_text_of_rewrites_says_what_was_left_alone():
    skip = {"reason": "needs a gradient", "node": "mul", "source": "model.py:3"}
    done = {"name": "hoist_metadata", "stage": "captured", "changed": True, "counts": {"merged": 3}, "ms": 1000.0}
    graph = {"id": 0, "nodes_before": 9, "nodes_after": 6, "passes": [done | {"skips": [skip, skip]}]}
    text = rewrites_text({"torch": "2.13.0", "graphs": [graph]})
    for part in ("9 → 6", "hoist_metadata: merged 3 (1.0 s)", "left alone x2: needs a gradient"):
        assert part in text


RUNS = [
    Run("eager", [3.0, 2.0], [0.5, 0.5]),
    Run("inductor", [3.0, 2.0], [60.0, 0.4]),
    Run("glue", [3.0, 2.0], [30.0, 0.2]),
]


def test_the_table_fits_eighty_columns_and_cuts_nothing():
    console = Console(width=80)
    with console.capture() as captured:
        console.print(runs_table(RUNS))
    text = captured.get()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert "first step, with its compile (s)" in text


def test_what_is_compiled_in_the_second_step_counts_until_the_hundredth():
    assert Run("inductor", [], [50.0, 7.0, 1.0, 1.0, 1.0]).seconds_until(100) == 50 + 7 + 98


def test_what_glue_is_worth_is_said_against_each_other():
    runs = [Run(run.backend, run.losses, [run.step_seconds[0]] + 5 * [run.step_seconds[1]]) for run in RUNS]
    assert worth(runs) == "glue takes 0.40 of eager's later steps; 0.50 of inductor's later steps, 0.50 of its first."
    assert worth(runs[:1]) == ""


def test_the_plot_has_a_curve_for_each_run():
    assert [line.split(">")[1].split("<")[0] for line in plot(RUNS).splitlines() if "text" in line][-1] == "glue"
    assert plot(RUNS).count("<polyline") == 3


@pytest.mark.slow
def test_a_loop_over_experts_is_one_graph_that_trains_like_eager():
    batches = packed_batches(2, tokens=48, documents=DOCUMENTS)
    eager, glue = (
        train(packed_qwen3(1, False, False, hidden=64, experts=4), batches, backend, options)
        for backend, options in (("eager", None), ("glue", {"compiler": "aot_eager"}))
    )
    assert glue.max_loss_difference(eager) < 1e-4
    assert (glue.graphs, glue.graph_breaks, glue.nonzeros) == (1, 0, 2)
    assert eager.nonzeros > 1


def test_the_command_runs_in_eager_mode(capsys, tmp_path):
    sizes = ["--steps", "12", "--layers", "1", "--hidden", "64", "--tokens", "128", "--vocabulary", "258"]
    assert main([*sizes, "--backends", "eager", "--plot", str(tmp_path / "plot.svg")]) == 0
    assert "Losses fall" in capsys.readouterr().out
    assert "<svg" in (tmp_path / "plot.svg").read_text()
