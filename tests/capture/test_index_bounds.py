"""An index that data decides is refused where eager refuses it, and exceptions go where eager's go."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.captured import compile_with_glue


def item(x, i):
    return x[int(i[0])] * 2


def selected(x, i):
    return x.select(1, i[0].item()) + 1


def of_a_result(x, i):
    return (x @ x.t())[int(i[0])]


def in_two_dimensions(x, i):
    return x[1, int(i[0])] * 2


def written(x, i):
    y = x * 1
    y[int(i[0])] = 7.0
    return y


INDEXED = [item, selected, of_a_result, written]


def _outcome(fn, x, index):
    try:
        return fn(x, torch.tensor([index]))
    except (IndexError, RuntimeError):
        return None


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("fn", INDEXED, ids=lambda fn: fn.__name__)
def test_memory_beside_a_tensor_is_not_read(fn, compiler):
    around = torch.arange(64.0, dtype=torch.float64).view(16, 4)
    run = compile_with_glue(fn, compiler=compiler)
    for index in (0, 1, 3, 4, -1, -4, -5):
        expected, result = _outcome(fn, around[4:8], index), _outcome(run.call, around[4:8], index)
        assert (expected is None) == (result is None), index
        if expected is not None:
            assert torch.equal(result, expected)
    assert not run.session.capture_events


def test_numbers_among_several_indices_are_left_to_dynamo():
    run = compile_with_glue(in_two_dimensions, fullgraph=False)
    x = torch.arange(16.0, dtype=torch.float64).view(4, 4)
    for index in (0, 3, -1):
        i = torch.tensor([index])
        assert torch.equal(run.call(x, i), in_two_dimensions(x, i))


def in_a_try(x, i):
    try:
        return x[int(i[0])] * 2
    except IndexError:
        return x[0] * 3


def whose_result_is_not_used(x, i):
    try:
        x[int(i[0])]
        found = 2
    except IndexError:
        found = 1
    return x * found


def suppressed(x, i):
    y = x * 2
    with contextlib.suppress(IndexError):
        y = y + x[int(i[0])]
    return y


def _narrowed(x, n):
    return x.narrow(0, n, 2)


def in_a_function(x, i):
    try:
        return _narrowed(x, int(i[0])) * 2
    except (IndexError, RuntimeError):
        return x * 5


def behind_a_mode(x, i):
    try:
        with torch.no_grad():
            return x[int(i[0])] * 2
    except IndexError:
        return x[0] * 3


def behind_a_clause_for_types(x, i):
    try:
        return x[int(i[0])] * 2
    except TypeError:
        return x[0] * 7
    except IndexError:
        return x[0] * 3


@pytest.mark.parametrize(
    "fn",
    [
        in_a_try,
        whose_result_is_not_used,
        suppressed,
        in_a_function,
        behind_a_mode,
        behind_a_clause_for_types,
    ],
    ids=lambda fn: fn.__name__,
)
def test_exceptions_that_code_catches_are_raised(fn):
    run = compile_with_glue(fn, fullgraph=False)
    for rows, index in ((4, 0), (5, 1), (4, 7), (5, 2)):
        x = torch.arange(4.0 * rows, dtype=torch.float64).view(rows, 4)
        assert torch.equal(run.call(x, torch.tensor([index])), fn(x, torch.tensor([index])))


def in_a_checkpoint(x, i):
    def body(x, n):
        return x[n].sin() * x[:n].sum()

    return checkpoint(body, x * 1, int(i[0]), use_reentrant=False)


def in_a_mode(x, i):
    with torch.no_grad():
        y = x[int(i[0])] * 2
    return y + 1


def cleaned_up(x, i):
    try:
        y = x[int(i[0])] * 2
    finally:
        scale = 3
    return y * scale


def beside_a_try(x, i):
    try:
        scale = len(x.shape) * 2
    except ValueError:
        scale = 1
    return x[int(i[0])] * scale


def _in_a_mode(x, i):
    with torch.no_grad():
        index = int(i[0])
        y = x[index] * 2
    return y + 1


def in_an_inlined_mode(x, i):
    return _in_a_mode(x, i)


def under_a_clause_for_types(x, i):  # transformers 4 calls models so
    try:
        return x[int(i[0])] * 2
    except TypeError:
        try:
            return x[0] * 7
        except TypeError:
            raise AttributeError from None


@pytest.mark.parametrize(
    "fn",
    [in_a_mode, in_an_inlined_mode, cleaned_up, beside_a_try, under_a_clause_for_types, in_a_checkpoint],
    ids=lambda fn: fn.__name__,
)
def test_what_catches_nothing_is_one_graph(fn):
    run = compile_with_glue(fn)
    x = torch.arange(16.0, dtype=torch.float64).view(4, 4)
    for index in (0, 3):
        assert torch.equal(run.call(x, torch.tensor([index])), fn(x, torch.tensor([index])))
    assert len(run.session.graphs) == 1
    assert not run.session.capture_events


def a_list_of_a_range(x, i):
    return x * len(list(range(int(i[0]))))


def keys_of_a_dictionary(x, i):
    return x * sum(dict.fromkeys(i.tolist()))


def the_last_of_a_range(x, i):
    return x * range(int(i[0]) + 1)[-1]


def membership(x, i):
    return x * (5 if 2 in i.tolist() else 1)


def no_membership(x, i):
    return x * (5 if int(i[0]) not in (1, 2) else 1)


@pytest.mark.parametrize(
    "fn",
    [a_list_of_a_range, keys_of_a_dictionary, the_last_of_a_range, membership, no_membership],
    ids=lambda fn: fn.__name__,
)
@pytest.mark.parametrize("dynamic", [None, False])
def test_python_that_dynamo_does_not_follow_for_such_numbers(fn, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="glue", dynamic=dynamic, options={"compiler": "aot_eager"})
    plain = torch.compile(fn, backend="aot_eager", dynamic=dynamic)
    for values in ([3, 1, 2], [1, 1, 1], [0, 2, 5], [2, 4, 3], [4, 0, 1]):
        x, i = torch.ones(6, 4, dtype=torch.float64), torch.tensor(values)
        assert torch.equal(compiled(x, i), plain(x, i))
