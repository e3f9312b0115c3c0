"""Facts about values: where rules carry them, where they end, and what is refused."""

from dataclasses import dataclass

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from glue_compiler.fx.effects import EffectAnalysis
from glue_compiler.fx.flow import Flow, Refused, Rules
from glue_compiler.fx.operators import Operators
from glue_compiler.fx.value_numbering import number_values
from glue_compiler.testing import capture

aten = torch.ops.aten
X = torch.arange(6.0).reshape(2, 3)


@dataclass(frozen=True)
class Scaled:
    """An exponential, times ``factor``."""

    factor: float


RULES = Rules[Scaled]()


@RULES.begin(aten.exp)
def _(made):
    return Scaled(1.0) if made.dtype == torch.float32 else None


@RULES(aten.mul, of=("self", "other"))
def _(scaled, made):
    (by,) = (made[name] for name in ("self", "other") if name != made.carried)
    if not isinstance(by, int | float):
        raise Refused("it is multiplied by a tensor")
    return Scaled(scaled.factor * by)


@RULES(aten.clamp)
def _(scaled, made):
    return scaled if made["min"] == 0 else None


@RULES(aten.cat, of=("tensors",))
def _(scaled, made):
    return scaled


def flow_of(fn, *args):
    (graph,) = capture(fn, *(args or (X,)))
    analysis = EffectAnalysis.for_graph(graph)
    return Flow(Operators(number_values(graph, analysis), analysis), RULES)


def ends(flow):
    return [(made.value.node.name, fact.factor) for made, fact in flow.ends()]


def reasons(flow):
    return [str(refused) for _, refused in flow.refusals]


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: (x.exp() * 2 * 3).sum(),
        lambda x: (3 * (2 * torch.exp(x))).sum(),
        lambda x: torch.mul(other=x.exp(), input=6).sum(),
        lambda x: (x.exp() * 12 / 2).sum(),
        lambda x: (x.exp() * 6).clamp(min=0).sum(),
        lambda x: torch.multiply(x, 1).exp_().mul_(6).sum(),
        lambda x: torch.cat([x.exp() * 6, x]).sum(),
        lambda x: torch.reshape((x.exp() * 6).contiguous(), (2, 3)).sum(),
        lambda x: checkpoint(lambda y: (y.exp() * 6).sum(), x, use_reentrant=False),
        lambda x: checkpoint(lambda y: (y * 6).sum(), x.exp(), use_reentrant=False),
    ],
)
def test_a_fact_is_carried_by_what_operators_do(fn):
    (end,) = ends(flow_of(fn))
    assert end[1] == 6


def test_an_operator_without_a_rule_and_a_rule_that_returns_none_end_a_fact():
    assert ends(flow_of(lambda x: x.exp().sin())) == [("exp", 1)]
    assert ends(flow_of(lambda x: torch.div(x.exp(), 4, rounding_mode="floor"))) == [("exp", 1)]
    assert ends(flow_of(lambda x: 4 / x.exp())) == [("exp", 1)]  # of what it is divided by there is no rule
    assert ends(flow_of(lambda x: x.exp().clamp(min=1))) == [("exp", 1)]
    assert ends(flow_of(lambda x: x.clamp(min=x.exp()))) == [("exp", 1)]  # there is no rule of this argument
    assert ends(flow_of(lambda x: x.exp().sin(), X.double())) == []


def test_what_is_used_in_two_ways_ends_where_one_of_them_does_not_carry_it():
    def fn(x):
        y = x.exp()
        return (y * 2).sum() + y.sum()

    assert [factor for _, factor in ends(flow_of(fn))] == [1, 2]


def test_what_nothing_needs_is_no_use():
    def fn(x):
        y = x.exp()
        y.sin()
        return (y * 2).sum()

    assert [factor for _, factor in ends(flow_of(fn))] == [2]


def test_a_refusal_has_the_reason_and_the_node():
    flow = flow_of(lambda x: (x.exp() * x).sum())
    assert [(str(refused), refused.node.name) for _, refused in flow.refusals] == [
        ("it is multiplied by a tensor", "mul")
    ]
    assert reasons(flow_of(lambda x: x.exp() * x.exp().sin())) == ["it is multiplied by a tensor"]


def test_two_facts_in_one_operator_are_refused():
    assert reasons(flow_of(lambda x: torch.cat([x.exp(), x.exp() * 2]))) == ["aten.cat takes two such values"]


def test_a_value_that_was_written_has_the_fact_no_more():
    def fn(x):
        y = x.exp()
        z = y * 2
        y.sin_()
        return z.sum() + (y * 3).sum()

    flow = flow_of(fn)
    assert sorted(fact.factor for fact in flow.facts.values()) == [1, 2]


def test_a_fact_that_begins_in_place_is_carried_by_readers_of_the_memory():
    def fn(x):
        y = x * 1
        y.exp_()
        return (y * 2).sum()

    assert ends(flow_of(fn)) == [("mul_1", 2)]


def test_facts_are_asked_for_by_value():
    flow = flow_of(lambda x: (x.exp() * 2).sum())
    (made, fact), *_ = flow.ends()
    assert flow.of(made.value) == fact == Scaled(2.0)
    assert flow.of(made["other"]) is flow.of(None) is None
