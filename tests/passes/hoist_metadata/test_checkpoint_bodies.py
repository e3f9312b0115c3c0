"""hoist_metadata and checkpoint bodies: what leaves them, and what must stay inside."""

import functools
import operator

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from glue_compiler.fx import bodies
from tests.captured import assert_same_bits, compile_with_glue, count
from tests.passes.hoist_metadata.test_one_graph import layer_inputs, lengths_of, packed_layer, positions_of


def outer_count(gm, *targets):
    """Calls in the captured graph itself, without those in bodies."""
    return sum(node.op.startswith("call_") and node.target in targets for node in gm.graph.nodes)


def checkpointed(layer=packed_layer, **options):
    def model(x, positions, *weights):
        for weight in weights:
            x = checkpoint(layer, x, positions, weight, use_reentrant=False, **options)
        return x

    return model


def check(model, positions, inputs, run):
    assert_same_bits(lambda *a: model(a[0], positions, *a[1:]), lambda *a: run.call(a[0], positions, *a[1:]), inputs)


def grad_inputs(tokens=12):
    return [t.requires_grad_() for t in layer_inputs(tokens)]


def test_equal_metadata_leaves_both_bodies():
    model, run = checkpointed(), None
    run = compile_with_glue(model)
    check(model, positions_of(5, 1, 6), grad_inputs(), run)
    assert count(run.graph, torch.nonzero) == outer_count(run.graph, torch.nonzero) == 1
    assert count(run.graph, "item") == outer_count(run.graph, "item") == 1
    assert run.counts["syncs_removed"] == 2


def test_the_only_region_loses_its_sync_to_the_graph_around_it():
    """Nothing is merged, but backward does not read back again."""
    model = checkpointed()
    run = compile_with_glue(model)
    x, first, _ = grad_inputs()
    check(model, positions_of(5, 7), [x, first], run)
    assert outer_count(run.graph, torch.nonzero) == count(run.graph, torch.nonzero) == 1


def test_assertions_leave_with_the_values_they_check():
    run = compile_with_glue(checkpointed())
    run.call(grad_inputs()[0], positions_of(5, 7), *grad_inputs()[1:])
    asserts = torch.ops.aten._assert_scalar.default
    assert count(run.graph, asserts) == outer_count(run.graph, asserts) > 0


def test_metadata_of_the_graph_around_it_is_used_inside():
    def model(x, positions, weight):
        return checkpoint(packed_layer, x, positions, weight, use_reentrant=False) + lengths_of(positions).shape[0]

    def model_before(x, positions, weight):
        n = lengths_of(positions).shape[0]
        return checkpoint(packed_layer, x, positions, weight, use_reentrant=False) + n

    for fn in (model, model_before):
        run = compile_with_glue(fn)
        check(fn, positions_of(3, 9), grad_inputs()[:2], run)
        assert count(run.graph, torch.nonzero) == 1


def test_regions_on_other_positions_keep_their_own():
    def model(x, first, second, weight):
        x = checkpoint(packed_layer, x, first, weight, use_reentrant=False)
        return checkpoint(packed_layer, x, second, weight, use_reentrant=False)

    run = compile_with_glue(model)
    x, weight, _ = grad_inputs()
    first, second = positions_of(5, 7), positions_of(6, 6)
    assert_same_bits(lambda x, w: model(x, first, second, w), lambda x, w: run.call(x, first, second, w), [x, weight])
    assert count(run.graph, torch.nonzero) == 2


def test_an_equal_expression_of_a_tensor_that_needs_a_gradient_stays_inside():
    def layer(x, scale):
        return torch.sin(x) * torch.exp(scale)

    def model(x, scale):
        x = checkpoint(layer, x, scale, use_reentrant=False)
        return checkpoint(layer, x, scale, use_reentrant=False)

    run = compile_with_glue(model)
    inputs = [torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert_same_bits(model, run.call, inputs)
    assert count(run.graph, torch.exp) == 2
    assert outer_count(run.graph, torch.exp) == 0


def test_the_same_expression_leaves_when_it_needs_none():
    def layer(x, scale):
        return torch.sin(x) * torch.exp(scale)

    def model(x, scale):
        x = checkpoint(layer, x, scale, use_reentrant=False)
        return checkpoint(layer, x, scale, use_reentrant=False)

    run = compile_with_glue(model)
    scale = torch.randn(4, dtype=torch.float64)
    assert_same_bits(
        lambda x: model(x, scale),
        lambda x: run.call(x, scale),
        [torch.randn(4, dtype=torch.float64, requires_grad=True)],
    )
    assert outer_count(run.graph, torch.exp) == count(run.graph, torch.exp) == 1


def test_a_value_that_would_need_a_gradient_outside_stays_inside():
    """Inside, grad is off; the graph around it would let gradients through."""

    def layer(x, scale):
        with torch.no_grad():
            factor = torch.exp(scale)
        return torch.sin(x) * factor

    def model(x, scale):
        x = checkpoint(layer, x, scale, use_reentrant=False)
        return checkpoint(layer, x, scale, use_reentrant=False) + scale

    run = compile_with_glue(model)
    assert_same_bits(model, run.call, [torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(2)])
    assert outer_count(run.graph, torch.exp) == 0


def test_an_integer_result_of_a_tensor_that_needs_a_gradient_may_leave():
    def layer(x, router):
        return x * router.argmax(-1, keepdim=True)

    def model(x, router):
        x = checkpoint(layer, x, router, use_reentrant=False)
        return checkpoint(layer, x, router, use_reentrant=False)

    run = compile_with_glue(model)
    assert_same_bits(model, run.call, [torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)])
    assert outer_count(run.graph, "argmax") == count(run.graph, "argmax") == 1


def test_more_bytes_than_the_limit_stay_inside_and_the_reason_is_recorded():
    def layer(x, positions):
        return x * (positions[:, None] >= positions[None, :]).sum(0)

    def model(x, positions):
        x = checkpoint(layer, x, positions, use_reentrant=False)
        return checkpoint(layer, x, positions, use_reentrant=False)

    x, positions = torch.randn(16, dtype=torch.float64, requires_grad=True), torch.arange(16)
    for limit, outside in (("128B", 1), (127, 0)):
        run = compile_with_glue(model, hoist_limit=limit)
        assert_same_bits(lambda x, c=run.call: model(x, positions), lambda x, c=run.call: c(x, positions), [x])
        assert outer_count(run.graph, "sum") == outside
        assert any("hoist_limit" in reason for reason in run.skip_reasons) == (not outside)
        torch._dynamo.reset()


@pytest.mark.parametrize(("limit", "outside"), [("1KiB", 1), (0, 0)])
def test_a_chain_is_not_computed_twice_for_one_sync(limit, outside):
    """The only body goes on using the product itself: it is an operand, or too large for one, and then all stays."""

    def layer(x, table):
        product = table @ table
        return x * product * torch.nonzero(product > 0).shape[0]

    def model(x, table):
        return checkpoint(layer, x, table, use_reentrant=False)

    run = compile_with_glue(model, hoist_limit=limit)
    x, table = torch.randn(4, 4, dtype=torch.float64, requires_grad=True), torch.randn(4, 4, dtype=torch.float64)
    assert_same_bits(lambda x: model(x, table), lambda x: run.call(x, table), [x])
    assert outer_count(run.graph, torch.nonzero) == outside
    assert outer_count(run.graph, operator.matmul) == outside
    assert count(run.graph, operator.matmul) == 1


def test_what_a_body_writes_before_reading_stays_inside():
    def layer(x, positions):
        counter = positions.clone()
        counter[0] = 7
        return x * counter.cumsum(0)

    def model(x, positions):
        x = checkpoint(layer, x, positions, use_reentrant=False)
        return checkpoint(layer, x, positions, use_reentrant=False)

    run = compile_with_glue(model)
    x, positions = torch.randn(4, dtype=torch.float64, requires_grad=True), torch.arange(4)
    assert_same_bits(lambda x: model(x, positions), lambda x: run.call(x, positions), [x])
    assert outer_count(run.graph, "cumsum") == 0


def scaled_by_a_list(x, positions, weight):
    listed = positions[:2].tolist()
    return torch.tanh(x @ weight) * (torch.tensor(listed).sum() + 1)


def test_gradients_of_what_has_left_a_body_are_those_of_the_forward_pass():
    """Eager runs the region again on what has been written since, and its gradients are of neither run."""

    def gradients_of(fn, writes):
        positions = torch.tensor([2, 3, 4])
        for tensor in inputs:
            tensor.grad = None
        out = fn(inputs[0], positions, inputs[1])
        if writes:
            positions.data.zero_()
        out.sum().backward()
        return [tensor.grad.clone() for tensor in inputs]

    def model(x, positions, weight):
        return checkpoint(scaled_by_a_list, x, positions, weight, use_reentrant=False)

    inputs, run = grad_inputs()[:2], compile_with_glue(model)
    expected = gradients_of(scaled_by_a_list, writes=True)
    for writes in (False, True):
        for got, want in zip(gradients_of(run.call, writes), expected, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert outer_count(run.graph, "item") == 2
    assert not torch.allclose(gradients_of(model, writes=True)[0], expected[0])


def test_random_numbers_stay_inside():
    def layer(x, positions):
        return x + torch.nn.functional.dropout(positions.double(), 0.5)

    def model(x, positions):
        x = checkpoint(layer, x, positions, use_reentrant=False)
        return checkpoint(layer, x, positions, use_reentrant=False)

    run = compile_with_glue(model, eager=True)
    x = torch.zeros(64, dtype=torch.float64, requires_grad=True)
    run.call(x, torch.ones(64, dtype=torch.int64))
    assert count(run.graph, torch.nn.functional.dropout) == 2
    assert outer_count(run.graph, torch.nn.functional.dropout) == 0


def test_autocast_inside_a_body_keeps_what_it_changes():
    def layer(x, table):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = table @ table
        return x * low

    def model(x, table):
        x = checkpoint(layer, x, table, use_reentrant=False)
        return checkpoint(layer, x, table, use_reentrant=False)

    run = compile_with_glue(model)
    table = torch.randn(4, 4)
    assert_same_bits(lambda x: model(x, table), lambda x: run.call(x, table), [torch.randn(4, 4, requires_grad=True)])


def test_bodies_inside_bodies_give_up_their_metadata_to_the_outermost():
    def block(x, positions, *weights):
        for weight in weights:
            x = checkpoint(packed_layer, x, positions, weight, use_reentrant=False)
        return x

    def model(x, positions, *weights):
        x = checkpoint(block, x, positions, *weights, use_reentrant=False)
        return checkpoint(block, x, positions, *weights, use_reentrant=False)

    run = compile_with_glue(model, eager=True)
    check(model, positions_of(5, 7), grad_inputs(), run)
    assert outer_count(run.graph, torch.nonzero) == count(run.graph, torch.nonzero) == 1


def save_products(ctx, op, *args, **kwargs):
    products = (torch.ops.aten.mm.default,)
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


def test_the_policy_of_a_selective_checkpoint_stays():
    contexts = functools.partial(create_selective_checkpoint_contexts, save_products)
    model = checkpointed(context_fn=contexts)
    run = compile_with_glue(model)
    seen = []

    def keep_meta(gm, inputs, options, uuid, *edit_pair):
        seen.extend("_checkpoint_context_fn" in body.meta for body in bodies.graph_modules(gm) if body is not gm)
        return gm.forward

    x, first, second = grad_inputs()
    from glue_compiler.backend import GlueBackend

    torch.compile(model, backend=GlueBackend(hand_off=keep_meta), fullgraph=True)(x, positions_of(5, 7), first, second)
    assert seen == [True, True]
    torch._dynamo.reset()
    check(model, positions_of(5, 7), [x, first, second], run)
    assert count(run.graph, torch.nonzero) == 1


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_two_lengths_in_a_row(use_reentrant):
    def model(x, positions, *weights):
        for weight in weights:
            x = checkpoint(packed_layer, x, positions, weight, use_reentrant=use_reentrant)
        return x

    run = compile_with_glue(model)
    for tokens in (12, 20, 1, 5):
        check(model, positions_of(tokens), grad_inputs(tokens), run)
    assert len(run.graphs) <= 3  # the first, any length, and length 1, which torch always compiles by itself


def test_a_body_that_returns_its_metadata():
    def layer(x, positions):
        starts = torch.nonzero(positions == 0).flatten()
        return x * starts.shape[0], starts

    def model(x, positions):
        x, first = checkpoint(layer, x, positions, use_reentrant=False)
        x, second = checkpoint(layer, x, positions, use_reentrant=False)
        return x, first, second

    run = compile_with_glue(model, eager=True)
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    positions = positions_of(1, 3)
    for got, want in zip(run.call(x, positions), model(x, positions), strict=True):
        assert torch.equal(got, want)


def starts_once(x, positions):
    return x * torch.nonzero(positions == 0).shape[0]


def starts_twice(x, positions, change):
    """Torch gives both calls one symbol."""
    begins = positions == 0
    first, second = torch.nonzero(begins), torch.nonzero(begins)
    return torch.tanh(x * (change(first, second) + second).sum()) * second.shape[0], second


@pytest.mark.parametrize(
    ("change", "returns", "calls"),
    [
        (torch.add, False, 1),
        (lambda first, second: first.add_(1), False, 3),
        (lambda first, second: second.add_(1) + first, False, 3),
        (torch.add, True, 3),
    ],
    ids=["read", "first written", "second written", "second returned"],
)
def test_two_calls_that_share_a_symbol_with_a_third_in_a_nested_body(change, returns, calls):
    def region(x, positions):
        x = checkpoint(starts_once, x, positions, use_reentrant=False)
        x, second = starts_twice(x, positions, change)
        return (x, second) if returns else x

    def model(x, positions):
        return checkpoint(region, x, positions, use_reentrant=False)

    run = compile_with_glue(model)
    positions, x = positions_of(2, 3), torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert_same_bits(lambda x: model(x, positions), lambda x: run.call(x, positions), [x])
    assert count(run.graph, torch.nonzero) == calls
