"""Limited fuel: any number of single rewrites leaves a graph that computes the same."""

import pytest
import torch

from glue_compiler.testing import capture, run_pass
from tests.captured import assert_same_bits, compile_with_glue
from tests.passes.hoist_metadata.test_checkpoint_bodies import checkpointed
from tests.passes.hoist_metadata.test_one_graph import layer_inputs, positions_of, two_layers


def rewrites(fn, *args, **options):
    (graph,) = capture(fn, *args)
    return run_pass(graph, "hoist_metadata", **options).rewrites


@pytest.mark.slow
@pytest.mark.parametrize("fn", [two_layers, checkpointed()], ids=["plain", "checkpointed"])
def test_every_beginning_of_the_rewrites_is_consistent_and_bitwise_the_same(fn):
    x, first, second = (t.requires_grad_() for t in layer_inputs())
    positions = positions_of(5, 7)
    everything = rewrites(fn, x, positions, first, second)
    assert len(everything) > 4
    for fuel in range(len(everything) + 1):
        torch._dynamo.reset()
        run = compile_with_glue(fn, fuel=fuel)  # strict: an inconsistent graph raises
        inputs = [x, first, second]
        assert_same_bits(
            lambda *a: fn(a[0], positions, *a[1:]), lambda *a, r=run: r.call(a[0], positions, *a[1:]), inputs
        )
        assert [r.what for p in run.report.passes for r in p.rewrites] == everything[:fuel]
        assert run.report.passes[0].changed == (fuel > 0)
