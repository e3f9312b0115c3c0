"""Code that torch.compile compiles, given deferred logits: the values are computed before it is traced."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tests.deferred.logits import CAPPED, WORDS, Operands, assert_same_gradients, is_deferred
from tests.versions import WRITTEN_SUBCLASSES


def _method(x):
    return x.exp().sum()


def _operator(x):
    return (x * 2 + x[:, :1]).mean()


def _loss(x):
    return functional.cross_entropy(x.reshape(-1, WORDS), torch.arange(x.shape[0] * x.shape[1]) % WORDS)


def _part(x):
    return x[:, -1].softmax(-1).square().sum()


def _after_a_break(x):
    y = x * 2
    torch._dynamo.graph_break()
    return (y + x).sum()


def _whole_tensor(x):
    return x.tanh()


def _view(x):
    return x.unsqueeze(0)


def _itself(x):
    return x


def _several(x):
    return x.sum() * 2, x[:, 1:], x.transpose(0, 1) + 1


FUNCTIONS = {
    fn.__name__: fn
    for fn in (_method, _operator, _loss, _part, _after_a_break, _whole_tensor, _view, _itself, _several)
}


def _tensors(result):
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("backend", ["eager", "glue"])
@pytest.mark.parametrize(
    "part", [lambda x: x, lambda x: x[:, 1:], lambda x: x.detach()], ids=["all", "view", "detached"]
)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients(name, part, backend):
    fn = FUNCTIONS[name]
    options = {"compiler": "aot_eager"} if backend == "glue" else None
    compiled = torch.compile(fn, backend=backend, options=options, fullgraph=name != "_after_a_break")
    for _ in range(2):
        operands = Operands(CAPPED)
        results, wanted = _tensors(compiled(part(operands.deferred()))), _tensors(fn(part(operands.eager())))
        for one, other in zip(results, wanted, strict=True):
            assert one.shape == other.shape
            torch.testing.assert_close(one + 0, other + 0, rtol=1e-12, atol=1e-12)
            assert one.requires_grad == other.requires_grad
        if any(other.requires_grad for other in wanted):
            assert_same_gradients(_joined(results), _joined(wanted), operands)


def _joined(tensors):
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


@pytest.mark.slow
def test_inductor_gets_memory_with_values_in_it():
    compiled = torch.compile(_operator, backend="inductor", fullgraph=True)
    for lead in ((2, 5), (2, 6), (2, 7)):  # the second time, sizes are symbols
        operands = Operands(CAPPED, lead)
        result, expected = compiled(operands.deferred()), _operator(operands.eager())
        torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-10)
        assert_same_gradients(result, expected, operands)


@pytest.mark.parametrize("first", ["eager", "deferred"])
def test_code_that_was_compiled_for_the_other_kind(first):
    compiled = torch.compile(_operator, backend="aot_eager", fullgraph=True)
    for kind in (first, *({"eager", "deferred"} - {first}), first):
        operands = Operands(CAPPED)
        result, expected = compiled(getattr(operands, kind)()), _operator(operands.eager())
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
        assert_same_gradients(result, expected, operands)


def test_logits_in_a_container():
    compiled = torch.compile(lambda outputs: outputs["logits"].exp().sum(), backend="aot_eager", fullgraph=True)
    operands = Operands(CAPPED)
    result, expected = compiled({"logits": operands.deferred()}), operands.eager().exp().sum()
    assert_same_gradients(result, expected, operands)


def test_logits_that_compiled_code_does_not_touch_stay_deferred():
    compiled = torch.compile(lambda outputs: outputs["loss"] * 2, backend="aot_eager", fullgraph=True)
    logits = Operands().deferred()
    assert compiled({"loss": torch.ones(()), "logits": logits}) == 2
    assert is_deferred(logits)


def test_without_gradients():
    compiled = torch.compile(_operator, backend="aot_eager", fullgraph=True)
    operands = Operands(CAPPED)
    with torch.no_grad():
        torch.testing.assert_close(compiled(operands.deferred()), _operator(operands.eager()))
    operands = Operands(CAPPED, requires_grad=False)
    torch.testing.assert_close(compiled(operands.deferred()), _operator(operands.eager()))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_write_in_compiled_code(requires_grad, dynamic):
    if requires_grad and dynamic:
        WRITTEN_SUBCLASSES.skip()

    def write(x):
        x.mul_(2.0)
        return x.sum()

    compiled = torch.compile(write, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    operands = Operands(CAPPED, requires_grad=requires_grad)
    logits, eager = operands.deferred(), operands.eager()
    row = logits[:, -1]
    result, expected = compiled(logits), write(eager)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(logits + 0, eager)
    torch.testing.assert_close(row + 0, eager[:, -1])
    if requires_grad:
        assert_same_gradients(result + logits.tanh().sum(), expected + eager.tanh().sum(), operands)


def test_a_clone_that_compiled_code_returns_and_nobody_reads():
    def reader(x):
        return x.clone(), x.sum(-1)

    operands = Operands(CAPPED)
    (_, result), (_, expected) = (
        torch.compile(reader, backend="aot_eager")(operands.deferred()),
        reader(operands.eager()),
    )
    torch.testing.assert_close(result, expected)
    assert_same_gradients(result.sin().sum(), expected.sin().sum(), operands)


def test_reading_inside_a_break_of_compiled_code():
    @torch.compile(backend="aot_eager")
    def step(x):
        y = x + 1
        torch._dynamo.graph_break()
        logits = make()
        return y + logits.sum() + len(logits.detach().numpy())

    operands = Operands(CAPPED)
    make = torch.compiler.disable(operands.deferred)
    expected = 1 + operands.eager().sum() + 2
    result = step(torch.zeros((), dtype=torch.float64))
    torch.testing.assert_close(result, expected)
    assert_same_gradients(result, expected, operands)


PARTS = {
    "rows": lambda x: x[:, :-1],
    "a row": lambda x: x[:, -1],
    "flat": lambda x: x.view(-1, WORDS),
    "transposed": lambda x: x.transpose(1, 2),
    "some words": lambda x: x[..., :5],
    "flattened": lambda x: x.flatten(),
    "every other": lambda x: x[:, ::2],
    "repeated": lambda x: x[None].expand(2, -1, -1, -1),
}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("was_read", [False, True])
@pytest.mark.parametrize("has_history", [False, True])
def test_a_view_of_them_goes_into_compiled_code(name, was_read, has_history):
    operands = Operands(requires_grad=has_history)
    logits, eager = operands.deferred(), operands.eager()
    if was_read:
        logits.argmax(-1)
        logits.sum()
    compiled = torch.compile(lambda x: x.square().cos(), backend="aot_eager")
    result, expected = compiled(PARTS[name](logits)), PARTS[name](eager).square().cos()
    torch.testing.assert_close(result, expected)
    if has_history:
        assert_same_gradients(result, expected, operands)


def test_a_view_beside_what_it_looks_at():
    logits, eager = Operands(requires_grad=False).deferred(), Operands(requires_grad=False).eager()
    compiled = torch.compile(lambda part, whole: part.sum() * whole, backend="aot_eager")
    torch.testing.assert_close(compiled(logits[:1], logits), eager[:1].sum() * eager)


@pytest.mark.parametrize("of_part", [lambda x: x[:1], lambda x: x.detach(), lambda x: x.view(-1)])
def test_compiled_code_that_writes_one_of_two_aliases_is_an_error_and_no_number(of_part):
    logits = Operands(requires_grad=False).deferred()

    def write(part, whole):
        part.mul_(2.0)
        return whole.sum()

    with pytest.raises(Exception, match="tensor subclass"):
        torch.compile(write, backend="aot_eager")(of_part(logits), logits)
