"""memory_budget: the predicted peak, and that the fewest bytes move that bring it below the budget."""

from __future__ import annotations

import operator

import pytest
import torch

from glue_compiler.errors import GlueWarning
from glue_compiler.fx.storage_roots import storage_root
from glue_compiler.passes import overlap_offload
from glue_compiler.passes.overlap_offload.copies import find_round_trips, save_sources
from glue_compiler.passes.overlap_offload.memory import peak_of, predict_memory
from glue_compiler.passes.overlap_offload.plan import plan_offload, worst_peak
from glue_compiler.passes.overlap_offload.saved_tensors import find_saved_tensors
from glue_compiler.passes.overlap_offload.simulator import Region
from tests.captured import compile_with_glue
from tests.passes.overlap_offload.models import Blocks, equal, step
from tests.passes.overlap_offload.test_copies import aten, pair_of, run_pass, to

FLOATS = 4 * 8 * 4
INPUT = 64 * 8 * 4
"""Bytes of a block's input in the models below."""


def report(model, **options):
    """The pass's report for a step on 64 rows; results are those without the pass."""
    x = torch.randn(64, 8)
    expected = step(compile_with_glue(model).call, model, x)
    torch._dynamo.reset()
    run = compile_with_glue(model, passes={"plan_memory": False}, **options)
    assert equal(expected, step(run.call, model, x))
    return run.report.passes[-1]


@pytest.fixture(scope="module")
def peaks():
    """Predicted bytes without any move, and with all of them."""
    torch._dynamo.reset()
    without = report(Blocks(8), memory_budget=2**40)
    with pytest.warns(GlueWarning, match="cannot be kept"):
        return [without.counts["predicted_peak"], report(Blocks(8), memory_budget=1).counts["predicted_peak"]]


@pytest.mark.slow
def test_a_budget_that_is_met_moves_nothing_and_says_by_how_much(peaks):
    found = report(Blocks(8), memory_budget=peaks[0])
    assert not found.changed
    assert "the peak is 0.00 GiB below the budget" in found.skips[-1].reason


@pytest.mark.slow
def test_the_fewest_inputs_move_that_fit(peaks):
    for missing in (1, INPUT + 1):
        found = report(Blocks(8), memory_budget=peaks[0] - missing)
        assert found.counts["bytes"] == -(-missing // INPUT) * INPUT
        assert found.counts["predicted_peak"] <= found.counts["memory_budget"] == peaks[0] - missing


def test_a_budget_that_cannot_be_kept_moves_what_helps_and_warns_with_numbers(peaks):
    with pytest.warns(GlueWarning, match=r"memory_budget of 0.00 GiB cannot be kept: a peak of .* GiB is predicted"):
        found = report(Blocks(8), memory_budget=1000)
    assert found.counts["predicted_peak"] == peaks[1]
    assert any("cannot fit" in skip.reason for skip in found.skips)


def test_with_offload_a_budget_decides_how_much(peaks):
    found = report(Blocks(8), memory_budget=peaks[0] - 1, offload="checkpoints")
    assert found.counts["moved"] == 1


def test_bytes_may_be_written_with_a_unit():
    assert not report(Blocks(3), memory_budget="24GiB").changed


# -- the prediction itself, on graphs that are counted by hand


def one_layer(x, w):
    """Two products; the first is saved, what lies between them is not."""
    a = torch.mm(x, w)
    return torch.mm(a.sin() * a.cos(), w), to(a, "cpu"), w


def its_backward(a, w, tangent):
    return (torch.mm(tangent * to(a, "cuda").cos(), w.t()),)


def test_a_step_is_counted_by_hand():
    pair = pair_of(one_layer, its_backward)
    inputs = FLOATS + 8 * 8 * 4
    # a, its sine, its cosine and their product. The host tensors are elsewhere.
    assert predict_memory(pair, [], None, only_realised=False) == ([], inputs + 4 * FLOATS)
    # The sine and the cosine stay inside of a kernel; at the second product: a, the operand, the result.
    assert predict_memory(pair, [], None, only_realised=True) == ([], inputs + 3 * FLOATS)


def test_a_pointwise_value_that_is_read_behind_a_kernel_too_is_in_no_memory():
    def ahead(x, w):
        a = torch.mm(x, w)
        wide = torch.maximum(a.unsqueeze(0), w.narrow(0, 0, 2).narrow(1, 0, 1).unsqueeze(-1))  # twice as large
        b = torch.mm(wide.select(0, 0).sin(), w)
        return wide.select(0, 1) * b, to(x, "cpu")

    pair = pair_of(ahead, lambda x, tangent: (tangent * to(x, "cuda"),))
    inputs = FLOATS + 8 * 8 * 4
    # One by one, at the second product: wide, the operand, the result.
    assert peak_of(pair, None, only_realised=False) == inputs + 4 * FLOATS
    # At the second product: a, of which wide is made where it is read, the operand, the result.
    assert peak_of(pair, None, only_realised=True) == inputs + 3 * FLOATS
    # What a kernel takes for itself comes on top, while it runs.
    own = {torch.ops.aten.mm.default: 7}
    found = peak_of(pair, None, only_realised=True, scratch=lambda node: own.get(node.target, 0))
    assert found == inputs + 3 * FLOATS + 7


def test_host_tensors_do_not_count():
    def ahead(x, w):
        a = torch.mm(x, w)
        return a.sin(), to(a, "cpu"), to(a, "cpu"), to(a, "cpu")

    pair = pair_of(ahead, lambda a, b, c, tangent: (tangent * to(a, "cuda"),))
    _, peak = predict_memory(pair, [], None, only_realised=False)
    assert peak == FLOATS + 8 * 8 * 4 + 3 * FLOATS  # backward: the tangent, the tensor that came back, their product


def test_what_lies_between_two_uses_of_inputs_belongs_to_the_region_in_between():
    def ahead(x, w):
        a = torch.mm(x, w)
        b = torch.mm(a.sin(), w)
        return b.sin(), to(a, "cpu"), to(b, "cpu"), w

    def back(a, b, w, tangent):
        tangent = torch.mm(tangent * to(b, "cuda"), w)
        wide = torch.cat([tangent] * 10)  # in b's backward, behind its use and in front of a's
        tangent = tangent + wide.sum(0)
        return (torch.mm(tangent * to(a, "cuda"), w),)

    pair = pair_of(ahead, back)
    trips, _ = find_round_trips(pair)
    save_sources(pair, trips)
    regions, _ = find_saved_tensors(pair, None, all_inputs=False, copied=[trip.source for trip in trips])
    sizes, _ = predict_memory(pair, regions, None, only_realised=False)
    assert [region.backward_base >= 10 * FLOATS for region in sizes] == [False, True]


def test_elements_of_one_operators_result_are_memory_of_their_own_and_pieces_of_a_split_are_not():
    def forward(x, w):
        values, indices = torch.sort(x)
        first, second = torch.unbind(values)[:2]
        return first + second, indices

    pair = pair_of(forward, lambda indices, tangent: (tangent,))
    items = [node for node in pair.forward.graph.nodes if node.target is operator.getitem]
    roots = {node.name: storage_root(node) for node in items}
    of_sort = [node for node in items if node.args[0].target is aten.sort.default]
    assert all(roots[node.name] is node for node in of_sort)
    of_unbind = [node for node in items if node not in of_sort]
    assert {roots[node.name] for node in of_unbind} == {of_sort[0]}


def test_what_a_region_holds_besides_counts_in_its_own_forward_and_backward():
    plain = [Region(index, 10) for index in range(4)]
    assert worst_peak(plain, ()) == 40
    busy = [Region(0, 10, forward_base=100), *plain[1:3], Region(3, 10, backward_base=25)]
    # 20 inputs' bytes at the end of region 0's forward; all 40 when backward begins.
    assert worst_peak(busy, ()) == 120
    assert worst_peak([*plain[:3], busy[3]], ()) == 65
    # Moved: region 3's own and the following one's.
    assert worst_peak([*plain[:3], busy[3]], (0, 1, 2)) == 45


def test_regions_that_must_move_count_as_moved_and_are_not_chosen_again():
    four = [Region(index, 10) for index in range(4)]
    plan = plan_offload(four, None, policy="budget", budget=40, required=[3])
    assert plan.moved == (3,)
    plan = plan_offload(four, None, policy="budget", budget=30, required=[1])
    assert plan.moved == (0, 1)
    assert plan_offload(four, None, policy="all", required=[3]).moved == (0, 1, 2, 3)
    five = [Region(index, 10) for index in range(5)]
    assert plan_offload(five, None, policy="budget", budget=40, required=[0]).moved == (0,)


def test_copies_that_the_graph_holds_move_whatever_the_budget():
    pair = pair_of(one_layer, its_backward)
    assert run_pass(pair, memory_budget=2**40).counts["moved"] == 1


def test_the_names_are_part_of_the_cache_key():
    from glue_compiler.options import GlueOptions

    keys = [overlap_offload.OverlapOffload().cache_options(GlueOptions(memory_budget=b)) for b in (None, 1, 2)]
    assert len(set(keys)) == 3
