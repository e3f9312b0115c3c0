"""Collectives inside of captured graphs: no rewrite adds, drops, merges or moves one, so no rank waits for another.

The one exception is asked for: with ``ranks_agree``, logits of a head whose classes ranks share are not gathered.

Each program would be rewritten without its collective: the near miss is the same program with it left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from glue_compiler.backend import GlueBackend
from glue_compiler.report.session import Session
from tests.captured import compile_with_glue
from tests.slow import slow_but


@pytest.fixture(scope="module", autouse=True)
def one_process(tmp_path_factory):
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def total(x: torch.Tensor) -> torch.Tensor:
    return funcol.all_reduce(x, "sum", [0])


def copy(x: torch.Tensor) -> torch.Tensor:
    """The near miss."""
    return x.clone()


def collectives_of(run: Callable[[], object]) -> list[tuple[str, Any]]:
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        run()
    events = [each for each in profiler.events() if each.name.startswith("_c10d_functional::all")]
    return [(each.name, each.input_shapes[0]) for each in sorted(events, key=lambda each: each.time_range.start)]


def step(call, inputs):
    found = call(*inputs)
    return [found, *torch.autograd.grad(found.sum(), [tensor for tensor in inputs if tensor.requires_grad])]


class Run:
    """One program, compiled by glue and by what stands behind it."""

    def __init__(self, fn, inputs):
        self.session = Session()
        options = {"compiler": "aot_eager", "strict": True}
        glue = torch.compile(fn, backend=GlueBackend(session=self.session), options=options)
        plain = torch.compile(fn, backend="aot_eager")
        with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
            expected = step(plain, inputs)
            self.expected = collectives_of(lambda: [step(plain, inputs) for _ in range(2)])
        found = step(glue, inputs)
        self.found = collectives_of(lambda: [step(glue, inputs) for _ in range(2)])
        for got, want in zip(found, expected, strict=True):
            torch.testing.assert_close(got, want)

    def count(self, name):
        """Of a pass, ``pass.count``."""
        reports = [report for graph in self.session.graphs for report in graph.passes]
        return sum(report.counts.get(name.partition(".")[2], 0) for report in reports if name.startswith(report.name))


def x(*shape, seed=0):
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.requires_grad_()


POSITIONS = torch.tensor([0, 1, 2, 0, 1, 0, 1, 2])


def starts_twice(communicate):
    def fn(x, positions):
        first = communicate((positions == 0).long()).cumsum(0)
        second = communicate((positions == 0).long()).cumsum(0)
        return x * (first + second)

    return fn, (x(8), POSITIONS)


def starts_in_checkpoints(communicate):
    def fn(x, positions):
        def layer(x):
            return x.sin() * communicate((positions == 0).long()).cumsum(0)

        for _ in range(2):
            x = checkpoint(layer, x, use_reentrant=False)
        return x

    return fn, (x(8), POSITIONS)


def lengths(communicate):
    def fn(x, positions):
        starts = communicate((positions == 0).long()).nonzero().flatten()
        return x * starts.shape[0] + starts.diff().max()

    return fn, (x(8), POSITIONS)


def loss(communicate):
    def fn(x, weight, target):
        logits = communicate(torch.nn.functional.linear(x, weight))
        return torch.nn.functional.cross_entropy(logits, target)

    return fn, (x(64, 8), x(4096, 8, seed=1), torch.arange(64))


def experts(communicate):
    def fn(x, weights, selected):
        out = torch.zeros_like(x)
        for expert in range(3):
            token, _ = torch.where(selected == expert)
            out = out.index_add(0, token, communicate(x[token] @ weights[expert]))
        return out

    return fn, (x(6, 4), x(3, 4, 4, seed=1), torch.tensor([[0], [1], [2], [1], [0], [1]]))


def layers(communicate):
    def fn(x, *weights):
        for weight in weights:
            for number in range(12):
                x = ((x @ weight).sin() + x.cos()) * (1 + number)
            x = communicate(x)
        return x

    return fn, (x(4, 4), *(x(4, 4, seed=1 + layer) for layer in range(5)))


def attention(communicate):
    def fn(q, k, v, documents):
        mask = documents[:, None] == documents[None]
        return torch.nn.functional.scaled_dot_product_attention(q, communicate(k), communicate(v), mask)

    return fn, (x(1, 2, 8, 4), x(1, 2, 8, 4, seed=1), x(1, 2, 8, 4, seed=2), (POSITIONS == 0).cumsum(0))


FEWER = {
    "hoist_metadata.merged": starts_twice,
    "hoist_metadata.lifted": starts_in_checkpoints,
    "memoize_metadata.syncs_memoized": lengths,
    "chunk_loss.losses": loss,
    "group_experts.loops_grouped": experts,
}


@pytest.mark.parametrize("count", slow_but([name for name in FEWER if not name.startswith("group")], FEWER))
def test_what_a_rewrite_would_merge_move_or_drop_stays(count):
    make = FEWER[count]
    run = Run(*make(total))
    assert run.expected
    assert run.found == run.expected
    assert Run(*make(copy)).count(count) > run.count(count)


@pytest.mark.parametrize(
    ("count", "make"),
    [("specialize_attention.listed", attention), pytest.param("share_layers.calls", layers, marks=pytest.mark.slow)],
)
def test_what_a_rewrite_passes_by_stays(count, make):
    run = Run(*make(total))
    assert run.expected
    assert run.found == run.expected
    assert run.count(count)


ops = torch.ops._c10d_functional


@pytest.mark.parametrize("waits_inside", [True, False])
def test_nothing_is_read_before_a_collective_is_waited_for(waits_inside):
    def fn(x, positions):
        starts = ops.all_reduce((positions == 0).long(), "sum", dist.group.WORLD.group_name)
        if not waits_inside:
            starts = ops.wait_tensor(starts)

        def layer(x):
            if waits_inside:
                ops.wait_tensor(starts)
            return x.sin() * starts.max()

        for _ in range(2):
            x = checkpoint(layer, x, use_reentrant=False)
        return x

    assert Run(fn, (x(8), POSITIONS)).count("hoist_metadata.lifted") == (0 if waits_inside else 1)


@pytest.mark.parametrize("waits_inside", [True, False])
def test_no_copy_to_the_host_starts_while_a_collective_may_still_write(waits_inside):
    def fn(x, weight):
        for _ in range(3):
            x = ops.all_reduce((x @ weight).sin(), "sum", dist.group.WORLD.group_name)
            if not waits_inside:
                x = ops.wait_tensor(x)
            x = checkpoint(
                lambda x: ((ops.wait_tensor(x) if waits_inside else x) @ weight).sin(), x, use_reentrant=False
            )
        return x

    run = compile_with_glue(fn, offload="checkpoints")
    run.call(x(4, 4), x(4, 4, seed=1)).sum().backward()
    report = run.report.passes[-1]
    assert report.counts.get("moved", 0) == (0 if waits_inside else 2)
    assert any("a collective may still be writing it" in skip.reason for skip in report.skips) == waits_inside


@pytest.mark.parametrize("through", ["from_local", "to_local"])
@pytest.mark.parametrize("writes", [True, False])
def test_a_write_through_a_dtensor_is_a_write_to_the_local_tensor(through, writes):
    mesh = dist.init_device_mesh("cpu", (1,))

    def fn(x, positions):
        starts = (positions == 0).long()
        shard = DTensor.from_local(starts, mesh, [Replicate()], run_check=False)
        if through == "to_local":
            shard = shard + 0
            starts = shard.to_local()
        first = starts.cumsum(0)
        if writes:
            shard.add_(1)
        return x * first + x * starts.cumsum(0)

    run = compile_with_glue(fn)
    torch.testing.assert_close(run.call(x(8), POSITIONS), fn(x(8), POSITIONS))
    assert run.counts.get("merged", 0) == (0 if writes else 1)


@pytest.mark.parametrize("sizes", [(5,), (5, 7)])
def test_attention_between_dtensors_is_rewritten(sizes):
    """Tensor parallel: heads of this rank, as plain tensors, between products with sharded weights."""
    mesh = dist.init_device_mesh("cpu", (1,))
    weight = DTensor.from_local(x(8, 8, seed=1).detach(), mesh, [Shard(0)])

    def fn(x, positions):
        rows = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        heads = torch.nn.functional.linear(rows, weight).to_local().view(1, -1, 2, 4).transpose(1, 2)
        documents = (positions == 0).cumsum(0)
        mask = documents[:, None] == documents[None]
        return torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, mask)

    run = compile_with_glue(fn, passes={"specialize_attention": True})
    for size in sizes:
        inputs = x(1, size, 8).detach(), torch.arange(size) % 3
        torch.testing.assert_close(run.call(*inputs), fn(*inputs))
    for report in run.session.graphs:
        assert report.passes[0].counts["packed"] == 1


def gathered(logits):
    return logits.redistribute(placements=[Replicate()]).to_local()


def gathered_for_a_sum_of_gradients(logits):
    return logits.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def scaled_before_it_is_gathered(logits):
    return (logits * 2).redistribute(placements=[Replicate()]).to_local()


def only_this_rank(logits):
    return logits.to_local()


@pytest.mark.parametrize(
    ("bring", "placement", "agree", "is_rewritten"),
    [
        (gathered, Shard(0), True, True),
        (gathered, Shard(0), False, False),
        (gathered, Shard(1), True, False),
        (gathered_for_a_sum_of_gradients, Shard(0), True, False),
        (scaled_before_it_is_gathered, Shard(0), True, False),
        (only_this_rank, Shard(0), True, False),
    ],
)
def test_a_head_whose_classes_ranks_share(bring, placement, agree, is_rewritten):
    """tests/distributed/test_shared_heads.py has its numbers on two ranks."""
    mesh = dist.init_device_mesh("cpu", (1,))

    def fn(hidden, weight, target):
        rows = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)
        logits = bring(torch.nn.functional.linear(rows, DTensor.from_local(weight, mesh, [placement], run_check=False)))
        return torch.nn.functional.cross_entropy(logits, target)

    inputs = x(16, 8), x(512, 8, seed=1), torch.arange(16)
    run = compile_with_glue(fn, passes={"chunk_loss": True}, assume={"ranks_agree": agree})
    for got, want in zip(step(run.call, inputs), step(fn, inputs), strict=True):
        torch.testing.assert_close(got, want)
    assert (run.counts.get("statistics", 0) == 1) == is_rewritten
    assert bool(run.report.passes[0].skips) != is_rewritten


@pytest.mark.slow
def test_ranks_that_agree_on_each_compile_convert_a_frame_once(monkeypatch):
    """Which try is the last may depend on a rank's data; each is a collective that the others must take part in."""
    agreed = []

    def agree(graph, *_):
        state = graph.root_tx.distributed_state
        if state is not None and state.all_states is None:
            agreed.append(graph)
            state.all_states = [state.local_state]
            raise torch._dynamo.exc.CompileCollectiveRestartAnalysis

    monkeypatch.setattr(torch._dynamo.output_graph.OutputGraph, "run_compiler_collective", agree)

    def fn(x, weights, selected):
        return experts(copy)[0](x, weights, selected) * selected.max().item()

    _, inputs = experts(copy)
    session = Session()
    with torch._dynamo.config.patch(enable_compiler_collectives=True):
        torch.compile(fn, backend="aot_eager")(*inputs)
        alone = len(agreed)
        torch._dynamo.reset()
        found = torch.compile(fn, backend=GlueBackend(session=session), options={"compiler": "aot_eager"})(*inputs)
    assert 0 < alone == len(agreed) - alone
    assert any("enable_compiler_collectives" in event.reason for event in session.capture_events)
    torch.testing.assert_close(found, fn(*inputs))
