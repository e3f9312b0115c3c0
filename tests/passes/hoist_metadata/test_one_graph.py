"""hoist_metadata inside one graph: what becomes one, and what must not."""

import operator

import pytest
import torch

from tests.captured import assert_same_bits, compile_with_glue, count, result_and_gradients


def lengths_of(positions):
    starts = torch.nonzero(positions == 0).flatten()
    ends = torch.cat([starts[1:], starts.new_full((1,), positions.shape[0])])
    return ends - starts


def packed_layer(x, positions, weight):
    """A layer that rebuilds the metadata of its packed batch, sync by sync."""
    lengths = lengths_of(positions)
    longest = lengths.max().item()
    return torch.tanh(x @ weight) * (positions[:, None] < longest) / lengths.shape[0]


def positions_of(*lengths):
    return torch.cat([torch.arange(n) for n in lengths])


def two_layers(x, positions, first, second):
    return packed_layer(packed_layer(x, positions, first), positions, second)


def layer_inputs(tokens=12):
    return [torch.randn(tokens, 4, dtype=torch.float64), *(torch.randn(4, 4, dtype=torch.float64) for _ in range(2))]


def test_two_equal_nonzeros_and_items_become_one():
    x, first, second = (t.requires_grad_() for t in layer_inputs())
    positions = positions_of(5, 1, 6)
    run = compile_with_glue(two_layers)
    assert_same_bits(
        lambda *a: two_layers(a[0], positions, *a[1:]), lambda *a: run.call(a[0], positions, *a[1:]), [x, first, second]
    )
    assert count(run.graph, torch.nonzero) == 1
    assert count(run.graph, "item") == 1
    assert run.counts["syncs_removed"] == 2
    assert run.counts["symbols_unified"] >= 2  # 2.11 has symbols for slices too


def test_switched_off_the_graph_keeps_both():
    x, first, second = layer_inputs()
    run = compile_with_glue(two_layers, passes={"hoist_metadata": False})
    run.call(x, positions_of(12), first, second)
    assert count(run.graph, torch.nonzero) == 2
    assert run.report.passes == []


@pytest.mark.parametrize("lengths", [(12,), (1,) * 12, (1, 11), (3, 4, 5)])
def test_every_packing_of_the_same_graph(lengths):
    x, first, second = (t.requires_grad_() for t in layer_inputs())
    run = compile_with_glue(two_layers)
    run.call(x, positions_of(6, 6), first, second)
    positions = positions_of(*lengths)
    assert_same_bits(
        lambda *a: two_layers(a[0], positions, *a[1:]), lambda *a: run.call(a[0], positions, *a[1:]), [x, first, second]
    )
    assert len(run.graphs) == 1


def test_a_second_length_recompiles_once_and_then_no_more():
    run = compile_with_glue(two_layers)
    for tokens in (12, 20, 7, 33):
        inputs = layer_inputs(tokens)
        positions = positions_of(tokens - 3, 3)
        expected = two_layers(inputs[0], positions, *inputs[1:])
        torch.testing.assert_close(run.call(inputs[0], positions, *inputs[1:]), expected, rtol=0, atol=0)
    assert len(run.graphs) == 2


def test_assertions_on_equal_values_go():
    on, off = compile_with_glue(two_layers), compile_with_glue(two_layers, passes={"hoist_metadata": False})
    x, first, second = layer_inputs()
    for run in (on, off):
        run.call(x, positions_of(5, 7), first, second)
    asserts = torch.ops.aten._assert_scalar.default
    assert count(on.graph, asserts) == count(off.graph, asserts) // 2 > 0


def test_tensors_of_both_sizes_meet_after_their_symbols_are_one():
    def fn(flags, values):
        first, second = values[torch.nonzero(flags).flatten()], values[torch.nonzero(flags).flatten()]
        return first + second

    run = compile_with_glue(fn)
    flags, values = torch.tensor([True, False, True]), torch.randn(3, requires_grad=True)
    assert_same_bits(lambda v: fn(flags, v), lambda v: run.call(flags, v), [values])
    assert count(run.graph, torch.nonzero) == 1


def by_masks(x, weights, ids):
    """A mask that is written three times in the code, as in ``y[ids == e] = expert(h[ids == e])``."""
    rows = torch.tanh(x[ids == 1]) * weights[ids == 1]
    return torch.zeros_like(x).index_add(0, (ids == 1).nonzero()[:, 0], rows)


def rows_and_their_places(x, weights, ids):
    """Of two equal masks the same is read twice."""
    return torch.tanh(x[ids == 1]).sum() + weights.sin()[ids == 1].sum() + x[ids == 1].sum()


@pytest.mark.parametrize("fn", [by_masks, rows_and_their_places])
def test_equal_masks_whose_readers_make_symbols_of_their_own_compile(fn):
    """One mask with two such readers does not: torch knows one size of what is read of it, and both are on record."""
    tensors = [torch.randn(12, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    ids = torch.tensor([0, 1, 1, 2, 1, 0, 0, 2, 1, 2, 1, 0])
    run = compile_with_glue(fn)
    assert_same_bits(lambda *a: fn(*a, ids), lambda *a: run.call(*a, ids), tensors)


def test_equal_masks_are_one_where_their_readers_are():
    def fn(x, ids):
        return torch.nonzero(ids == 1).sum(), (torch.nonzero(ids == 1) + 1).prod(), x * 2

    ids = torch.tensor([0, 1, 1, 2, 1])
    run = compile_with_glue(fn)
    for got, want in zip(run.call(torch.ones(5), ids), fn(torch.ones(5), ids), strict=True):
        assert torch.equal(got, want)
    assert count(run.graph, torch.nonzero) == 1


def test_a_write_between_them_keeps_both():
    def fn(flags):
        first = torch.nonzero(flags)
        flags[0] = 1 - flags[0]
        return first.sum(), torch.nonzero(flags).sum()

    run = compile_with_glue(fn)
    assert run.call(torch.tensor([0, 1, 1])) == fn(torch.tensor([0, 1, 1]))
    assert count(run.graph, torch.nonzero) == 2
    assert any("written between" in reason for reason in run.skip_reasons)


def test_a_write_through_another_view_keeps_both():
    def fn(base):
        view = base[1:]
        first = torch.nonzero(base).sum()
        view.zero_()
        return first, torch.nonzero(base).sum()

    run = compile_with_glue(fn)
    assert run.call(torch.tensor([1, 1, 1])) == fn(torch.tensor([1, 1, 1]))
    assert count(run.graph, torch.nonzero) == 2


def test_a_write_through_another_input_of_the_same_memory_keeps_both():
    def fn(left, right):
        first = left.cumsum(0) * 2
        right.zero_()
        return first, left.cumsum(0) * 3

    def inputs():
        base = torch.ones(4, dtype=torch.int64)
        return base[:3], base[1:]

    run = compile_with_glue(fn)
    for got, want in zip(run.call(*inputs()), fn(*inputs()), strict=True):
        assert torch.equal(got, want)
    assert count(run.graph, "cumsum") == 2


def test_two_equal_tensors_of_which_one_is_written_stay_two():
    def fn(x):
        first, second = x + 1, x + 1
        first.mul_(2)
        return first * 3, second * 3

    run = compile_with_glue(fn)
    x = torch.arange(4)
    for got, want in zip(run.call(x), fn(x), strict=True):
        assert torch.equal(got, want)
    assert count(run.graph, operator.add) == 2


def test_both_written_with_other_numbers_stay_two():
    def fn(x):
        first, second = x + 1, x + 1
        first.mul_(2)
        second.mul_(3)
        return first.cumsum(0), second.cumsum(0)

    run = compile_with_glue(fn)
    x = torch.arange(4)
    for got, want in zip(run.call(x), fn(x), strict=True):
        assert torch.equal(got, want)
    assert count(run.graph, "cumsum") == 2


def test_a_change_of_metadata_in_place_separates():
    def fn(x):
        y = x * 2
        first = y.sum(0)
        y.t_()
        return first, y.sum(0)

    run = compile_with_glue(fn)
    x = torch.arange(6).reshape(2, 3)
    for got, want in zip(run.call(x), fn(x), strict=True):
        assert torch.equal(got, want)


def test_two_random_calls_stay_two():
    def fn(x):
        return torch.rand_like(x), torch.rand_like(x)

    run = compile_with_glue(fn)
    first, second = run.call(torch.zeros(8))
    assert not torch.equal(first, second)
    assert any("random" in reason for reason in run.skip_reasons)


def test_two_dropouts_of_one_tensor_stay_two():
    def fn(x):
        return torch.nn.functional.dropout(x, 0.5), torch.nn.functional.dropout(x, 0.5)

    run = compile_with_glue(fn)
    first, second = run.call(torch.ones(64))
    assert not torch.equal(first, second)


def test_values_that_need_a_gradient_stay_two():
    """One node would sum the two gradients in another order."""

    def fn(x):
        return x.exp() * 2, x.exp() * 3

    run = compile_with_glue(fn)
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert_same_bits(fn, run.call, [x])
    assert count(run.graph, "exp") == 2
    assert any("needs a gradient" in reason for reason in run.skip_reasons)


def test_the_same_values_without_gradient_become_one():
    def fn(x):
        return x.exp() * 2, x.exp() * 3

    run = compile_with_glue(fn)
    with torch.no_grad():
        run.call(torch.randn(5, requires_grad=True))
    assert count(run.graph, "exp") == 1


def test_a_value_computed_with_grad_off_does_not_stand_for_one_with_grad_on():
    def fn(x):
        with torch.no_grad():
            first = x.exp()
        return first * x, x.exp() * x

    run = compile_with_glue(fn)
    assert_same_bits(fn, run.call, [torch.randn(5, dtype=torch.float64, requires_grad=True)])


def test_equal_expressions_on_different_devices_stay_two():
    def fn():
        return torch.arange(4, device="cpu").sum(), torch.arange(4, device="meta").sum()

    run = compile_with_glue(fn, eager=True)
    cpu, meta = run.call()
    assert (cpu.device.type, meta.device.type) == ("cpu", "meta")
    assert count(run.graph, torch.arange) == 2


def test_autocast_separates():
    def fn(x, w):
        plain = x @ w
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = x @ w
        return plain, low

    run = compile_with_glue(fn)
    plain, low = run.call(torch.randn(4, 4), torch.randn(4, 4))
    assert (plain.dtype, low.dtype) == (torch.float32, torch.bfloat16)


def test_two_regions_with_the_same_autocast_do_not():
    def fn(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            first = x.cumsum(0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            second = x.cumsum(0)
        return first * 2, second * 3

    run = compile_with_glue(fn)
    x = torch.randn(4)
    assert_same_bits(fn, run.call, [x])
    assert count(run.graph, "cumsum") == 1


def test_a_graph_that_enters_autocast_is_rewritten_around_it():
    def fn(x, w):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = x @ w
        return low * x.cumsum(0), x.cumsum(0) * 2

    run = compile_with_glue(fn)
    assert_same_bits(fn, run.call, [torch.randn(3, 3), torch.randn(3, 3)])
    assert count(run.graph, "cumsum") == 1


def test_two_outputs_never_share_memory():
    def fn(x):
        return x + 1, x + 1

    run = compile_with_glue(fn)
    first, second = run.call(torch.arange(3))
    assert first.data_ptr() != second.data_ptr()
    assert any("returns its memory" in reason for reason in run.skip_reasons)


def test_two_outputs_are_never_one_object():
    """Eager returns two views of the input: changing the shape of one in place leaves the other."""

    def fn(x):
        return x.view(-1), x.view(-1)

    run = compile_with_glue(fn)
    first, second = run.call(torch.ones(2, 3))
    first.unsqueeze_(0)
    assert second.shape == (6,)
    assert count(run.graph, "view") == 2


def test_numbers_of_other_types_are_other_values():
    def fn(x):
        return (x * 1).cumsum(0), (x * 1.0).cumsum(0), (x * True).cumsum(0)

    run = compile_with_glue(fn)
    x = torch.arange(4)
    assert [t.dtype for t in run.call(x)] == [t.dtype for t in fn(x)]
    assert count(run.graph, operator.mul) == 3


def test_zero_and_minus_zero_are_other_values():
    def fn(x):
        return torch.copysign(x, 0.0) * 2, torch.copysign(x, -0.0) * 2

    run = compile_with_glue(fn)
    assert_same_bits(fn, run.call, [torch.ones(3)])


@torch.library.custom_op("glue_tests::next_number", mutates_args=())
def next_number(x: torch.Tensor) -> torch.Tensor:
    next_number.calls += 1
    return x + next_number.calls


next_number.calls = 0
next_number.register_fake(lambda x: torch.empty_like(x))


def test_an_operator_that_is_not_torchs_own_stays():
    def fn(x):
        return next_number(x) * 2, next_number(x) * 2

    run = compile_with_glue(fn)
    first, second = run.call(torch.zeros(3))
    assert not torch.equal(first, second)
    assert any("not torch's own" in reason for reason in run.skip_reasons)


@torch._dynamo.allow_in_graph
def writes_in_secret(x):
    x.add_(1)


def test_nothing_is_merged_across_a_function_that_is_not_understood():
    def fn(x):
        first = x.cumsum(0) * 2
        writes_in_secret(x)
        return first, x.cumsum(0) * 3

    run = compile_with_glue(fn, eager=True)
    for got, want in zip(run.call(torch.arange(4)), fn(torch.arange(4)), strict=True):
        assert torch.equal(got, want)
    assert count(run.graph, "cumsum") == 2


def test_under_vmap_nothing_is_merged_across_its_levels():
    def fn(x):
        inside = torch.vmap(lambda row: row.cumsum(0) + x.cumsum(0))(x[None])
        return inside, x.cumsum(0) * 2

    run = compile_with_glue(fn)
    assert_same_bits(fn, run.call, [torch.arange(4.0)])


def test_an_exception_that_the_metadata_deserves_still_comes():
    """The assertion that one of two equal values had must survive."""

    def fn(flags, values):
        n = flags.sum().item()
        m = flags.sum().item()
        torch._check(n >= 1)
        torch._check(m >= 1)
        return values[:n].sum() + values[:m].sum()

    run = compile_with_glue(fn)
    values = torch.arange(4.0)
    assert run.call(torch.tensor([1, 1, 0, 0]), values) == 2
    with pytest.raises(RuntimeError):
        run.call(torch.tensor([0, 0, 0, 0]), values)


@pytest.mark.slow
def test_inference_mode_gives_the_same():
    run = compile_with_glue(two_layers)
    x, first, second = layer_inputs()
    positions = positions_of(5, 7)
    with torch.inference_mode():
        got, want = run.call(x, positions, first, second), two_layers(x, positions, first, second)
    assert torch.equal(got, want)
    assert count(run.graph, torch.nonzero) == 1


def test_gradients_match_eager_in_fp64_for_random_projections():
    run = compile_with_glue(two_layers)
    x, first, second = (t.requires_grad_() for t in layer_inputs(9))
    positions = positions_of(2, 7)
    got = result_and_gradients(lambda *a: run.call(a[0], positions, *a[1:]), [x, first, second])
    want = result_and_gradients(lambda *a: two_layers(a[0], positions, *a[1:]), [x, first, second])
    assert len(got) == 4
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    "repeated",
    [
        lambda p: (torch.nonzero(p == 0), torch.nonzero(p == 0)),
        lambda p: (torch.nonzero(p == 0)[:, 0], torch.nonzero(p == 0)[:, 0]),
        lambda p: (torch.nonzero(p == 0), torch.nonzero(p == 0), torch.nonzero(p == 0).shape[0] * torch.ones(2)),
        lambda p: (torch.nonzero(p == 0).sum() * 2, torch.nonzero(p == 0)),
        lambda p: (torch.nonzero(p == 0).sum() * 2, torch.nonzero(p == 0).sum() * 3),
    ],
)
def test_two_outputs_that_depend_on_data_keep_their_own_sizes(repeated):
    run, positions = compile_with_glue(repeated, passes={"hoist_metadata": True}), torch.tensor([0, 1, 0])
    for got, want in zip(run.call(positions), repeated(positions), strict=True):
        assert torch.equal(got, want)
    assert len(run.graphs) == 1


@pytest.mark.parametrize("first_is", ["written", "returned", "used"])
def test_the_second_and_third_become_one_where_the_first_stays(first_is):
    """Sizes that depend on data: of what stays, those of the second are known by other symbols than the first's."""

    def fn(positions):
        first = torch.nonzero(positions == 0)
        if first_is == "written":
            first.fill_(1)
        second, third = torch.nonzero(positions == 0), torch.nonzero(positions == 0)
        sums = [each.flatten().cumsum(0) for each in (first, second, third)]
        scaled = third * 2
        scaled[0] = 5
        sums[2][-1] = 1
        found = (*(each.sum() for each in sums), second.sum(), scaled.sum())
        return (first, *found) if first_is == "returned" else found

    run, positions = compile_with_glue(fn), positions_of(3, 4, 5)
    for got, want in zip(run.call(positions), fn(positions), strict=True):
        assert torch.equal(got, want)
    assert count(run.graph, torch.nonzero) == (1 if first_is == "used" else 2)
