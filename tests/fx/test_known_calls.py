"""What is kept of a call: equal for equal calls, and dropped as soon as the call, its values or its mode change."""

import pytest
import torch
from torch import fx

from glue_compiler.compat.symbols import rename_unbacked
from glue_compiler.fx import known_calls
from glue_compiler.fx.effects import EffectAnalysis
from glue_compiler.fx.known_calls import Arguments, KnownCall
from glue_compiler.fx.modes import Mode
from glue_compiler.fx.value_numbering import number_values
from glue_compiler.testing import capture


def nodes():
    graph = fx.Graph()
    return graph.placeholder("a"), graph.placeholder("b")


A, B = nodes()


class Whole(int):
    """Reads as an int."""


DIFFERENT = {
    "another number": ((A, 1), (A, 2)),
    "a number and one of another type": ((A, 1), (A, Whole(1))),
    "an integer and a float": ((A, 1), (A, 1.0)),
    "zeros of two signs": ((A, 0.0), (A, -0.0)),
    "zero and false": ((A, 0), (A, False)),
    "a list and a tuple": (([1, 2],), ((1, 2),)),
    "another nesting": (((A,), A), (A, (A,))),
    "another dtype": ((A, torch.float32), (A, torch.float64)),
    "another slice": ((slice(None, A),), (slice(A, None),)),
    "a node and its place": ((A, None), (None, A)),
    "another keyword": (({"dim": 1},), ({"axis": 1},)),
}


@pytest.mark.parametrize(("first", "second"), DIFFERENT.values(), ids=DIFFERENT.keys())
def test_other_arguments_differ(first, second):
    assert Arguments.of(first).form != Arguments.of(second).form
    assert Arguments.of(first) == Arguments.of(first)


def test_operands_are_told_apart_and_counted_each_time():
    assert Arguments.of((A, B)).form == Arguments.of((A, A)).form
    assert Arguments.of((A, B, A)).operands == (A, B, A)
    assert Arguments.of(({"b": B, "a": A},)) == Arguments.of(({"a": A, "b": B},))


def known(fn, *args):
    (gm,) = capture(fn, *args)
    node = next(node for node in gm.graph.nodes if node.op.startswith("call_"))
    return node, KnownCall(node, Mode(), 0)


def test_a_call_is_kept_until_it_changes():
    changes = {
        "target": lambda node: setattr(node, "target", torch.sub),
        "arguments": lambda node: setattr(node, "args", (node.args[0], 3)),
        "keywords": lambda node: setattr(node, "kwargs", {"alpha": 2}),
        "its value": lambda node: node.meta.update(example_value=torch.ones(3)),
        "an operand's value": lambda node: node.args[0].meta.update(example_value=torch.ones(3)),
    }
    for change in changes.values():
        node, call = known(lambda x: torch.add(x, 2), torch.ones(3))
        assert call.is_current(Mode(), 0)
        change(node)
        assert not call.is_current(Mode(), 0)
    _, call = known(lambda x: torch.add(x, 2), torch.ones(3))
    assert call.is_current(Mode(), 0)
    assert not call.is_current(Mode(grad=False), 0)
    assert not call.is_current(Mode(), 1)


def test_a_value_with_symbols_or_of_a_subclass_is_not_static():
    _, call = known(lambda x: x + 1, torch.ones(3))
    assert call.static is not None
    assert not call.unbacked
    _, call = known(lambda x: x.nonzero(), torch.ones(3))
    assert call.static is None
    assert call.unbacked


def layers(x):
    for _ in range(6):
        x = torch.add(x, 1)
    return x


def test_the_next_pass_looks_again_only_at_what_changed(monkeypatch):
    (gm,) = capture(layers, torch.ones(3))
    analysis = EffectAnalysis.for_graph(gm)
    looked_at = []
    original = Arguments.of.__func__
    monkeypatch.setattr(
        known_calls.Arguments, "of", classmethod(lambda cls, given: looked_at.append(given) or original(cls, given))
    )
    before = number_values(gm, analysis)
    assert len(looked_at) == 6
    changed = list(gm.graph.nodes)[3]
    changed.args = (changed.args[0], 2)
    looked_at.clear()
    after = number_values(gm, analysis)
    assert looked_at == [(changed.args, changed.kwargs)]
    assert len(set(after.numbers.values())) == len(set(before.numbers.values()))


def test_a_symbol_that_is_renamed_is_read_again():
    def twice(x):
        return x.nonzero() + 1, (x * 2).nonzero() + 1

    (gm,) = capture(twice, torch.ones(3))
    analysis = EffectAnalysis.for_graph(gm)
    first, second = (node for node in gm.graph.nodes if node.target == "nonzero")
    symbols = [analysis.known(gm, node).unbacked for node in (first, second)]
    assert len({*symbols}) == 2
    rename_unbacked(analysis.fake_mode.shape_env, symbols[1][0], symbols[0][0])
    assert analysis.known(gm, second).unbacked == symbols[0]
