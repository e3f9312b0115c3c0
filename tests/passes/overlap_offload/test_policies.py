"""CheckpointPolicy.MUST_CPU_OFFLOAD and PREFER_CPU_OFFLOAD of a selective policy are kept."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from glue_compiler.errors import GlueOffloadError
from tests.captured import compile_with_glue
from tests.passes.overlap_offload.models import Blocks, equal, step

MM = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def marks(policy, *targets):
    """A context_fn whose policy gives ``policy`` to ``targets`` and recomputes everything else."""

    def decide(context, target, *args, **kwargs):
        return policy if target in targets else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, decide)


class Selective(Blocks):
    """Each block is a checkpointed region with a policy of its own."""

    def __init__(self, count, context_fn):
        super().__init__(count)
        self.context_fn = context_fn

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, context_fn=self.context_fn)
        return self.head(x)


def offload_report(run):
    (report,) = [p for p in run.report.passes if p.name == "overlap_offload"]
    return report


def run(policy, *targets, count=3, **options):
    """Results without glue's pass, with it, and its report."""
    model, x = Selective(count, marks(policy, *targets)), torch.randn(4, 8)
    off = {"passes": {"overlap_offload": False}}
    expected = step(compile_with_glue(model, **off).call, model, x)
    torch._dynamo.reset()
    compiled = compile_with_glue(model, **options)
    return expected, step(compiled.call, model, x), compiled


def test_must_moves_what_the_policy_marks_in_every_region_and_nothing_else():
    expected, got, compiled = run(CheckpointPolicy.MUST_CPU_OFFLOAD, *MM)
    report = offload_report(compiled)
    assert equal(expected, got)
    # Two products in each of three regions; the last output of a region is the next one's input or the head's.
    assert report.counts["moved"] >= 3
    assert report.counts["regions"] == 3
    assert report.skips == ()


def test_prefer_moves_all_but_what_backward_needs_at_once_and_says_so():
    expected, got, compiled = run(CheckpointPolicy.PREFER_CPU_OFFLOAD, *MM)
    report = offload_report(compiled)
    assert equal(expected, got)
    assert report.counts["moved"] >= 2
    assert any("PREFER_CPU_OFFLOAD marks it, and it stays" in skip.reason for skip in report.skips)


def test_a_policy_that_only_saves_moves_nothing():
    expected, got, compiled = run(CheckpointPolicy.MUST_SAVE, *MM)
    report = offload_report(compiled)
    assert equal(expected, got)
    assert not report.changed
    assert report.skips == ()


def test_without_a_policy_the_partitioner_is_left_alone():
    model = Blocks(3)
    compiled = compile_with_glue(model)
    step(compiled.call, model, torch.randn(4, 8))
    assert all(p.name != "overlap_offload" for p in compiled.report.passes)


@pytest.mark.slow
def test_the_inputs_of_regions_move_too_when_both_are_asked_for():
    expected, got, compiled = run(CheckpointPolicy.MUST_CPU_OFFLOAD, *MM)
    alone = offload_report(compiled).counts["moved"]
    torch._dynamo.reset()
    expected, got, compiled = run(CheckpointPolicy.MUST_CPU_OFFLOAD, *MM, offload="checkpoints")
    assert equal(expected, got)
    assert offload_report(compiled).counts["moved"] > alone


def test_one_region_alone_moves_when_it_must_and_stays_when_it_may():
    expected, got, compiled = run(CheckpointPolicy.MUST_CPU_OFFLOAD, *MM, count=1)
    assert equal(expected, got)
    assert offload_report(compiled).changed
    torch._dynamo.reset()
    expected, got, compiled = run(CheckpointPolicy.PREFER_CPU_OFFLOAD, *MM, count=1)
    assert equal(expected, got)
    assert not offload_report(compiled).changed


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD])
def test_what_the_caller_gets_too_is_an_error_or_a_skip(policy):
    class Returns(Selective):
        def forward(self, x):
            x = middle = checkpoint(self.blocks[0].up, self.embed(x), use_reentrant=False, context_fn=self.context_fn)
            x = checkpoint(lambda x: self.blocks[1].down(x.sin()), x, use_reentrant=False, context_fn=self.context_fn)
            return self.head(x), middle

    model = Returns(2, marks(policy, *MM))
    compiled = compile_with_glue(model, strict=False)

    def train():
        out, middle = compiled.call(torch.randn(4, 8))
        (out.sum() + middle.sum()).backward()

    if policy is CheckpointPolicy.MUST_CPU_OFFLOAD:
        with pytest.raises(GlueOffloadError, match=r"MUST_CPU_OFFLOAD asks for .* returned to the caller.*PREFER"):
            train()
    else:
        train()
        assert any("returned to the caller" in skip.reason for skip in offload_report(compiled).skips)


def test_must_under_cuda_graphs_is_an_error():
    with pytest.raises(GlueOffloadError, match="MUST_CPU_OFFLOAD cannot be kept: CUDA graphs"):
        run(CheckpointPolicy.MUST_CPU_OFFLOAD, *MM, **{"triton.cudagraphs": True})


@pytest.mark.slow
def test_inductor_keeps_starts_and_waits_apart_without_being_told_to():
    """The order is carried by data dependencies: reordering for peak memory is on, for nobody asked for offload."""
    from torch._inductor.utils import run_and_get_code

    from tests.passes.overlap_offload.test_generated_code import compute_between, pairs

    model, x = Selective(4, marks(CheckpointPolicy.MUST_CPU_OFFLOAD, *MM)), torch.randn(4, 8)
    compiled = compile_with_glue(model, compiler="inductor", fx_graph_cache=False)
    _, sources = run_and_get_code(lambda: step(compiled.call, model, x))
    bodies = [source[source.index("def call(") :].splitlines() for source in sources]
    bodies = [[line for line in body if not line.strip().startswith("#")] for body in bodies]
    (forward,) = [body for body in bodies if any("offload_start" in line for line in body)]
    (backward,) = [body for body in bodies if any("reload_start" in line for line in body)]
    hidden = [bool(compute_between(forward, start, wait)) for start, wait, _ in pairs(forward, "offload")]
    assert sum(hidden) >= len(hidden) - 2
    hidden = [bool(compute_between(backward, start, wait)) for start, wait, _ in pairs(backward, "reload")]
    assert sum(hidden) >= len(hidden) - 2
