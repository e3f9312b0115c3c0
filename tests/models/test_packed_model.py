"""The main job: a packed LoRA Qwen3 whose attention rebuilds its metadata in every layer."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

pytest.importorskip("peft")

from demo.packed_model import packed_batches, packed_qwen3
from tests.captured import compile_with_glue, count

LAYERS = 2


def batches(number=2):
    documents = [bytes(range(40, 40 + n)) for n in (20, 33, 17, 60, 25)]
    return packed_batches(number, tokens=96, documents=documents)


def step(model, call, batch):
    model.zero_grad()
    loss = call(**batch).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def operator_counts(call):
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        call()
    counts = {event.key: event.count for event in profiler.key_averages()}
    return counts.get("aten::nonzero", 0), counts.get("aten::_local_scalar_dense", 0)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_metadata_once_in_the_graph_and_the_same_bits(checkpointing):
    model = packed_qwen3(layers=LAYERS, checkpointing=checkpointing, hidden=64)
    steps = {}
    for hoist in (False, True):
        torch._dynamo.reset()
        run = compile_with_glue(model, passes={"hoist_metadata": hoist})
        steps[hoist] = [step(model, run.call, batch) for batch in batches()]
        expected = 1 if hoist else LAYERS
        assert count(run.graph, torch.nonzero, "nonzero") == expected
        assert count(run.graph, "item") == expected
    for off, on in zip(steps[False], steps[True], strict=True):
        assert len(off) == len(on) > 4 * LAYERS
        assert all(torch.equal(a, b) for a, b in zip(off, on, strict=True))
    for batch, compiled in zip(batches(), steps[True], strict=True):
        for got, want in zip(compiled, step(model, model, batch), strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.slow
def test_assertions_on_equal_values_are_gone():
    model = packed_qwen3(layers=LAYERS, checkpointing=True, hidden=64)
    asserts = {}
    for hoist in (False, True):
        torch._dynamo.reset()
        run = compile_with_glue(model, passes={"hoist_metadata": hoist}, eager=True)
        run.call(**batches(1)[0])
        asserts[hoist] = count(run.graph, torch.ops.aten._assert_scalar.default)
    assert asserts[True] * LAYERS == asserts[False] > 0


@pytest.mark.slow
def test_host_syncs_of_a_forward_without_gradient_under_inductor(monkeypatch):
    monkeypatch.setenv("GLUE_DISABLE", "chunk_loss")  # on a CPU it counts the labels that are not ignored, too
    model = packed_qwen3(layers=LAYERS, checkpointing=False, lora=False, hidden=64)
    syncs = {}
    for name in ("inductor", "glue"):
        torch._dynamo.reset()
        with (
            torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True),
            torch.no_grad(),
        ):
            compiled = torch.compile(model, backend=name)
            first, second = batches()
            torch.testing.assert_close(compiled(**first).loss, model(**first).loss)
            syncs[name] = operator_counts(lambda c=compiled, b=second: c(**b))
    assert syncs == {"inductor": (LAYERS, LAYERS), "glue": (1, 1)}


@pytest.mark.slow
def test_a_checkpointed_training_step_under_inductor_syncs_once(monkeypatch):
    """On torch 2.11 this step crashes without the pass."""
    monkeypatch.setenv("GLUE_DISABLE", "chunk_loss")
    model = packed_qwen3(layers=2, checkpointing=True, hidden=64)
    compiled = torch.compile(model, backend="glue", options={"strict": True})
    first, second = batches()
    for got, want in zip(step(model, compiled, first), step(model, model, first), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert operator_counts(lambda: step(model, compiled, second)) == (1, 1)
