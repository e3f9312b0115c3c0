"""Kernels write several results over inputs that end in them, and over nothing that is read behind them."""

import random
import re
import threading
from types import SimpleNamespace

import pytest
import torch
from torch._inductor.scheduler import ForeachKernelSchedulerNode, FusedSchedulerNode
from torch._inductor.utils import run_and_get_code
from torch._inductor.virtualized import V

from glue_compiler.compat import inplace_buffers
from glue_compiler.compat.inplace_buffers import reused

SIZE = 48


def products(a, number):
    return [(a + i) @ a for i in range(number)]


def three_of_three(a):
    """As the backward of a gated MLP: each result needs all inputs, and nothing else does."""
    x, y, z = products(a, 3)
    return ((x.sin() * y * z) @ a) + ((x * y.cos() * z) @ a) @ ((x * y * z.tanh()) @ a)


def two_share_one(a):
    """One input, two results: one of them needs memory of its own."""
    (x,) = products(a, 1)
    return (x.sin() @ a) @ (x.cos() @ a)


def one_follows_the_other(a):
    """The last reader of an input that a result before it lies over already."""
    (x,) = products(a, 1)
    first = x.sin()
    return (first @ a) @ ((first * x.cos()) @ a)


def read_behind(a):
    x, y = products(a, 2)
    first, second = x.sin() * y, x * y.cos()
    return (first @ a) @ (second @ x)


def read_transposed(a):
    x, y = products(a, 2)
    return ((x.sin() * y.T) @ a) @ ((x * y.cos()) @ a)


def with_a_reduction(a):
    x, y = products(a, 2)
    return ((x.sin() * y) @ a) @ ((x * (y - y.sum(-1, keepdim=True)).cos()) @ a)


def returned(a):
    x, y = products(a, 2)
    return ((x.sin() * y) @ a) @ ((x * y.cos()) @ a), y


def overwritten(function, a):
    """How many inputs kernels write their results over; what the code computes is right."""
    torch._dynamo.reset()
    result, (code,) = run_and_get_code(torch.compile(function, fullgraph=True), a)
    torch.testing.assert_close(
        result, function(a.double()), rtol=1e-3, atol=1e-3, check_dtype=False, msg=lambda text: f"{text}\n{code}"
    )
    return sum(len(set(re.findall(r"in_out_ptr\d+", kernel))) for kernel in code.split("async_compile")), code


def small():
    return torch.randn(SIZE, SIZE) / SIZE**0.5


@pytest.fixture(autouse=True)
def without_caches():
    with torch._inductor.config.patch(force_disable_caches=True):
        yield


@pytest.mark.parametrize(
    ("function", "more"),
    [
        (three_of_three, 3),
        pytest.param(two_share_one, 1, marks=pytest.mark.slow),
        (one_follows_the_other, 0),
        (read_behind, 1),
        pytest.param(read_transposed, 1, marks=pytest.mark.slow),
        (returned, 1),
        pytest.param(with_a_reduction, 0, marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_results_lie_over_what_ends_in_their_kernel(function, more):
    a = small()
    without, _ = overwritten(function, a)
    with reused():
        found, _ = overwritten(function, a)
    assert found - without == more


@pytest.mark.parametrize(("kind", "is_one"), [(FusedSchedulerNode, True), (ForeachKernelSchedulerNode, False)])
def test_kernels_that_run_beside_each_other_are_not_one(kind, is_one):
    """One of a foreach group may read what another one has written over already."""
    group = kind.__new__(kind)
    scheduler = SimpleNamespace(name_to_fused_node={"node": group}, get_fused_node=lambda _: group)
    node, other = (
        SimpleNamespace(
            get_first_name=lambda: "node",
            scheduler=scheduler,
            is_reduction=lambda: False,
            is_template=lambda: False,
        )
        for _ in range(2)
    )
    group.snodes = [node, other]
    assert inplace_buffers._in_one_kernel(node) == ([node, other] if is_one else [node])


def test_an_input_is_taken_once():
    """Also by what torch would have take it, being its last reader."""
    kernel, graph = SimpleNamespace(inplace_update_buffers={"result": "input"}), SimpleNamespace()
    graph.never_reuse_buffers = {"constant"}
    node = SimpleNamespace(get_first_name=lambda: "node", scheduler=SimpleNamespace(name_to_fused_node={}))
    seen = []
    with V.set_kernel_handler(kernel), V.set_graph_handler(graph):
        inplace_buffers._decide(node, lambda _: seen.append(set(graph.never_reuse_buffers)))
    assert seen == [{"constant", "input"}]
    assert graph.never_reuse_buffers == {"constant"}


def test_other_threads_are_left_alone():
    found = []
    a = small()
    with reused():
        thread = threading.Thread(target=lambda: found.append(overwritten(three_of_three, a)[0]))
        thread.start()
        thread.join()
    assert found == [0]


def test_glue_compiles_so():
    a = small().requires_grad_()
    torch._dynamo.reset()
    _, codes = run_and_get_code(lambda: torch.compile(three_of_three, backend="glue")(a).sum().backward())
    kernels = [kernel for code in codes for kernel in code.split("async_compile")]
    assert max(len(set(re.findall(r"in_out_ptr\d+", kernel))) for kernel in kernels) > 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_drawn_programs_are_right(seed):
    draw = random.Random(seed)
    steps = [(draw.choice("smtcp"), draw.randrange(4), draw.randrange(4)) for _ in range(14)]

    def program(a):
        values = products(a, 4)
        for kind, one, other in steps:
            x, y = values[-1 - one], values[-1 - other]
            made = {"s": x.sin() * y, "m": x * y.tanh(), "t": x * y.T.cos(), "c": x.cos() - y.sin(), "p": x.sin() @ a}[
                kind
            ]
            values.append(made)
        return tuple((value @ a).tanh() for value in values[-3:])

    with reused():
        overwritten(program, small())


def test_a_torch_that_has_changed_is_left_alone(monkeypatch):
    monkeypatch.setattr(inplace_buffers.REUSE, "_is_available", False)
    monkeypatch.setattr(inplace_buffers, "_install", lambda: pytest.fail("installed"))
    with reused():
        pass
