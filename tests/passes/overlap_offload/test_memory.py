"""memory_budget: the predicted peak, and that checkpoint inputs move where it is above the budget."""

from __future__ import annotations

import operator

import pytest
import torch

from glue_compiler.errors import GlueWarning
from glue_compiler.fx.storage_roots import storage_root
from glue_compiler.passes import overlap_offload
from glue_compiler.passes.overlap_offload.memory import peak_of
from tests.captured import compile_with_glue
from tests.passes.overlap_offload.models import Blocks, equal, step
from tests.passes.overlap_offload.test_copies import aten, pair_of, run_pass, to

FLOATS = 4 * 8 * 4


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
def test_a_budget_that_is_met_moves_nothing_and_says_so(peaks):
    found = report(Blocks(8), memory_budget=peaks[0], offload="checkpoints")
    assert not found.changed
    assert "the predicted peak is below the budget" in found.skips[-1].reason


@pytest.mark.slow
def test_without_a_plan_all_inputs_but_the_last_move_where_the_step_does_not_fit(peaks):
    found = report(Blocks(8), memory_budget=peaks[0] - 1)
    assert found.counts["moved"] == 7
    assert found.counts["predicted_peak"] == peaks[1] < peaks[0]


def test_a_budget_that_cannot_be_kept_moves_what_helps_and_warns_with_numbers(peaks):
    with pytest.warns(GlueWarning, match=r"memory_budget of 1000 bytes cannot be kept: a peak of .* KiB is predicted"):
        found = report(Blocks(8), memory_budget=1000)
    assert found.counts["predicted_peak"] == peaks[1]
    assert any("cannot be kept" in skip.reason for skip in found.skips)


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
    assert peak_of(pair, None, only_realised=False) == inputs + 4 * FLOATS
    # The sine and the cosine stay inside of a kernel; at the second product: a, the operand, the result.
    assert peak_of(pair, None, only_realised=True) == inputs + 3 * FLOATS


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
    # Backward: the tangent, the tensor that came back, their product.
    assert peak_of(pair, None, only_realised=False) == FLOATS + 8 * 8 * 4 + 3 * FLOATS


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


def test_copies_that_the_graph_holds_move_whatever_the_budget():
    pair = pair_of(one_layer, its_backward)
    assert run_pass(pair, memory_budget=2**40).counts["moved"] == 1


def test_the_names_are_part_of_the_cache_key():
    from glue_compiler.options import GlueOptions

    keys = [overlap_offload.OverlapOffload().cache_options(GlueOptions(memory_budget=b)) for b in (None, 1, 2)]
    assert len(set(keys)) == 3
