"""Batches whose rows, totals and longest rows vary: a static compile, a dynamic one, and the same rewrites in both."""

import pytest

from tests.models.training import Training, packed, packed_and_padded, padded, tiny, with_lora

DOCUMENTS = [(7, 9, 5), (3, 1, 12, 9), (30, 8), (14,), (2, 2, 2, 2)]
ROWS = [(7, 11), (10, 3, 8), (2, 11, 5, 6), (17, 16), (4, 2, 3)]
DOCUMENTS_IN_ROWS = [
    ((4, 5), (3, 2)),
    ((6, 2, 3), (1, 9), (5,)),
    ((20, 3), (2, 1, 4), (9, 9), (7,)),
    ((2, 3), (3, 1)),
]
PACKED = [packed(lengths, seed) for seed, lengths in enumerate(DOCUMENTS)]
PADDED = [padded(lengths, seed) for seed, lengths in enumerate(ROWS)]
LEFT = [padded(lengths, seed, side="left") for seed, lengths in enumerate(ROWS)]
BOTH = [packed_and_padded(rows, seed) for seed, rows in enumerate(DOCUMENTS_IN_ROWS)]
WHOLE = [{"input_ids": batch["input_ids"], "labels": batch["input_ids"]} for batch in PADDED]


def assert_all_fired(training, *, compiles, attentions):
    assert training.caught == []
    assert training.attentions == [attentions] * compiles


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "attentions", "experts"),
    [
        ("llama", {"packed": 2}, 0),
        pytest.param("qwen3", {"packed": 2}, 0, marks=pytest.mark.slow),
        pytest.param("gemma3_text", {"packed": 2}, 0, marks=pytest.mark.slow),
        pytest.param("mixtral", {"packed": 2}, 8, marks=pytest.mark.slow),
        pytest.param("gpt_oss", {"packed": 2}, 8, marks=pytest.mark.slow),
    ],
)
def test_packed(kind, attentions, experts):
    training = Training(tiny(kind))
    training.train(PACKED)
    assert_all_fired(training, compiles=2, attentions=attentions)
    assert [counts.get("experts_grouped", 0) for counts in training.rewrites] == [experts] * 2
    assert all(counts["merged"] >= 2 for counts in training.rewrites)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text"])
@pytest.mark.parametrize("batches", [PADDED, LEFT, BOTH], ids=["right", "left", "packed"])
def test_padded(batches, kind):
    training = Training(tiny(kind))
    training.train(batches)
    assert_all_fired(training, compiles=2, attentions={"packed": 2})
    assert all(counts["merged"] >= 2 for counts in training.rewrites)


@pytest.mark.slow
def test_whole_rows():
    training = Training(tiny("llama"))
    training.train(WHOLE)
    assert_all_fired(training, compiles=2, attentions={"causal": 2})


@pytest.mark.slow
def test_dynamic_from_the_first_step():
    training = Training(tiny("llama", num_hidden_layers=1), dynamic=True)
    training.train(PADDED[1:4])
    assert_all_fired(training, compiles=1, attentions={"packed": 1})


@pytest.mark.slow
def test_rows_of_one_document_and_documents_of_one_token():
    """A size of 1 is no symbol to torch, so one row is a compile of its own."""
    training = Training(tiny("llama", num_hidden_layers=1))
    training.train([*PADDED[:2], padded([9], 7), padded([1, 6, 1], 8), padded([4], 9)])
    assert_all_fired(training, compiles=3, attentions={"packed": 1})


@pytest.mark.slow
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed(use_reentrant):
    model = tiny("qwen3", num_hidden_layers=1)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    training = Training(model)
    training.train(PACKED[:4])
    assert_all_fired(training, compiles=2, attentions={"packed": 1})


@pytest.mark.slow
@pytest.mark.parametrize("batches", [PACKED, PADDED], ids=["packed", "padded"])
def test_adapters(batches):
    training = Training(with_lora(tiny("llama", num_hidden_layers=1)))
    training.train(batches[:4])
    assert_all_fired(training, compiles=2, attentions={"packed": 1})


@pytest.mark.slow
def test_evaluation_between_the_steps():
    """Without gradients is a graph of its own, and evaluation finds sizes dynamic already."""
    training = Training(tiny("llama", num_hidden_layers=1))
    for learned, asked in zip(PACKED, PACKED[::-1], strict=True):
        training.train([learned])
        training.evaluate(asked)
    assert training.caught == []
    assert len(training.attentions) <= 4
    assert all(attentions == {"packed": 1} for attentions in training.attentions)


@pytest.mark.slow
def test_layers_compiled_one_by_one():
    """Their mask is an input, and is read; two compiles serve all layers, and results are those of eager.

    For a row of one document transformers, which runs in eager here, makes no mask at all: that is another graph.
    """

    def each_layer(model, how):
        for layer in model.model.layers:
            layer.compile(**how)
        return model

    training = Training(tiny("llama"), compile=each_layer)
    training.train(batch for batch in PACKED if len(batch["position_ids"][batch["position_ids"] == 0]) > 1)
    assert_all_fired(training, compiles=2, attentions={"listed": 1})
