"""Losses of unmodified transformers models: the loss and every gradient are eager's, and nobody makes the logits."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from glue_compiler.deferred.tensor import DeferredTensor  # noqa: E402
from tests.captured import compile_with_glue  # noqa: E402
from tests.passes.chunk_loss.exact_models import FAMILIES, inputs_of, results_of, tiny  # noqa: E402
from tests.passes.chunk_loss.runs import ONLY, largest_allocation, small_chunks  # noqa: E402, F401
from tests.slow import slow_but  # noqa: E402


def assert_equal(expected, actual):
    assert expected.keys() == actual.keys()
    for name, want in expected.items():
        assert (want is None) == (actual[name] is None), name
        if want is not None:
            torch.testing.assert_close(actual[name], want, atol=1e-10, rtol=1e-10, equal_nan=True, msg=name)


def assert_deferred(compiled):
    done = [p for p in compiled.session.graphs[-1].passes if p.name == "chunk_loss"]
    assert [(p.counts.get("losses"), p.counts.get("deferred")) for p in done] == [(1, 1)], done[0].skips


@pytest.mark.parametrize("family", slow_but(("qwen3", "gpt2"), FAMILIES))
def test_the_loss_and_every_gradient_are_eagers(family):
    if family == "mpt" and transformers.__version__ < "5":
        pytest.skip("its masks are filled with a number that fp64 does not fit into fp32, in eager too")
    model = tiny(family)
    # Of 4.57 some drop whole layers at random, which breaks the graph before the loss.
    compiled = compile_with_glue(model, passes={**ONLY, "group_experts": True}, fullgraph=False)
    for kind in ("some", "ignored"):
        inputs = inputs_of(family, kind)
        assert_equal(results_of(model, model, inputs), results_of(model, compiled.call, inputs))
    assert_deferred(compiled)


@pytest.mark.parametrize("family", slow_but(("llama",), ("llama", "gemma2", "bert")))
def test_one_token(family):
    model = tiny(family)
    compiled = compile_with_glue(model, passes=ONLY)
    inputs = inputs_of(family, "one")
    assert_equal(results_of(model, model, inputs), results_of(model, compiled.call, inputs))
    assert_deferred(compiled)


def test_nobody_makes_the_logits():
    model = tiny("llama", vocab_size=211)
    compiled = compile_with_glue(model, passes=ONLY)
    inputs = inputs_of("llama")
    inputs = {name: value.repeat(4, 1) for name, value in inputs.items()}
    results_of(model, compiled.call, inputs)

    def step():
        model.zero_grad()
        output = compiled.call(**inputs)
        assert isinstance(output.logits, DeferredTensor)
        output.loss.backward()

    def reader():
        assert compiled.call(**inputs).logits.sum().isfinite()

    logits = inputs["labels"].numel() * 211 * 8
    assert largest_allocation(step) < logits
    assert largest_allocation(reader) >= logits
