"""The offload benchmark: its search for the longest sequence, its errors, and its rows on a tiny model."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks.checkpoint_decoder import SIZES, Decoder, Shape, batch_of
from benchmarks.checkpoint_length import GRAIN, longest
from benchmarks.checkpoint_numerics import errors, results
from benchmarks.checkpoint_offload import main, measure
from benchmarks.checkpoint_rows import clean_up

TINY = Shape(**{**SIZES["tiny"], "layers": 2}, batch=1, tokens=16)


@pytest.mark.parametrize("most", [0, 1, 5, 8, 13, 37])
def test_the_longest_is_found(most):
    asked = []

    def trains(tokens):
        asked.append(tokens)
        return tokens <= most * GRAIN

    assert longest(trains, 8 * GRAIN, 64 * GRAIN, steps=6) == most * GRAIN
    assert len(asked) == len(set(asked)) <= 10


def test_the_limit_ends_the_search():
    assert longest(lambda _: True, GRAIN, 4 * GRAIN) == 7 * GRAIN


def test_errors_are_relative_norms():
    exact = {"loss": torch.tensor(2.0).double(), "a": torch.ones(4).double(), "b": torch.ones(1).double()}
    got = {"loss": torch.tensor(2.5), "a": torch.ones(4), "b": torch.tensor([1.5])}
    assert errors(got, exact) == (0.25, 0.25, 0.5)


def test_every_gradient_of_the_adapters_is_a_result():
    model = Decoder(TINY, torch.device("cpu"))
    found = results(model, model, batch_of(TINY, torch.device("cpu")))
    assert len(found) == 2 + 2 * 4  # loss and input; two adapters of two matrices in each layer


@pytest.mark.slow
def test_a_row_of_layers_moves_all_inputs_but_the_last():
    clean_up(torch.device("cpu"))  # of what other tests moved
    got = measure("layers-glue", TINY, 1, torch.device("cpu"))
    assert got.moved == TINY.input_bytes


def test_the_longest_sequence_takes_rows_and_needs_a_budget(capsys):
    with pytest.raises(SystemExit):
        main(["--longest"])
    assert "needs --budget" in capsys.readouterr().err
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="measured on a GPU"):
            main(["--longest", "--budget", "24GiB", "--rows", "layers-none,layers-glue"])


@pytest.mark.slow
def test_a_transformers_model_moves_its_inputs_too():
    pytest.importorskip("peft")
    clean_up(torch.device("cpu"))
    shape = dataclasses.replace(TINY, layers=3)
    got = measure("layers-glue", shape, 1, torch.device("cpu"), model_name="llama")
    # The first layer's input is a leaf (peft makes it require a gradient), the last one's stays.
    assert got.moved == shape.input_bytes
