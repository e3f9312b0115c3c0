"""Code traced for all experts although eager runs it for those with rows: what it does to Python must be harmless."""

import contextlib
import gc
import logging
import random
import weakref

import pytest
import torch
import torch.nn.functional as F

from tests import versions
from tests.capture.speculated_loops import (
    SEEN,
    Box,
    appends_to_a_default,
    appends_to_a_global,
    check,
    over_all,
    over_hits,
    writes_a_global,
    writes_a_global_in_a_helper,
)
from tests.captured import compile_with_glue
from tests.slow import one_in


def sets_an_attribute(state, expert):
    state.count += 1
    return state.count


def sets_an_attribute_of_an_attribute(state, expert):
    state.box.count = state.box.count + 1
    return 1.0


def sets_with_setattr(state, expert):
    setattr(state, "count", state.count + 1)  # noqa: B010
    return state.count


def writes_vars(state, expert):
    vars(state)["count"] = state.count + 1
    return 1.0


def adds_an_attribute(state, expert):
    state.box.extra = 1
    return 1.0


def sets_a_class_attribute(state, expert):
    Box.kind += 1
    return float(Box.kind)


def appends(state, expert):
    state.list.append(2.0)
    return len(state.list)


def appends_by_name(state, expert):
    add = state.list.append
    add(2.0)
    return 1.0


def appends_unbound(state, expert):
    list.append(state.list, 2.0)
    return sum(state.list)


def extends_in_place(state, expert):
    state.list += [1.0]
    return sum(state.list)


def extends_a_local_name(state, expert):
    mine = state.list
    mine += [1.0]
    return 1.0


def writes_an_item(state, expert):
    state.list[0] = state.list[0] + 1
    return state.list[0]


def writes_a_slice(state, expert):
    state.list[:] = [3.0, 4.0]
    return 1.0


def pops(state, expert):
    return state.weights.pop()


def sorts(state, expert):
    state.weights.sort(reverse=True)
    return state.weights[0]


def reverses(state, expert):
    state.weights.reverse()
    return state.weights[0]


def deletes_an_item(state, expert):
    del state.weights[0]
    return 1.0


def writes_a_dict(state, expert):
    state.dict["a"] += 1
    return state.dict["a"]


def updates_a_dict(state, expert):
    state.dict.update(a=state.dict["a"] + 1)
    return state.dict["a"]


def sets_a_default(state, expert):
    return state.dict.setdefault("b", 5.0)


def reads_a_defaultdict(state, expert):
    return 1.0 + state.defaults["new"]


def counts_with_a_counter(state, expert):
    state.counter["n"] += 1
    return float(state.counter["n"])


def moves_to_the_end(state, expert):
    state.ordered.move_to_end("a")
    return float(next(iter(state.ordered.values())))


def adds_to_a_set(state, expert):
    state.set.add(len(state.set))
    return len(state.set)


def merges_a_set(state, expert):
    state.set |= {1, 2}
    return len(state.set)


def appends_to_a_deque(state, expert):
    state.deque.append(2.0)
    return float(len(state.deque))


def rotates_a_deque(state, expert):
    state.deque.rotate(1)
    return 1.0


def next_of_a_range(state, expert):
    return next(state.range)


def next_of_a_zip(state, expert):
    return next(state.zip)[0]


def next_of_a_generator(state, expert):
    return next(state.generator)


def next_of_an_iterator(state, expert):
    return next(state.iterator)


def next_of_a_dicts_values(state, expert):
    return next(state.values)


def iter_of_a_dicts_values(state, expert):
    return next(iter(state.values))


def next_of_an_enumerate(state, expert):
    return next(state.enumerate)[0]


def one_turn_of_an_iterator(state, expert):
    for factor in state.iterator:
        return factor
    return 1.0


def unpacks_an_iterator(state, expert):
    return next(iter(state.range)) * 1.0


def draws(state, expert):
    return random.random()


def draws_a_tensor(state, expert):
    return 1.0 + torch.rand((), dtype=torch.float64) * 0 + random.randint(0, 5)


def sets_a_tensors_attribute(state, expert):
    state.tensor.calls = getattr(state.tensor, "calls", 0) + 1
    return 1.0


def raises_and_catches(state, expert):
    try:
        raise ValueError
    except ValueError:
        state.count += 1
    return state.count


def catches(state, expert):
    try:
        state.dict["missing"]
    except KeyError:
        SEEN.append("missing")
    return 1.0


def in_a_context(state, expert):
    with contextlib.suppress(KeyError):
        SEEN.append("in")
    return 1.0


@contextlib.contextmanager
def noted():
    SEEN.append("enter")
    yield
    SEEN.append("exit")


def in_its_own_context(state, expert):
    with noted():
        return 1.0


def imports(state, expert):
    import math

    SEEN.append(math.pi)
    return 1.0


def logs(state, expert):
    logging.getLogger(__name__).info("expert")
    SEEN.append("logged")
    return 1.0


def while_loop(state, expert):
    while state.count < 3:
        state.count += 1
        return 2.0
    return 1.0


def maps(state, expert):
    list(map(state.list.append, [1.0]))
    return len(state.list)


def comprehends(state, expert):
    _ = [state.list.append(i) for i in range(2)]
    return len(state.list)


def calls_a_bound_method(state, expert):
    return float(len([state.set.add(5), state.list.extend([1.0])])) + len(state.list)


def makes_a_closure_that_writes(state, expert):
    def write():
        state.count += 1

    write()
    return state.count


def holds_on_to_its_own(state, expert):
    mine = [1.0]
    state.box.items = mine
    return 1.0


TROUBLE = [
    sets_an_attribute, sets_an_attribute_of_an_attribute, sets_with_setattr, writes_vars, adds_an_attribute,
    sets_a_class_attribute, appends, appends_by_name, appends_unbound, extends_in_place, extends_a_local_name,
    writes_an_item, writes_a_slice, pops, sorts, reverses, deletes_an_item, writes_a_dict, updates_a_dict,
    sets_a_default, reads_a_defaultdict, counts_with_a_counter, moves_to_the_end, adds_to_a_set, merges_a_set,
    appends_to_a_deque, rotates_a_deque, writes_a_global, writes_a_global_in_a_helper, appends_to_a_global,
    appends_to_a_default, next_of_a_range, next_of_a_zip, next_of_a_generator, next_of_an_iterator,
    next_of_a_dicts_values, iter_of_a_dicts_values, next_of_an_enumerate,
    one_turn_of_an_iterator, unpacks_an_iterator, draws, draws_a_tensor,
    sets_a_tensors_attribute, raises_and_catches, catches, in_a_context, in_its_own_context, imports,
    logs, while_loop, maps, comprehends, calls_a_bound_method, makes_a_closure_that_writes, holds_on_to_its_own,
]  # fmt: skip


def skip_what_torch_loses(touch):
    lost = {sets_a_class_attribute: versions.CLASS_ATTRIBUTE, appends_to_a_default: versions.DEFAULT_ARGUMENT}
    if touch in lost:
        lost[touch].skip()


@pytest.mark.parametrize("touch", one_in(4, TROUBLE), ids=lambda touch: touch.__name__)
def test_what_is_not_known_to_be_harmless_is_left_to_dynamo(touch):
    skip_what_torch_loses(touch)
    check(over_hits(touch), grouped=False)


# Both kinds of regions are judged by the same code.
@pytest.mark.parametrize("touch", one_in(3, TROUBLE[::6]), ids=lambda touch: touch.__name__)
def test_neither_is_it_in_a_branch(touch):
    skip_what_torch_loses(touch)
    check(over_all(touch), grouped=False)


def reads(state, expert):
    return state.list[0] + state.dict["a"] + state.box.count + len(state.set) + len(state.box.items)


def looks_up(state, expert):
    return state.dict.get("a", 2.0) + float("a" in state.dict) + state.list.count(1.0)


def makes_a_list(state, expert):
    mine = [1.0]
    mine.append(2.0)
    mine += [3.0]
    mine[0] = 4.0
    return sum(mine)


def makes_a_dict(state, expert):
    mine = {"a": 1.0}
    mine["b"] = 2.0
    mine.update(c=3.0)
    return mine.pop("b") + len(mine)


def counts_up(state, expert):
    total = 0.0
    for i in range(3):
        total += i
    for value in state.list:
        total += value
    for a, b in zip([1.0], (2.0,), strict=False):
        total += a + b
    return total


def takes_anything(*values, scale=1.0, **rest):
    return scale * len(values) + rest["other"]


def calls_helpers(state, expert):
    arguments = {"scale": 2.0, "other": 1.0}
    return takes_anything(expert, state, **arguments) + (lambda factor: factor * 2)(1.0)


def without_gradients(state, expert):
    with torch.no_grad():
        return 2.0


EVERYWHERE = [reads, looks_up, makes_a_list, makes_a_dict, counts_up, calls_helpers, without_gradients]


@pytest.mark.parametrize("over", [over_hits, over_all])
@pytest.mark.parametrize("touch", one_in(3, EVERYWHERE), ids=lambda touch: touch.__name__)
def test_what_only_reads_or_is_its_own_is_grouped(over, touch):
    check(over(touch), grouped=True)


@pytest.mark.parametrize("loop", ["grouped", "left as it is"])
def test_a_compiled_loop_keeps_no_input(loop):
    """What the pass was told of a loop is part of the graph, which lives as long as the compiled code."""

    def fn(x, selected, *weights):
        out = torch.zeros_like(x)
        for expert, weight in enumerate(weights):
            _, token = torch.where(F.one_hot(selected, len(weights)).permute(2, 1, 0)[expert])
            if token.numel() > 0:
                rows = x[token]
                if loop == "grouped":
                    out.index_add_(0, token, rows @ weight)
        return out

    run = compile_with_glue(fn, passes={"group_experts": True}, fullgraph=False)
    inputs = [torch.randn(5, 3), torch.arange(10).view(5, 2) % 3, *torch.randn(3, 3, 3).unbind()]
    torch.testing.assert_close(run.call(*inputs), fn(*inputs))
    assert bool(run.session.capture_events) == (loop == "left as it is")
    kept = [weakref.ref(each) for each in inputs]
    del inputs
    gc.collect()
    assert [each() for each in kept] == [None] * len(kept)
