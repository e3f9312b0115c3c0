"""Autograd functions of a program's own: those of one row for each token are written for the tokens that count."""

import pytest
import torch
from torch import nn

from glue_compiler.testing import assert_rewritten, assert_untouched, capture, run_pass
from tests.passes.drop_padding.padded_batches import Layer, assert_same_step, batch, compiled
from tests.slow import one_in
from tests.versions import MASKED_DOUBLE

WEIGHT = torch.randn(16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Product(torch.autograd.Function):
    """With a weight that is no operand of autograd's, as products with weights of 4 bits are."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx, gradient):
        (weight,) = ctx.saved_tensors
        return torch.matmul(gradient, weight), None


class FlatProduct(Product):
    """The same by a matrix of tokens, whose sizes are asked for."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return x.reshape(-1, x.shape[-1]).mm(weight.t()).view(*x.shape[:-1], -1)


class Scaled(torch.autograd.Function):
    """Another backward than its forward's derivative, with what forward made of the tokens."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x * weight[0])
        return -x

    @staticmethod
    def backward(ctx, gradient):
        (scale,) = ctx.saved_tensors
        return gradient * scale, None


class Trained(Product):
    """The weight has a gradient, which is a sum over all tokens."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.flatten(0, 1).t() @ x.flatten(0, 1)


class Centred(Product):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return nn.functional.linear(x - x.mean(1, keepdim=True), weight)


class CentredBackward(Product):
    @staticmethod
    def backward(ctx, gradient):
        (weight,) = ctx.saved_tensors
        return torch.matmul(gradient - gradient.mean(1, keepdim=True), weight), None


class Pair(Product):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return nn.functional.linear(x, weight), x.sum()

    @staticmethod
    def backward(ctx, gradient, other):
        (weight,) = ctx.saved_tensors
        return torch.matmul(gradient, weight) + other, None


class Both(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, other):
        ctx.save_for_backward(x, other)
        return x * other

    @staticmethod
    def backward(ctx, gradient):
        x, other = ctx.saved_tensors
        return gradient * other, gradient * x


class Penalised(Trained):
    """Each token has a gradient, also one whose result has none: as losses that a forward adds in its backward."""

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return torch.matmul(gradient, weight) + x * 0.1, None


class Shifted(Product):
    @staticmethod
    def backward(ctx, gradient):
        (weight,) = ctx.saved_tensors
        return torch.matmul(gradient, weight) + 1, None


def mixed(function, weight=WEIGHT):
    return lambda model, x, mask: x + function.apply(x, weight)


@pytest.mark.parametrize("function", one_in(2, [Product, Scaled]))
@pytest.mark.parametrize(
    "compiler", ["aot_eager", pytest.param("inductor", marks=(MASKED_DOUBLE.mark, pytest.mark.slow))]
)
def test_rows_stay_rows(function, compiler):
    model = Layer(mixed(function))
    (graph,) = capture(model, *batch("right"))
    assert_rewritten(run_pass(graph, "drop_padding", padding="drop"))
    fast = compiled(model, compiler)
    for kind, rows, length in (("right", 3, 10), ("left", 4, 12), ("holes", 2, 17), ("none", 5, 9)):
        assert_same_step(model, model, fast, batch(kind, rows, length))


def test_one_row_in_a_batch():
    model = Layer(mixed(Product))
    fast = compiled(model)
    for kind, length in (("none", 10), ("none", 12)):
        assert_same_step(model, model, fast, batch(kind, 1, length))


@pytest.mark.parametrize(
    ("mix", "reason"),
    [
        (mixed(FlatProduct), "fails for other rows"),
        (mixed(Trained, nn.Parameter(WEIGHT.clone())), "not known to compute token by token"),
        (mixed(Centred), "not known to compute token by token"),
        (mixed(CentredBackward), "not known to compute token by token"),
        (mixed(Penalised), "a gradient to a token whose result has none"),
        (mixed(Shifted), "a gradient to a token whose result has none"),
        (lambda model, x, mask: x + Pair.apply(x, WEIGHT)[0], "not known to compute token by token"),
        (lambda model, x, mask: Product.apply(x.transpose(1, 2), WEIGHT[:, :10]).sum(2, keepdim=True), "outermost"),
        (lambda model, x, mask: Both.apply(x, x.exp()), "one operand of tokens"),
    ],
)
def test_what_mixes_tokens_is_left_alone(mix, reason):
    (graph,) = capture(Layer(mix), *batch("right")[:2])
    result = run_pass(graph, "drop_padding", padding="drop")
    assert_untouched(result)
    assert reason in result.skip_reasons[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_product_with_a_weight_of_four_bits():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    packed = bitsandbytes.nn.Linear4bit(64, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    packed.weight = bitsandbytes.nn.Params4bit(
        torch.randn(64, 64), requires_grad=False, quant_type="nf4", module=packed
    )
    packed.to("cpu")
    model = Layer(lambda model, x, mask: x + packed(torch.cat([x.float()] * 4, -1)).double()[..., :16])
    (graph,) = capture(model, *batch("right"))
    assert_rewritten(run_pass(graph, "drop_padding", padding="drop"))
    fast = compiled(model)
    for kind, rows, length in (("right", 3, 10), ("left", 4, 12)):
        assert_same_step(model, model, fast, batch(kind, rows, length))
