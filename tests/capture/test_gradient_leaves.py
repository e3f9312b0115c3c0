"""``requires_grad_()`` of what traced code has made: one graph where nobody can tell, and near misses that break."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.captured import compile_with_glue

IDS = torch.tensor([1, 3, 0, 2])


def ask_for_gradient(module: nn.Module, args: Any, output: Tensor) -> None:
    output.requires_grad_(True)


class Frozen(torch.autograd.Function):
    """A product with a weight that is not trained, as bitsandbytes' of 4 bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return gradient @ weight.t(), None


class Adapted(nn.Module):
    """A frozen base with a trained adapter; a hook makes the embedding's output ask for a gradient, as peft's does."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.how = how
        self.embedding = nn.Embedding(5, 4, dtype=torch.float64)
        self.base, self.down, self.up = (nn.Linear(4, 4, dtype=torch.float64) for _ in range(3))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
        for frozen in (*self.embedding.parameters(), *self.base.parameters()):
            frozen.requires_grad = False
        self.embedding.register_forward_hook(ask_for_gradient)

    def layer(self, x: Tensor) -> Tensor:
        if "function" in self.how:
            return x + Frozen.apply(x, self.base.weight) + Frozen.apply(self.up(x), self.base.weight)
        return x + self.base(F.silu(x)) + self.up(self.down(x))

    def forward(self, ids: Tensor) -> Any:
        x = self.embedding(ids)
        if self.how.get("returns") == "itself":
            return x.detach().cos(), x, x
        if "use_reentrant" in self.how:
            out = checkpoint(self.layer, x, use_reentrant=self.how["use_reentrant"])
        else:
            out = self.layer(x)
        match self.how.get("returns"):
            case "embedding":
                return out, x
            case "view":
                return out, x[0]
            case "frozen":
                return out, self.base(x)
            case "function":
                return out, Frozen.apply(x, self.base.weight)
            case "flags":
                return out * (2.0 if x.requires_grad and x.is_leaf and not self.base(x).is_leaf else 1.0)
            case "detached":
                return out, x.detach()
            case "beside":
                return x, out.detach()
        return out


def results(model: nn.Module, call: Any) -> list[Any]:
    """What is returned and whether it asks for a gradient, and all gradients."""
    model.zero_grad()
    found = call(IDS)
    outputs = list(found) if isinstance(found, tuple) else [found]
    sum((out * torch.arange(1.0, out.numel() + 1).view(out.shape)).sum() for out in outputs).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return [*outputs, *(out.requires_grad for out in outputs), *gradients]


def assert_as_eager(model: nn.Module) -> list[Any]:
    """Returns what capture had to try again."""
    run = compile_with_glue(model, fullgraph=False)
    expected, actual = results(model, model), results(model, run.call)
    for got, want in zip(actual, expected, strict=True):
        assert type(got) is type(want)
        if isinstance(want, Tensor):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        else:
            assert got == want
    retried = [event.reason for event in run.session.capture_events if event.retried]
    assert len(run.session.graphs) == 1 or retried
    return retried


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"use_reentrant": False},
        {"use_reentrant": True},
        {"function": True},
        {"returns": "flags"},
        {"returns": "detached"},
    ],
    ids=str,
)
def test_a_tensor_that_stays_inside(how):
    assert assert_as_eager(Adapted(**how)) == []


@pytest.mark.parametrize("returns", ["embedding", "view", "frozen", "function"])
def test_one_that_is_returned_and_what_it_alone_makes_ask(returns):
    (reason,) = assert_as_eager(Adapted(returns=returns))
    assert "is returned, and asks for a gradient by requires_grad_() only" in reason


def test_one_that_is_returned_and_has_its_gradient_from_what_comes_behind():
    """As the graph in front of layers that are regions of their own."""
    for returns in ("itself", "beside"):
        assert (assert_as_eager(Adapted(returns=returns)) == []) == (returns == "itself")
    model = Adapted(returns="itself")
    run = compile_with_glue(model)
    _, x, again = run.call(IDS)
    assert x is again
    assert x.is_leaf
    (x.sin().sum() + again.sum()).backward()
    torch.testing.assert_close(x.grad, x.cos() + 1)
    with torch.no_grad():
        assert [each.requires_grad for each in run.call(IDS)] == [each.requires_grad for each in model(IDS)]


def test_without_gradients():
    model = Adapted()
    run = compile_with_glue(model)
    with torch.no_grad():
        actual, expected = run.call(IDS), model(IDS)
    torch.testing.assert_close(actual, expected)
    assert actual.requires_grad == expected.requires_grad
    assert len(run.session.graphs) == 1
    assert not run.session.capture_events


def test_no_other_parameter_asks():
    model = Adapted().requires_grad_(False)
    assert assert_as_eager(model)


def gradient_of_own_leaf(x: Tensor, weight: Tensor) -> Tensor:
    leaf = (x * 2).detach()
    leaf.requires_grad_(True)
    loss = (leaf * weight).sum()
    (gradient,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    return gradient.detach() + weight.sum()


def backward_inside(x: Tensor, weight: Tensor) -> Tensor:
    leaf = (x * 2).detach()
    leaf.requires_grad_(True)
    (leaf * leaf).sum().backward()
    return leaf.grad + weight


def hook_on_the_leaf(x: Tensor, weight: Tensor) -> Tensor:
    leaf = (x * 2).detach()
    leaf.requires_grad_(True)
    leaf.register_hook(SEEN.append)
    return leaf * weight


def write_to_what_comes_of_it(x: Tensor, weight: Tensor) -> Tensor:
    leaf = (x * 2).detach()
    leaf.requires_grad_(True)
    sums = torch.zeros_like(x)
    sums.add_(leaf)
    return sums * weight.detach()


SEEN: list[Tensor] = []


@pytest.mark.parametrize(
    "fn", [gradient_of_own_leaf, backward_inside, hook_on_the_leaf, write_to_what_comes_of_it], ids=lambda f: f.__name__
)
def test_code_that_asks_for_the_gradient_itself(fn):
    x = torch.arange(3.0, dtype=torch.float64)
    found = []
    for call in (fn, compile_with_glue(fn, fullgraph=False).call):
        SEEN.clear()
        weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
        out = call(x, weight)
        (out * out).sum().backward()
        found.append([out.detach(), weight.grad, *SEEN])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


def weighted_sum(make: Any) -> Any:
    """A function of ``x`` and a weight that asks for the gradient of what ``make`` gives."""

    def fn(x: Tensor, weight: Tensor) -> Any:
        source = x * 2
        made = make(x, source)
        made.requires_grad_(True)
        return (made * weight).sum(), (source if make.__name__.startswith("of_made") else None)

    return fn


def of_input_contiguous(x: Tensor, source: Tensor) -> Tensor:
    return x.contiguous()


def of_input_to(x: Tensor, source: Tensor) -> Tensor:
    return x.to(torch.float64)


def of_input_plus(x: Tensor, source: Tensor) -> Tensor:
    return +x


def of_input_type_as(x: Tensor, source: Tensor) -> Tensor:
    return x.type_as(source)


def of_made_contiguous(x: Tensor, source: Tensor) -> Tensor:
    return source.contiguous()


def of_made_view(x: Tensor, source: Tensor) -> Tensor:
    return source.view(-1)


def fresh_clone(x: Tensor, source: Tensor) -> Tensor:
    return x.clone()


def fresh_to(x: Tensor, source: Tensor) -> Tensor:
    return x.to(torch.float32, copy=True).double() * 1.0


def fresh_linear(x: Tensor, source: Tensor) -> Tensor:
    return F.linear(source, torch.eye(3, dtype=torch.float64))


def seen_after(call: Any) -> tuple[list[Any], Any]:
    x, weight = torch.arange(3.0, dtype=torch.float64), torch.ones(3, dtype=torch.float64, requires_grad=True)
    loss, source = call(x, weight)
    loss.backward()
    return [loss.item(), x.requires_grad, source is not None and source.requires_grad], [x.grad, weight.grad]


@pytest.mark.parametrize(
    "make",
    [
        of_input_contiguous, of_input_to, of_input_plus, of_input_type_as, of_made_contiguous, of_made_view,
        fresh_clone, fresh_to, fresh_linear,
    ],
    ids=lambda make: make.__name__,
)  # fmt: skip
def test_what_an_operator_gave_back_is_no_new_tensor(make):
    fn = weighted_sum(make)
    run = compile_with_glue(fn, fullgraph=False)
    (expected, expected_gradients), (actual, gradients) = seen_after(fn), seen_after(run.call)
    assert actual == expected
    for got, want in zip(gradients, expected_gradients, strict=True):
        assert (got is None) == (want is None)
        if want is not None:
            torch.testing.assert_close(got, want)
    if make.__name__.startswith("fresh"):
        assert len(run.session.graphs) == 1
        assert not run.session.capture_events


@torch.library.custom_op("gradient_leaves::scale", mutates_args=())
def scale(t: Tensor, weight: Tensor) -> Tensor:
    return t * weight


@scale.register_fake
def _(t: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(t)


def scale_backward(ctx: Any, gradient: Tensor) -> Any:
    """The weight's gradient is twice as large where the other one is wanted, too."""
    t, weight = ctx.saved_tensors
    wanted = ctx.needs_input_grad[0]
    return gradient * weight if wanted else None, gradient * t * (2 if wanted else 1)


scale.register_autograd(
    scale_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)  # fmt: skip


def scaled(x: Tensor, weight: Tensor) -> Any:
    y = x * 2
    y.requires_grad_(True)
    return scale(y, weight).sum(), None


def scaled_in_a_checkpoint(x: Tensor, weight: Tensor) -> Any:
    y = x * 2
    y.requires_grad_(True)
    return checkpoint(scale, y, weight, use_reentrant=False).sum(), None


def scaled_beside(x: Tensor, weight: Tensor) -> Any:
    y = x * 2
    y.requires_grad_(True)
    return (scale(x, weight) + y * weight).sum(), None


@pytest.mark.parametrize("fn", [scaled, scaled_in_a_checkpoint, scaled_beside], ids=lambda fn: fn.__name__)
def test_a_custom_operator_may_ask_which_gradients_are_wanted(fn):
    run = compile_with_glue(fn, fullgraph=False)
    (expected, (_, expected_gradient)), (actual, (_, gradient)) = seen_after(fn), seen_after(run.call)
    assert actual == expected
    torch.testing.assert_close(gradient, expected_gradient)
    if fn is scaled_beside:  # torch's own operators compute each gradient whatever others are wanted
        assert len(run.session.graphs) == 1
        assert not run.session.capture_events


def scaled_by_a_frozen_weight(x: Tensor, weight: Tensor) -> Any:
    y = x * 2
    y.requires_grad_(True)
    return (scale(y, weight.detach()) + y * weight).sum(), None


def scaled_by_a_frozen_weight_in_a_checkpoint(x: Tensor, weight: Tensor) -> Any:
    y = x * 2
    y.requires_grad_(True)
    return (checkpoint(scale, y, weight.detach(), use_reentrant=False) + y * weight).sum(), None


@pytest.mark.parametrize(
    "fn", [scaled_by_a_frozen_weight, scaled_by_a_frozen_weight_in_a_checkpoint], ids=lambda fn: fn.__name__
)
def test_a_custom_operator_that_gives_no_other_gradient_is_left_in_the_graph(fn):
    run = compile_with_glue(fn, fullgraph=False)
    (expected, (_, expected_gradient)), (actual, (_, gradient)) = seen_after(fn), seen_after(run.call)
    assert actual == expected
    torch.testing.assert_close(gradient, expected_gradient)
    assert len(run.session.graphs) == 1
    assert not run.session.capture_events
