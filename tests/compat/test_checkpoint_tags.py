"""What a checkpoint computes again, autograd functions in it among that."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import glue_compiler  # noqa: F401
from glue_compiler.compat import checkpoint_tags

calls = []
EAGER = {"compiler": "aot_eager"}


@torch.library.custom_op("glue::test_product", mutates_args=())
def product(x: Tensor, weight: Tensor) -> Tensor:
    calls.append(tuple(weight.shape))
    return x @ weight


@product.register_fake
def _(x, weight):
    return x.new_empty(*x.shape[:-1], weight.shape[1])


class Frozen(torch.autograd.Function):
    """A product with a weight that has no gradient, as that of packages with weights of 4 bits."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return product(x, weight)

    @staticmethod
    def backward(ctx, grad):
        (weight,) = ctx.saved_tensors
        return grad @ weight.T, None


@torch.library.custom_op("glue_test_checkpoint_tags::mask", mutates_args=())
def mask(x: Tensor) -> Tensor:
    return (torch.rand_like(x) > 0.5).to(x.dtype)


mask.register_fake(torch.empty_like)


class Masked(torch.autograd.Function):
    """Of an operator that does not say that it draws random numbers."""

    @staticmethod
    def forward(ctx, x):
        drawn = mask(x)
        ctx.save_for_backward(drawn)
        return x * drawn

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


class Nested(torch.autograd.Function):
    """Whose forward calls another."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return Frozen.apply(x, weight) * 2

    @staticmethod
    def backward(ctx, grad):
        (weight,) = ctx.saved_tensors
        return grad @ weight.T * 2, None


def body(function, x, weight, adapter):
    return torch.nn.functional.silu(function.apply(x, weight)) * (x @ adapter)


def gradients(step, x, weight, adapter):
    leaves = [x.clone().requires_grad_(), adapter.clone().requires_grad_()]
    loss = step(leaves[0], weight, leaves[1]).square().sum()
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


@pytest.fixture
def given():
    generator = torch.Generator().manual_seed(0)
    calls.clear()
    sizes = ((8, 4), (4, 16), (4, 16))
    return [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]


def judged(step, given):
    """How often the compiled step calls the product; its loss and gradients are eager's."""
    expected = gradients(step, *given)
    calls.clear()
    compiled = torch.compile(step, backend="glue", options=EAGER, fullgraph=True)
    for own, eager in zip(gradients(compiled, *given), expected, strict=True):
        torch.testing.assert_close(own, eager)
    return len(calls)


@pytest.mark.parametrize("function", [Frozen, Nested])
def test_what_an_autograd_function_computes_is_computed_again(function, given):
    def step(*inputs):
        return checkpoint(body, function, *inputs, use_reentrant=False)

    assert judged(step, given) == 2


def test_two_checkpoints_in_a_row_keep_what_lies_between_them(given):
    def step(x, weight, adapter):
        first = checkpoint(body, Frozen, x, weight, adapter, use_reentrant=False)
        return checkpoint(body, Frozen, first, weight.T, adapter.T, use_reentrant=False)

    assert judged(step, given) == 4


def test_outside_of_a_checkpoint_it_is_kept(given):
    def step(*inputs):
        return body(Frozen, *inputs)

    assert judged(step, given) == 1


@pytest.mark.skipif(not checkpoint_tags.LEAVES_FUNCTIONS_OUT, reason="from 2.13 on torch draws again by itself")
def test_operators_of_others_are_kept(given):
    x = torch.ones(64, requires_grad=True)
    compiled = torch.compile(lambda x: checkpoint(Masked.apply, x, use_reentrant=False), backend="glue", options=EAGER)
    found = compiled(x)
    found.sum().backward()
    assert torch.equal(found, x.grad)


def test_a_policy_that_saves_it_is_heard(given):
    def policy(_, operator, *args, **kwargs):
        saves = operator is torch.ops.glue.test_product.default
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts():
        return create_selective_checkpoint_contexts(policy)

    def step(*inputs):
        return checkpoint(body, Frozen, *inputs, use_reentrant=False, context_fn=contexts)

    assert judged(step, given) == 1


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_random_operators_of_a_checkpoint_without_gradients(compiler):
    """As in a frozen layer. Torch refuses it from 2.13 on."""

    def attended(x):
        found = torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
        return torch.nn.functional.dropout(found, 0.5)

    x = torch.randn(1, 2, 8, 16)
    torch._dynamo.reset()
    step = torch.compile(
        lambda x: checkpoint(attended, x, use_reentrant=False), backend="glue", options={"compiler": compiler}
    )
    found = step(x)
    assert found.isfinite().all()
    assert 0.2 < (found == 0).double().mean() < 0.8
    assert not found.requires_grad
