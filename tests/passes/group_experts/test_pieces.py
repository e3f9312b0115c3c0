"""group_experts: loops over pieces of sorted rows that become one grouped computation, and give what they gave."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests import versions
from tests.captured import count, result_and_gradients
from tests.passes.group_experts.loops import EXPERTS, INNER, WIDTH, compiled
from tests.passes.group_experts.piece_loops import (
    READS,
    SPELLINGS,
    assert_grouped,
    combine,
    glue,
    loop_list,
    loop_slice,
    loop_split,
    routed,
    router_inputs,
    scattered_counts,
    written_slice_by_slice,
)
from tests.slow import one_in, slow_but


def needs_capture_of(loop):
    if loop is loop_slice:
        versions.SLICE_WRITES.skip()


def check(loop, call, inputs, **tolerance):
    """Outputs and all gradients."""
    expected, actual = result_and_gradients(loop, inputs), result_and_gradients(call, inputs)
    assert len(expected) == len(actual)
    for want, got in zip(expected, actual, strict=True):
        torch.testing.assert_close(got, want, **tolerance)


@pytest.mark.parametrize("spelling", one_in(3, SPELLINGS))
def test_every_spelling(spelling):
    loop, loops = SPELLINGS[spelling]
    needs_capture_of(loop)
    run = compiled(loop)
    for favourite in (None, 1):  # all to one expert first: the others have few rows or none
        check(loop, run.call, router_inputs(favourite=favourite))
    check(loop, run.call, router_inputs(dtype=torch.float32), rtol=1e-4, atol=1e-5)
    assert_grouped(run, loops)
    assert count(run.graphs[0], glue.grouped_linear.default) == 2
    assert count(run.graphs[0], glue.expert_sort.default) == 0  # the model has sorted already


@pytest.mark.parametrize(
    "loop", slow_but((loop_slice,), [loop_split, loop_slice, loop_list]), ids=lambda loop: loop.__name__
)
@pytest.mark.parametrize(("tokens", "experts"), one_in(2, [(5, 2), (1, 6)]))
def test_few_tokens_and_all_experts(loop, tokens, experts):
    needs_capture_of(loop)
    run = compiled(loop)
    check(loop, run.call, router_inputs(tokens, experts))
    assert_grouped(run, SPELLINGS["split" if loop is loop_split else "slice"][1] if loop is not loop_list else 1)


def test_one_expert():
    run = compiled(loop_list)
    check(loop_list, run.call, router_inputs(7, 1))
    assert_grouped(run, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "loop", slow_but((loop_slice,), [loop_split, loop_slice, loop_list]), ids=lambda loop: loop.__name__
)
def test_dynamic_token_counts(loop):
    needs_capture_of(loop)
    run = compiled(loop)
    for tokens in (11, 7, 5, 13):
        check(loop, run.call, router_inputs(tokens))
    assert len(run.graphs) == 2
    assert_grouped(run, 1 if loop is loop_list else 2)


@pytest.mark.slow
def test_the_graph_is_as_small_with_many_experts():
    sizes = []
    for experts in (2, 12):
        torch._dynamo.reset()
        run = compiled(loop_list)
        run.call(*router_inputs(experts=experts))
        sizes.append(len(run.graph.graph.nodes))
    assert sizes[0] == sizes[1]


def test_a_module_list_with_biases():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            make = lambda: nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH))  # noqa: E731
            self.experts = nn.ModuleList(make() for _ in range(EXPERTS)).double()

        def forward(self, x, logits):
            weights, selected, order = routed(logits)
            rows, outputs, start = x[order // selected.shape[1]], [], 0
            for expert, n in zip(self.experts, scattered_counts(selected, EXPERTS).tolist(), strict=True):
                outputs.append(expert(rows[start : start + n]))
                start = start + n
            return combine(x, weights, selected, order, torch.cat(outputs))

    model = Experts()
    x, logits, *_ = router_inputs()

    def step(call):
        model.zero_grad()
        results = result_and_gradients(call, [x, logits])
        return results + [parameter.grad.clone() for parameter in model.parameters()]

    expected = step(model)
    run = compiled(model)
    for want, got in zip(expected, step(run.call), strict=True):
        torch.testing.assert_close(got, want)
    assert_grouped(run, 1)
    assert count(run.graph, glue.grouped_linear_list.default) == 2
    assert count(run.graph, torch.stack) == 0


def test_stacked_biases_and_vectors():
    def loop(x, logits, gate_up, down):
        _, selected, order = routed(logits)
        rows = x[order // selected.shape[1]]
        outputs, start = [], 0
        for expert, n in enumerate(scattered_counts(selected, EXPERTS).tolist()):
            piece = F.linear(rows[start : start + n], gate_up[expert], gate_up[expert, :, 0])
            outputs.append(piece * gate_up[expert, :, 1])
            start = start + n
        return torch.cat(outputs)

    run = compiled(loop)
    check(loop, run.call, router_inputs())
    assert_grouped(run, 1)


def test_counts_of_one_hot_prove_slices_without_topk():
    def loop(x, selected, gate_up):
        flat = selected.flatten()
        rows = x[flat.argsort(stable=True) // selected.shape[1]]
        outputs, start = [], 0
        for expert, n in enumerate(F.one_hot(flat, EXPERTS).sum(0).tolist()):
            outputs.append(F.relu(F.linear(rows[start : start + n], gate_up[expert])))
            start = start + n
        return torch.cat(outputs)

    x, _, gate_up, _ = router_inputs()
    selected = torch.randint(0, 3, (11, 2))  # an expert twice in a token, and one without rows
    run = compiled(loop)
    check(lambda a, b: loop(a, selected, b), lambda a, b: run.call(a, selected, b), [x, gate_up])
    assert_grouped(run, 1)


@versions.SLICE_WRITES.mark
def test_counts_added_up_with_scatter_add():
    def loop(x, selected, gate_up):
        flat = selected.flatten()
        counts = torch.zeros(EXPERTS, dtype=torch.int64).scatter_add_(0, flat, torch.ones_like(flat))
        rows = x[flat.argsort(stable=True) // selected.shape[1]]
        out = torch.empty(rows.shape[0], gate_up.shape[1], dtype=x.dtype)
        return written_slice_by_slice(out, rows, counts.tolist(), gate_up)

    x, _, gate_up, _ = router_inputs()
    selected = torch.randint(0, EXPERTS, (11, 2))
    run = compiled(loop)
    check(lambda a, b: loop(a, selected, b), lambda a, b: run.call(a, selected, b), [x, gate_up])
    assert_grouped(run, 1)


@versions.SLICE_WRITES.mark
def test_rows_of_no_expert_stay_zero():
    """histc does not count ids from E on; the slices end before the rows do."""

    def loop(x, selected, gate_up):
        flat = selected.flatten()
        counts = torch.histc(flat.to(torch.float32), bins=EXPERTS, min=0, max=EXPERTS - 1).long()
        rows = x[flat.argsort(stable=True) // selected.shape[1]]
        out = torch.zeros(rows.shape[0], gate_up.shape[1], dtype=x.dtype)
        return written_slice_by_slice(out, rows, counts.tolist(), gate_up)

    x, _, gate_up, _ = router_inputs()
    selected = torch.randint(0, EXPERTS + 2, (11, 2))
    assert (selected >= EXPERTS).any()
    run = compiled(loop)
    check(lambda a, b: loop(a, selected, b), lambda a, b: run.call(a, selected, b), [x, gate_up])
    assert_grouped(run, 1)


def split_by(sizes_tensor, x, gate_up):
    pieces = x.split(sizes_tensor.tolist())
    return torch.cat([F.linear(piece, gate_up[i]) for i, piece in enumerate(pieces)])


def test_sizes_of_unknown_origin_are_checked_on_the_device():
    x, _, gate_up, _ = router_inputs(9)
    run = compiled(split_by)
    sizes = torch.tensor([2, 0, 4, 3])
    check(lambda a, b: split_by(sizes, a, b), lambda a, b: run.call(sizes, a, b), [x, gate_up])
    assert run.counts["loops_grouped"] == 1
    assert count(run.graph, *READS) == 0
    for wrong in ([2, 0, 4, 4], [2, -1, 5, 3], [2, 0, 4, 2]):
        with pytest.raises(RuntimeError):
            split_by(torch.tensor(wrong), x, gate_up)
        with pytest.raises(RuntimeError):
            run.call(torch.tensor(wrong), x, gate_up)


def test_counts_that_something_else_needs_stay():
    def loop(x, logits, gate_up, down):
        _, selected, order = routed(logits)
        sizes = scattered_counts(selected, EXPERTS).tolist()
        pieces = x[order // selected.shape[1]].split(sizes)
        out = torch.cat([F.linear(piece, gate_up[i]) for i, piece in enumerate(pieces)])
        return out * (sizes[0] + 1)

    run = compiled(loop)
    check(loop, run.call, router_inputs())
    assert run.counts["loops_grouped"] == 1
    assert count(run.graph, *SPLITS_AND_CATS) == 0
    assert count(run.graph, "item") > 0


SPLITS_AND_CATS = ("split", torch.split, torch.cat)


def test_without_gradients_and_frozen():
    inputs = router_inputs()
    run = compiled(loop_split)
    with torch.no_grad():
        torch.testing.assert_close(run.call(*inputs), loop_split(*inputs))
    for weight in inputs[2:]:
        weight.requires_grad_(False)
    check(loop_split, run.call, inputs)
    assert_grouped(run, 2)


@pytest.mark.parametrize("loop", [loop_split, loop_list], ids=lambda loop: loop.__name__)
def test_under_checkpointing(loop):
    def block(x, *rest):
        return torch.utils.checkpoint.checkpoint(loop, torch.tanh(x), *rest, use_reentrant=False).sin()

    run = compiled(block)
    check(block, run.call, router_inputs())
    assert run.counts["loops_grouped"] == (2 if loop is loop_split else 1)
    assert count(run.graph, *READS) == 0


def test_under_autocast():
    def block(*inputs):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loop_split(*inputs)

    run = compiled(block)
    inputs = router_inputs(dtype=torch.float32)
    check(block, run.call, inputs, rtol=5e-2, atol=5e-2)
    assert run.counts["loops_grouped"] == 2


def test_no_number_is_read_and_two_runs_are_equal():
    run = compiled(loop_list)
    inputs = router_inputs()
    first = result_and_gradients(run.call, inputs)
    with torch.profiler.profile() as profile:
        second = result_and_gradients(run.call, inputs)
    names = {event.name for event in profile.events()}
    assert "glue::grouped_linear" in names
    for want, got in zip(first, second, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert not names & {"aten::nonzero", "aten::item"}
