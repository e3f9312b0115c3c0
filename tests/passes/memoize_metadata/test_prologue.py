"""What is split off a graph, and what must stay in it."""

import pytest
import torch

from tests.captured import assert_same_bits, compile_with_glue, count
from tests.passes.hoist_metadata.test_one_graph import packed_layer, positions_of


def compile_split(fn, **options):
    return compile_with_glue(fn, passes={"memoize_metadata": True}, **options)


def layer(x, positions, weight):
    return packed_layer(x, positions, weight)


def inputs(tokens=12):
    return [torch.randn(tokens, 4, dtype=torch.float64, requires_grad=True), torch.randn(4, 4, dtype=torch.float64)]


def memo_report(run):
    (report,) = run.session.graphs
    return report.passes[-1]


def assert_stays(run, reason):
    assert len(run.graphs) == 1
    assert not memo_report(run).changed
    assert any(reason in text for text in run.skip_reasons), run.skip_reasons


def test_syncs_move_and_the_rest_takes_host_numbers():
    run, positions = compile_split(layer), positions_of(5, 1, 6)
    assert_same_bits(lambda *a: layer(a[0], positions, a[1]), lambda *a: run.call(a[0], positions, a[1]), inputs())
    prologue, rest = run.graphs
    for gm, times in ((prologue, 1), (rest, 0)):
        assert count(gm, torch.nonzero) == times
        assert count(gm, "item") == times
    assert count(rest, torch.ops.aten._assert_scalar.default) == 0
    assert memo_report(run).counts["syncs_memoized"] == 2
    assert all(isinstance(r, torch.SymInt | torch.Tensor) for r in memo_report(run).prologue.results)


def test_each_length_is_that_of_its_own_tensor():
    """The shapes of what is handed over hold two lengths, of tensors that stay in the prologue."""

    def fn(x, positions):
        starts, odd = torch.nonzero(positions == 0), torch.nonzero(positions % 2)
        tables = starts[:, 0, None] * 2 - odd[:, 0], odd[:, 0, None] * 3 - odd[:, 0]
        return [x.sum() * table.to(x.dtype) for table in tables]

    run, (x, _) = compile_split(fn), inputs()
    for lengths in ((5, 1, 6), (2, 2, 2, 2, 2, 2), (12,)):
        positions = positions_of(*lengths)
        torch.testing.assert_close(run.call(x, positions), fn(x, positions), rtol=0, atol=0)
    assert memo_report(run).changed


@pytest.mark.parametrize("lengths", [(12,), (1,) * 12, (1, 11), (3, 4, 5)])
def test_no_recompile_for_other_documents(lengths):
    run = compile_split(layer)
    x, weight = inputs()
    run.call(x, positions_of(6, 6), weight)
    positions = positions_of(*lengths)
    assert_same_bits(lambda *a: layer(a[0], positions, a[1]), lambda *a: run.call(a[0], positions, a[1]), [x, weight])
    assert len(run.session.graphs) == 1


def test_other_lengths_of_the_row_recompile_once():
    run = compile_split(layer)
    for tokens in (12, 20, 7, 33):
        (x, weight), positions = inputs(tokens), positions_of(tokens - 3, 3)
        torch.testing.assert_close(run.call(x, positions, weight), layer(x, positions, weight), rtol=0, atol=0)
    assert len(run.session.graphs) == 2


def test_a_float_input_stays():
    def fn(x):
        return x / torch.nonzero(x > 0).shape[0]

    run, x = compile_split(fn), torch.randn(8, dtype=torch.float64)
    assert torch.equal(run.call(x), fn(x))
    assert_stays(run, "floating-point input")


def test_a_number_that_is_read_from_a_float_input_stays():
    def fn(x, limit):
        return x * int(limit.item())

    run, x = compile_split(fn), torch.randn(4, dtype=torch.float64)
    for limit in (2.0, 3.0):
        assert torch.equal(run.call(x, torch.tensor(limit)), fn(x, torch.tensor(limit)))
    assert len(run.graphs) == 1


def test_an_input_that_the_graph_writes_stays():
    def fn(x, positions):
        positions.add_(1)
        return x / torch.nonzero(positions).shape[0]

    run, x = compile_split(fn), torch.randn(4, dtype=torch.float64)
    for _ in range(2):
        assert torch.equal(run.call(x, torch.arange(4) - 1), fn(x, torch.arange(4) - 1))
    assert_stays(run, "written")


def test_an_input_written_after_it_was_read_stays():
    def fn(x, positions):
        found = torch.nonzero(positions).shape[0]
        positions.zero_()
        return x / found

    run, x = compile_split(fn), torch.randn(4, dtype=torch.float64)
    assert torch.equal(run.call(x, torch.arange(4)), fn(x, torch.arange(4)))
    assert_stays(run, "written in the graph")


def test_a_result_that_the_graph_writes_stays():
    def fn(x, positions):
        found = torch.nonzero(positions).flatten()
        found.add_(1)
        return x * found.sum()

    run, x, positions = compile_split(fn), torch.randn(4, dtype=torch.float64), torch.arange(4)
    for _ in range(2):
        assert torch.equal(run.call(x, positions), fn(x, positions))
    assert_stays(run, "written in the graph")


def test_a_read_behind_an_operator_that_may_write_anything_stays():
    @torch._dynamo.allow_in_graph
    def unknown(x):
        return x + 1

    def fn(x, positions):
        y = unknown(x)
        return y / torch.nonzero(positions).shape[0]

    run, x, positions = compile_split(fn), torch.randn(4, dtype=torch.float64), torch.arange(4)
    assert torch.equal(run.call(x, positions), fn(x, positions))
    assert_stays(run, "not understood")


def test_random_numbers_stay():
    def fn(x, positions):
        noise = torch.randint_like(positions, 2)
        return x / (1 + torch.nonzero(noise).shape[0])

    run = compile_split(fn)
    run.call(torch.randn(4), torch.arange(4))
    assert_stays(run, "not a pure operator")


def test_inside_of_autocast_it_stays():
    def fn(x, positions):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x / torch.nonzero(positions).shape[0]

    run, x = compile_split(fn), torch.randn(4)
    assert torch.equal(run.call(x, torch.arange(4)), fn(x, torch.arange(4)))
    assert_stays(run, "autocast")


def test_without_a_tensor_nothing_would_end_the_batch():
    def fn(x):
        return x + torch.nonzero(torch.ones(x.shape[0])).sum()

    run, x = compile_split(fn), torch.randn(4)
    assert torch.equal(run.call(x), fn(x))
    assert_stays(run, "no tensor input")


def same_document(x, positions):
    document = (positions == 0).cumsum(0)
    return x.masked_fill(document[:, None] != document, 0.0)


def test_a_large_mask_moves_without_a_sync_and_a_small_one_stays():
    x, positions = torch.randn(64, 64, dtype=torch.float64), positions_of(40, 24)
    for threshold, parts in ((64 * 64, 2), (64 * 64 + 1, 1)):
        torch._dynamo.reset()
        run = compile_split(same_document, memoize_threshold=threshold)
        assert torch.equal(run.call(x, positions), same_document(x, positions))
        assert len(run.graphs) == parts


def under_mask(x, mask):
    lists = torch.ops.glue.mask_blocks(mask, x.shape[2], x.shape[2], "shows", "zeros")
    return torch.ops.glue.masked_attention(x, x, x, mask, lists, "shows", "zeros")


def test_lists_of_a_large_mask_move_and_those_of_a_small_one_stay():
    x = torch.randn(1, 2, 64, 8, dtype=torch.float64)
    mask = torch.ones(64, 64, dtype=torch.bool).tril()
    for threshold, parts in ((64 * 64, 2), (64 * 64 + 1, 1)):
        torch._dynamo.reset()
        run = compile_split(under_mask, memoize_threshold=threshold)
        torch.testing.assert_close(run.call(x, mask), under_mask(x, mask))
        assert len(run.graphs) == parts
        assert count(run.graphs[-1], torch.ops.glue.mask_blocks) == 2 - parts


def under_numbers(x, mask):
    (kept,) = torch.ops.glue.materialized.default([mask[:, : x.shape[2]]])
    lists = torch.ops.glue.mask_blocks.default(kept, x.shape[2], x.shape[2], "added", "mean")
    return torch.ops.glue.masked_attention(x, x, x, kept, lists, "added", "mean")


def causal_numbers():
    return torch.full((64, 64), -torch.inf, dtype=torch.float64).triu(1)


def test_lists_of_a_mask_that_is_added_move_with_its_copy():
    x, mask = torch.randn(1, 2, 64, 8, dtype=torch.float64, requires_grad=True), causal_numbers()
    run = compile_split(under_numbers, memoize_threshold=64)
    for _ in range(2):
        found, wanted = (torch.autograd.grad(fn(x, mask).square().sum(), x)[0] for fn in (run.call, under_numbers))
        torch.testing.assert_close(found, wanted)
        mask[:, 3] = -torch.inf  # the next call reads it again
    prologue, rest = run.graphs
    assert [
        count(prologue, each) for each in (torch.ops.glue.mask_blocks.default, torch.ops.glue.materialized.default)
    ] == [1, 1]
    assert not any(
        count(rest, each) for each in (torch.ops.glue.mask_blocks.default, torch.ops.glue.materialized.default)
    )


STAYING = {
    "computed from numbers": lambda x, mask: under_numbers(x, mask * 2),
    "read otherwise": lambda x, mask: x * torch.ops.glue.materialized.default([mask])[0].sum(),
    "rows that are picked": lambda x, mask: under_numbers(x, mask[torch.arange(64)]),
}


@pytest.mark.parametrize("name", STAYING)
def test_other_numbers_stay(name):
    x, mask = torch.randn(1, 2, 64, 8, dtype=torch.float64), causal_numbers()
    if name == "read otherwise":
        mask = torch.rand(64, 64, dtype=torch.float64)
    run = compile_split(STAYING[name], memoize_threshold=64)
    torch.testing.assert_close(run.call(x, mask), STAYING[name](x, mask))
    assert all(count(gm, torch.ops.glue.mask_blocks.default, "sum") == 0 for gm in run.graphs[:-1])


def test_a_mask_that_is_learned_stays():
    x, mask = torch.randn(1, 2, 64, 8, dtype=torch.float64), causal_numbers().clamp(min=-9.0).requires_grad_()

    def fn(x, mask):
        lists = torch.ops.glue.mask_blocks.default(mask.detach(), 64, 64, "added", "mean")
        return torch.ops.glue.masked_attention(x, x, x, mask, lists, "added", "mean")

    run = compile_split(fn, memoize_threshold=64)
    found, wanted = (torch.autograd.grad(f(x, mask).square().sum(), mask)[0] for f in (run.call, fn))
    torch.testing.assert_close(found, wanted)
    assert len(run.graphs) == 1


def test_what_the_graph_returns_is_the_callers_own():
    def fn(x, positions):
        starts = torch.nonzero(positions == 0)
        return x * starts.shape[0], starts.flatten(), starts

    run, x, positions = compile_split(fn), torch.randn(4), positions_of(3, 1)
    expected = fn(x, positions)
    for _ in range(3):
        got = run.call(x, positions)
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a, b)
        assert got[1].data_ptr() == got[2].data_ptr()  # as in eager
        got[1].fill_(-1)
    assert len(run.graphs) == 2


def test_views_are_taken_again_in_the_rest():
    """A view of an input as a result would keep the batch alive for ever."""

    def fn(x, positions):
        rows = positions.view(2, -1)
        return (x * rows.t()[:, 0]).sum() / torch.nonzero(rows).shape[0]

    run, x, positions = compile_split(fn), torch.randn(6, dtype=torch.float64), torch.arange(12)
    assert torch.equal(run.call(x, positions), fn(x, positions))
    assert [type(r) for r in memo_report(run).prologue.results] == [torch.SymInt]


def test_a_tuple_is_handed_over_by_its_items():
    def fn(x, flags):
        return x[torch.where(flags)]

    run, x, some = compile_split(fn), torch.randn(3, 4), torch.rand(3, 4) > 0.5
    for flags in (some, ~some, torch.zeros_like(some)):
        assert torch.equal(run.call(x, flags), fn(x, flags))


def test_a_failing_check_raises_each_time():
    def fn(x, positions):
        longest = positions.max().item()
        torch._check(longest < 10)
        return x * longest

    run, x = compile_split(fn), torch.randn(4)
    assert torch.equal(run.call(x, torch.arange(4)), fn(x, torch.arange(4)))
    assert count(run.graphs[1], torch.ops.aten._assert_scalar.default) == 0
    for _ in range(2):
        with pytest.raises(RuntimeError):
            run.call(x, torch.arange(20))


@pytest.mark.parametrize("kind", [torch.nn.Parameter, torch.Tensor])
def test_a_parameter_is_no_part_of_a_batch(kind):
    """Integers of a quantised weight: what is computed from them would be kept as long as the weight."""
    table = torch.arange(4096)
    table = kind(table, requires_grad=False) if kind is torch.nn.Parameter else table
    run = compile_split(lambda x, table: x * table.cumsum(0), memoize_threshold=1024)
    run.call(torch.randn(4096), table)
    assert memo_report(run).changed == (kind is torch.Tensor)


def offsets(ids):
    return torch.ops.glue.exact_document_offsets.default(ids != ids.roll(1, -1))


def test_offsets_of_the_documents_of_a_mask_move():
    """They wait for the device, and each layer would compute them."""

    def fn(x, mask):
        return x * offsets(torch.ops.glue.mask_documents.default(mask)).sum()

    run, (x, _) = compile_split(fn), inputs()
    for lengths in ((5, 1, 6), (2, 10)):
        ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        mask = (ids[:, None] == ids)[None, None]
        assert_same_bits(lambda x, mask=mask: fn(x, mask), lambda x, mask=mask: run.call(x, mask), [x])
    prologue, rest = run.graphs
    for operator in (torch.ops.glue.mask_documents.default, torch.ops.glue.exact_document_offsets.default):
        assert (count(prologue, operator), count(rest, operator)) == (1, 0)


def test_offsets_of_small_vectors_stay():
    run, (x, _) = compile_split(lambda x, ids: x * offsets(ids).sum()), inputs()
    run.call(x, torch.tensor([[0, 0, 1, 1]]))
    assert len(run.graphs) == 1
