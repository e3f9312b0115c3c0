"""Loops over experts that do something to Python on the way, and what a compile of them must leave as eager does."""

import collections
import random

import torch
import torch.nn.functional as F

from tests.captured import compile_with_glue
from tests.passes.group_experts.loops import EXPERTS, WIDTH, routings

SEEN = []
TOTAL = 0


class Box:
    kind = 0

    def __init__(self):
        self.count = 0
        self.items = [0]


class State:
    """What a program may touch that existed before it ran."""

    def __init__(self):
        self.count = 0
        self.list = [1.0]
        self.dict = {"a": 1.0, 0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0}
        self.set = {100}
        self.deque = collections.deque([1.0], maxlen=3)
        self.counter = collections.Counter()
        self.defaults = collections.defaultdict(int)
        self.ordered = collections.OrderedDict(a=1, b=2)
        self.box = Box()
        self.range = iter(range(1, 100))
        self.zip = zip(range(1, 100), range(100), strict=False)
        self.generator = (i for i in range(1, 100))
        self.iterator = iter([float(i) for i in range(1, 100)])
        self.values = iter({i: float(i) for i in range(1, 100)}.values())
        self.enumerate = enumerate(range(100), start=1)
        self.weights = [1.0, 2.0, 3.0, 4.0]
        self.tensor = torch.ones((), dtype=torch.float64)

    def seen(self):
        """As plain data."""
        plain = {name: value for name, value in vars(self).items() if isinstance(value, int | list | dict | set)}
        iterators = self.range, self.zip, self.generator, self.iterator, self.values, self.enumerate
        rest = [next(each) for each in iterators]
        tensors = sorted((k, v) for k, v in vars(self.tensor).items())
        return plain, list(self.deque), self.box.count, self.box.items, vars(self.box).keys(), rest, tensors, Box.kind


def mask_of(selected):
    return F.one_hot(selected, num_classes=EXPERTS).permute(2, 1, 0)


def over_hits(touch):
    def loop(x, selected, gate_up, state):
        out, mask = torch.zeros_like(x), mask_of(selected)
        for hit in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            expert = hit[0]
            _, token = torch.where(mask[expert])
            rows = F.linear(x[token], gate_up[expert, :WIDTH])
            out.index_add_(0, token, rows * touch(state, expert))
        return out

    return loop


def over_all(touch):
    def loop(x, selected, gate_up, state):
        out, mask = torch.zeros_like(x), mask_of(selected)
        for expert in range(EXPERTS):
            _, token = torch.where(mask[expert])
            if token.numel() == 0:
                continue
            rows = F.linear(x[token], gate_up[expert, :WIDTH])
            out.index_add_(0, token, rows * touch(state, expert))
        return out

    return loop


def check(loop, grouped):
    """Same result and same state as eager, for two routings; the first has an expert without rows."""
    global TOTAL
    gate_up = torch.randn(EXPERTS, 2 * WIDTH, WIDTH, dtype=torch.float64)
    run = compile_with_glue(loop, fullgraph=False, passes={"group_experts": True})
    for name in ("one expert empty", "all to one expert"):
        selected = routings()[name]
        x = torch.randn(selected.shape[0], WIDTH, dtype=torch.float64)
        results = []
        for call in (loop, run.call):
            SEEN.clear()
            TOTAL, Box.kind = 0, 0
            random.seed(3)
            state = State()
            results.append((call(x, selected, gate_up, state), state.seen(), list(SEEN), TOTAL, random.random()))
        (want, *state_then), (got, *state_now) = results
        torch.testing.assert_close(got, want)
        assert state_now == state_then
    counts = [report.passes[0].counts.get("loops_grouped", 0) for report in run.session.graphs]
    assert (sum(counts) > 0) == grouped, (counts, [e.reason for e in run.session.capture_events])


def writes_a_global(state, expert):
    global TOTAL
    TOTAL += 1
    return TOTAL


def writes_a_global_in_a_helper(state, expert):
    return 1.0 + writes_a_global(state, expert)


def appends_to_a_global(state, expert):
    SEEN.append(1)
    return 1.0


def appends_to_a_default(state, expert, seen=SEEN):
    seen.append(1)
    return float(len(seen))
