"""A function that cannot be traced with data-dependent values is not traced for that again."""

import pytest
import torch

from glue_compiler.backend import GlueBackend
from glue_compiler.capture import frames
from glue_compiler.compat import frame_places

OPTIONS = {"compiler": "aot_eager"}


def windows(x, grid):
    """Dynamo would have to know how many items the list has."""
    lengths = torch.arange(int(grid.max())).cumsum(0).tolist()
    return x * sum(lengths)


def middle(x, grid):
    return windows(x + 1, grid) * 2


def outer(x, grid):
    return middle(x.sin(), grid) + 1


def counts_afterwards(x, grid):
    y = middle(x.sin(), grid)
    return y * grid.sum().item()


def counts(x, grid):
    return x * grid.sum().item()


def decorated(function):
    def wrapper(x, grid):
        return function(x, grid)

    return wrapper


class Calls(torch.nn.Module):
    def forward(self, x, grid):
        return self.inner(x, grid)


class CallsWindows(Calls):
    def inner(self, x, grid):
        return windows(x, grid)


class CallsItem(Calls):
    def inner(self, x, grid):
        return counts(x, grid)


class Tries:
    """``failed``: how many conversions with the flags have failed."""

    def __init__(self, monkeypatch):
        self.failed = 0
        self.backend = GlueBackend()
        with_values = frames._with_values

        def counted(frame):
            self.failed += 1
            result = with_values(frame)
            self.failed -= 1
            return result

        monkeypatch.setattr(frames, "_with_values", counted)

    def failures_of(self, function):
        before, args = self.failed, (torch.ones(3), torch.tensor([1, 8, 4]))
        compiled = torch.compile(function, backend=self.backend, options=OPTIONS)
        torch.testing.assert_close(compiled(*args), function(*args))
        return self.failed - before


@pytest.fixture
def tries(monkeypatch):
    torch._dynamo.utils.counters.clear()
    return Tries(monkeypatch)


def graph_breaks():
    return sum(torch._dynamo.utils.counters["graph_break"].values())


def test_what_calls_the_function_that_fails_is_tried_once_in_all(tries):
    assert tries.failures_of(outer) == 1


def test_without_the_memory_each_function_on_the_way_fails_by_itself(tries):
    tries.backend.known_failures.note = lambda *_: None
    assert tries.failures_of(outer) == 3


def test_without_torchs_private_parts_nothing_is_remembered(tries, monkeypatch):
    monkeypatch.setattr(frame_places.PLACES, "_is_available", False)
    assert tries.failures_of(outer) == 3


def test_it_is_not_tried_in_a_later_compile(tries):
    assert tries.failures_of(windows) == 1
    torch._dynamo.reset_code_caches()
    assert tries.failures_of(windows) == 0


def test_after_a_reset_it_is_tried_again(tries):
    assert tries.failures_of(windows) == 1
    tries.backend.reset()
    torch._dynamo.reset_code_caches()
    assert tries.failures_of(windows) == 1


def test_code_behind_the_failure_captures_its_values(tries):
    assert tries.failures_of(counts_afterwards) == 1
    broken = graph_breaks()
    tries.backend.reset()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    tries.failures_of(outer)
    assert broken == graph_breaks()


def test_another_function_behind_the_same_decorator_captures_its_values(tries):
    assert tries.failures_of(decorated(windows)) == 1
    torch._dynamo.utils.counters.clear()
    assert tries.failures_of(decorated(counts)) == 0
    assert not graph_breaks()


def test_another_module_of_the_same_base_class_captures_its_values(tries):
    assert tries.failures_of(CallsWindows()) == 1
    torch._dynamo.utils.counters.clear()
    assert tries.failures_of(CallsItem()) == 0
    assert not graph_breaks()
