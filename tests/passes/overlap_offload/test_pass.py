"""overlap_offload on the graphs of a step: what moves, what stays, and that nothing else changes."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from glue_compiler.compat.partition import EditedPartition
from glue_compiler.errors import GlueOptionError
from glue_compiler.fx.values import keeps_layout
from tests.captured import compile_with_glue
from tests.passes.overlap_offload.models import Blocks, equal, step


def run_both(model, *inputs, dynamic=None, **options):
    """The step without and with offload, and the pass's report."""
    without = step(compile_with_glue(model, dynamic=dynamic, **options).call, model, *inputs)
    torch._dynamo.reset()
    run = compile_with_glue(model, dynamic=dynamic, offload="checkpoints", **options)
    result = step(run.call, model, *inputs)
    return without, result, run.report.passes[-1]


def test_all_inputs_but_the_last_regions_move_and_no_bit_changes():
    without, result, report = run_both(Blocks(5), torch.randn(4, 8))
    assert report.name == "overlap_offload"
    assert report.counts == {"regions": 5, "moved": 4, "bytes": 4 * 4 * 8 * 4}
    (skip,) = report.skips
    assert "this is a CPU" in skip.reason
    assert equal(without, result)


def test_without_the_option_the_partitioner_is_left_alone():
    model = Blocks(3)
    run = compile_with_glue(model)
    step(run.call, model, torch.randn(4, 8))
    assert all(report.name != "overlap_offload" for report in run.report.passes)


def test_without_checkpoints_nothing_moves_and_the_reason_is_told():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
    _, _, report = run_both(model, torch.randn(4, 8))
    assert not report.changed
    assert "no checkpointed region" in report.skips[-1].reason


def test_one_region_alone_stays():
    _, _, report = run_both(Blocks(1), torch.randn(4, 8))
    assert not report.changed
    assert "only the last region" in report.skips[-1].reason


def test_an_input_that_the_caller_gets_too_stays():
    class Returns(Blocks):
        def forward(self, x):
            x = first = self.embed(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return torch.cat((self.head(x), first), -1), first

    model = Returns(3)
    run = compile_with_glue(model, offload="checkpoints")
    out, _ = run.call(torch.randn(4, 8))
    out.sum().backward()
    report = run.report.passes[-1]
    assert report.counts["moved"] == 1
    assert any("returned to the caller" in skip.reason for skip in report.skips)


@pytest.mark.slow
def test_a_value_that_all_regions_read_stays():
    class Shared(Blocks):
        def forward(self, x):
            table = torch.tanh(self.embed(x))
            for block in self.blocks:
                x = checkpoint(lambda x, t, block=block: block(x * t), x, table, use_reentrant=False)
            return self.head(x)

    without, result, report = run_both(Shared(4), torch.randn(4, 8))
    assert equal(without, result)
    assert report.counts["moved"] == 2  # the first region's input is the batch
    assert any("the recomputation of 4 regions reads it" in skip.reason for skip in report.skips)


@pytest.mark.parametrize("shape", [(4, 8), (0, 8), (2, 3, 8)])
def test_sizes(shape):
    without, result, _ = run_both(Blocks(4), torch.randn(shape))
    assert equal(without, result)


def test_dtypes_of_several_kinds_keep_theirs():
    class Mixed(Blocks):
        def forward(self, x):
            for number, block in enumerate(self.blocks):
                # A product between regions, because the partitioner recomputes mere casts and joins the regions.
                x = self.embed(x.float()).to((torch.float32, torch.bfloat16)[number % 2])
                x = checkpoint(block, x, use_reentrant=False)
            return self.head(x.float())

    without, result, report = run_both(Mixed(5), torch.randn(4, 8))
    assert report.counts == {"regions": 5, "moved": 4, "bytes": 2 * 128 + 2 * 64}
    assert equal(without, result)


def test_inputs_that_are_views_of_what_lies_in_order():
    class Reshaped(Blocks):
        def between(self, x):
            return torch.tanh(x.view(2, 2, 8)).view(4, 8)

    without, result, report = run_both(Reshaped(4), torch.randn(4, 8))
    assert report.counts["moved"] == 3
    assert equal(without, result)


def test_inputs_whose_elements_lie_in_another_order_stay():
    """Inductor would copy their host tensors into the order that it has on record, before they are filled."""

    class Transposed(Blocks):
        def between(self, x):
            return torch.tanh(x.t()).t()

    without, result, report = run_both(Transposed(4), torch.randn(4, 8))
    assert not report.changed
    assert any("in the order of its sizes" in skip.reason for skip in report.skips)
    assert equal(without, result)


def test_two_lengths_share_one_dynamic_graph():
    model = Blocks(4)
    short, long = torch.randn(4, 8), torch.randn(9, 8)
    expected = [step(model, model, x) for x in (short, long)]
    run = compile_with_glue(model, dynamic=True, offload="checkpoints")
    for x, want in zip((short, long), expected, strict=True):
        for got, value in zip(step(run.call, model, x), want, strict=True):
            torch.testing.assert_close(got, value)
    assert run.report.passes[-1].counts["moved"] == 3


def test_cuda_graphs_are_refused_with_a_reason():
    model = Blocks(3)
    run = compile_with_glue(model, offload="checkpoints", **{"triton.cudagraphs": True})
    step(run.call, model, torch.randn(4, 8))
    report = run.report.passes[-1]
    assert not report.changed
    assert "CUDA graphs" in report.skips[0].reason


def test_cuda_graphs_that_inductors_config_asks_for_are_refused_too():
    model = Blocks(3)
    with torch._inductor.config.patch({"triton.cudagraphs": True}):
        run = compile_with_glue(model, offload="checkpoints")
        step(run.call, model, torch.randn(4, 8))
    assert "CUDA graphs" in run.report.passes[-1].skips[0].reason


def test_a_partitioner_that_lost_its_edit_partitions_nothing():
    copied = pickle.loads(pickle.dumps(EditedPartition(b"key", lambda *_: None)))
    assert copied.uuid() == b"key"
    with pytest.raises(RuntimeError, match="partitions nothing"):
        copied(torch.fx.GraphModule({}, torch.fx.Graph()), [], num_fwd_outputs=1)


@pytest.mark.slow
def test_a_violation_restores_both_graphs(monkeypatch):
    from glue_compiler.errors import GlueWarning
    from glue_compiler.passes import overlap_offload

    apply = overlap_offload.apply_schedule

    def wait_at_once(pair, *rest):
        """Reload everything first: too many buffers."""
        groups = apply(pair, *rest)
        nodes = list(pair.backward.graph.nodes)
        first = next(node for node in nodes if node.op != "placeholder")
        for node in nodes:
            if node.target is torch.ops.glue.reload_start.default:
                node.args = (node.args[0], None, node.args[2])
                first.prepend(node)
        return groups

    monkeypatch.setattr(overlap_offload, "apply_schedule", wait_at_once)
    model, x = Blocks(5), torch.randn(4, 8)
    expected = step(compile_with_glue(model).call, model, x)
    torch._dynamo.reset()
    run = compile_with_glue(model, offload="checkpoints", strict=False)
    with pytest.warns(GlueWarning, match="overlap_offload failed .*2 are allowed"):
        assert equal(step(run.call, model, x), expected)


def test_an_unknown_kind_of_offload_is_an_error():
    with pytest.raises(GlueOptionError, match="did you mean 'checkpoints'"):
        compile_with_glue(Blocks(1), offload="checkpoint").call(torch.randn(4, 8))


def test_an_input_that_is_read_late_too_is_copied_after_that_and_the_others_as_before():
    class Skips(Blocks):
        def forward(self, x):
            x = first = self.embed(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.head(x + first.square())

    without, result, report = run_both(Skips(5), torch.randn(4, 8))
    assert equal(without, result)
    assert report.counts["moved"] >= 3


def test_regions_that_recompute_a_random_operator_move_their_inputs():
    class Drops(Blocks):
        def between(self, x):
            return self.embed(x)

        def forward(self, x):
            x = self.embed(x)
            for block in self.blocks:
                x = checkpoint(lambda x, block=block: attention(block(x)), x, use_reentrant=False)
            return self.head(x)

    def attention(x):
        # On a CPU it counts as random, so that its generator state is saved.
        return x + torch.nn.functional.scaled_dot_product_attention(*[x.view(1, 1, 4, 8)] * 3).view(4, 8)

    without, result, report = run_both(Drops(4), torch.randn(4, 8))
    assert equal(without, result)
    assert report.counts["moved"] == 3


def test_a_layout_with_gaps_is_told_from_a_dense_one():
    x = torch.randn(4, 8)
    assert all(map(keeps_layout, (x, x.t(), x[1:3], x.view(2, 2, 8).transpose(0, 2))))
    assert not any(map(keeps_layout, (x[:, ::2], x[:, :3], x[:1].expand(4, 8))))
