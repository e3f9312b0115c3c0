"""What ``replace`` proves of every rewrite, each claim with its near miss. The pass writes ``-x * 2`` as ``x * -2``."""

from dataclasses import dataclass

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from glue_compiler import GraphPass, New, Numerics, Rewriter, Rules, Value
from glue_compiler.testing import assert_equivalent, assert_rewritten, assert_untouched, capture, find, run_pass

aten = torch.ops.aten
no_grad = torch.no_grad()


@dataclass(frozen=True)
class Negated:
    of: Value
    times: int = 1


RULES = Rules[Negated]()


@RULES.begin(aten.neg)
def _(made):
    return Negated(made["self"])


@RULES(aten.mul)
def _(negated, made):
    return Negated(negated.of, 2) if made["other"] == 2 and negated.times == 1 else None


class NegateOnce(GraphPass):
    name, numerics = "negate_once", Numerics.BITWISE

    def run(self, graph, context):
        rewriter = Rewriter(graph, context)
        for made, negated in rewriter.flow(RULES).ends():
            if negated.times == 2:
                rewriter.replace(made.value, with_=self.with_(negated.of))
        return rewriter.result()

    def with_(self, source):
        return New(torch.mul, source, -2.0)


def an_input():
    return (torch.rand(3, 4, dtype=torch.float64) + 0.5).requires_grad_()


def run(fn, graph_pass=NegateOnce, **options):
    x = an_input()
    (graph,) = capture(fn, x)
    result = run_pass(graph, graph_pass, **options)
    assert_equivalent(result.before, result.after, [x])
    return result


def minus_twice(x):
    return -x * 2


def operand_written(x):
    y = x * 1
    minus = -y
    y.mul_(2)
    return minus * 2 + y


def operand_written_later(x):
    y = x * 1
    minus = minus_twice(y)
    y.mul_(2)
    return minus + y


def used_twice(x):
    minus = -x
    return minus * 2 + minus.sin()


def doubled_in_place(x):
    minus = -x
    minus.mul_(2)
    return minus.sin()


def part_without_gradients(x):
    with torch.no_grad():
        minus = -x
    return minus * 2 + x


def autocast_between(x):
    minus = -x
    with torch.autocast("cpu", torch.bfloat16):
        return minus * 2


def with_hook(x):
    y = x.exp()
    y.register_hook(lambda grad: grad.view(-1).view(3, 4))
    return minus_twice(y)


def returned_and_written(x):
    y = minus_twice(x)
    y.add_(1)
    return y


@pytest.mark.parametrize(
    "fn",
    [
        minus_twice,
        no_grad(minus_twice),
        no_grad(operand_written_later),
        returned_and_written,
        lambda x: checkpoint(minus_twice, x.sin().exp(), use_reentrant=False),
        lambda x: torch.cat([minus_twice(x), x]),
    ],
)
def test_what_is_proved_is_rewritten(fn):
    result = run(fn)
    assert_rewritten(result, times=1)
    assert not result.skip_reasons
    assert not find(result.after, torch.neg, "neg", "__neg__")


@pytest.mark.parametrize(
    ("reason", "fn"),
    [
        ("written in place before", operand_written),
        ("written in place later, and backward", operand_written_later),
        ("used elsewhere too, by 'sin'", used_twice),
        ("used elsewhere too, by 'sin'", doubled_in_place),
        ("belongs to another graph", lambda x: checkpoint(lambda y: y * 2, -x, use_reentrant=False)),
        ("gradients are switched off", part_without_gradients),
        ("autocast is switched on or off", autocast_between),
        ("a hook", with_hook),
        ("no rule carries that on", lambda x: (-x).sin()),
    ],
)
def test_what_is_not_proved_is_left_with_the_reason(fn, reason):
    assert_untouched(run(fn), reason=reason)


def test_a_result_that_the_caller_may_write_is_copied_where_backward_may_have_saved_it():
    def copies(fn):
        return len(find(run(fn).after, torch.ops.glue.private_copy.default))

    assert [copies(fn) for fn in (minus_twice, returned_and_written, lambda x: minus_twice(x).sin())] == [1, 1, 0]
    assert copies(no_grad(minus_twice)) == 0


class Other(NegateOnce):
    def __init__(self, target, *args):
        self.target, self.args = target, args

    def with_(self, source):
        return New(self.target, source, *self.args) if self.target is not None else source


@pytest.mark.parametrize(
    ("reason", "graph_pass"),
    [
        ("its dtype is torch.float64, and would be torch.float32", Other(torch.Tensor.to, torch.float32)),
        ("its shape is ['3', '4'], and would be ['4', '3']", Other(torch.t)),
        ("its shape is ['3', '4'], and would be ['3']", Other(torch.sum, 1)),
        ("its layout is ['4', '1'], and would be ['0', '1']", Other(lambda x: x[:1].expand(3, 4))),
        ("its need of a gradient is True", Other(torch.Tensor.detach)),
        ("cannot be computed in its place", Other(torch.reshape, (5, 5))),
        ("shares memory that is written or returned", Other(torch.Tensor.view, (3, 4))),
        ("shares memory that is written or returned", Other(None)),
    ],
)
def test_another_kind_of_result_is_refused(reason, graph_pass):
    (graph,) = capture(minus_twice, an_input())
    assert_untouched(run_pass(graph, graph_pass), reason=reason)


def test_a_value_may_take_the_place_of_another():
    (graph,) = capture(lambda x: minus_twice(x).sin(), an_input())
    result = run_pass(graph, Other(None))
    assert_rewritten(result, times=1)
    x = an_input().detach()
    assert torch.equal(result.after(x)[0], x.sin())


STARTS = Rules[Value]()


@STARTS.begin(aten.neg)
@STARTS.begin(aten.tanh)
def _(made):
    return made["self"]


class NegateOnceAndBefore(NegateOnce):
    """Rewrites ``-x * 2``, and what begins it; or what ``STARTS`` finds in the midst of a call."""

    def run(self, graph, context):
        rewriter = Rewriter(graph, context)
        for rules in (RULES, STARTS):
            for made, found in rewriter.flow(rules).ends():
                source = found if isinstance(found, Value) else found.of
                rewriter.replace(made.value, with_=self.with_(source))
        return rewriter.result()


def test_two_rewrites_of_one_node_are_one():
    (graph,) = capture(minus_twice, an_input())
    result = run_pass(graph, NegateOnceAndBefore)
    assert result.report.counts["rewritten"] == 1
    (reason,) = result.skip_reasons
    assert "a part of what 'mul' is rewritten with" in reason


def test_a_value_in_the_midst_of_a_call_stays():
    (graph,) = capture(torch.nn.functional.tanhshrink, an_input())
    assert_untouched(run_pass(graph, NegateOnceAndBefore), reason="inside of a call that does more")


def test_rewrites_may_follow_each_other_and_fuel_counts_them():
    def fn(x):
        return minus_twice(minus_twice(x)).sin()

    assert_rewritten(run(fn), times=2)
    assert_rewritten(run(fn, fuel=1), times=1)
