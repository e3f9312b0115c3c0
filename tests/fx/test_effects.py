"""EffectAnalysis: what captured calls do, read off the operators that they are made of."""

import pytest
import torch
import torch.utils.checkpoint

import glue_compiler.ops  # noqa: F401  registers torch.ops.glue
from glue_compiler.fx.effects import EffectAnalysis, Kind
from glue_compiler.fx.values import storages_of, value_of
from tests.captured import compile_with_glue


def effects_of(fn, *args):
    """Effects of each call, by node name, of the graph of ``fn``."""
    run = compile_with_glue(fn, eager=True, passes={"hoist_metadata": False})
    run.call(*args)
    analysis = EffectAnalysis.for_graph(run.graph)
    return {
        node: analysis.of(run.graph, node)
        for node in run.graph.graph.nodes
        if node.op in ("call_function", "call_method")
    }


def only(effects):
    assert len(effects) == 1, list(effects)
    return next(iter(effects.values()))


def test_arithmetic_is_pure():
    effects = effects_of(lambda x: torch.nn.functional.silu(x.float() @ x.t()) + 1, torch.ones(2, 2))
    assert {e.kind for e in effects.values()} == {Kind.PURE}
    assert not any(e.syncs or e.writes for e in effects.values())


def test_an_in_place_method_writes_its_own_memory():
    def fn(x):
        y = x * 2
        y[1:].add_(1)
        return y

    effects = effects_of(fn, torch.ones(3))
    writers = [node for node, e in effects.items() if e.writes]
    assert [node.target for node in writers] == ["add_"]
    product = next(node for node in effects if "mul" in str(node.target))
    assert effects[writers[0]].writes == storages_of(value_of(product))


def test_setitem_and_an_inplace_flag_write():
    def fn(x, y):
        x[0] = 1
        return torch.nn.functional.relu(y, True), torch.nn.functional.relu(x * 1, inplace=False)

    effects = effects_of(fn, torch.ones(3), torch.ones(3))
    assert [bool(e.writes) for node, e in effects.items() if "relu" in str(node.target)] == [True, False]
    assert [bool(e.writes) for node, e in effects.items() if "setitem" in str(node.target)] == [True]


def test_out_writes_what_is_passed():
    effects = effects_of(lambda x, y: torch.add(x, 1, out=y), torch.ones(3), torch.ones(3))
    assert any(e.writes for e in effects.values())


def test_dropout_is_random_only_when_it_drops():
    assert only(effects_of(lambda x: torch.nn.functional.dropout(x, 0.5), torch.ones(3))).random
    assert (
        only(effects_of(lambda x: torch.nn.functional.dropout(x, 0.5, training=False), torch.ones(3))).kind is Kind.PURE
    )


def test_reading_a_value_back_syncs_and_reading_a_size_does_not():
    def fn(x):
        return x.max().item() + x.shape[0]

    effects = effects_of(fn, torch.arange(3))
    assert [node.target for node, e in effects.items() if e.syncs] == ["item"]


def test_a_boolean_index_syncs_and_an_integer_index_does_not():
    effects = effects_of(
        lambda x, m, i: (x[m], x[i]), torch.arange(3), torch.tensor([True, False, True]), torch.tensor([0, 1])
    )
    assert sum(e.syncs for e in effects.values()) == 1


def test_switches_of_autograd_and_autocast_are_modes():
    def fn(x):
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            return x @ x

    kinds = [e.kind for e in effects_of(fn, torch.ones(2, 2)).values()]
    assert kinds.count(Kind.MODE) == 2
    assert kinds.count(Kind.GRAD_MODE) == 2


def test_a_function_that_is_not_torchs_is_not_run():
    calls = []

    @torch._dynamo.allow_in_graph
    def mystery(x):
        calls.append(1)
        return x + 1

    effects = effects_of(lambda x: mystery(x), torch.ones(2))
    assert only(effects).kind is Kind.BARRIER


def test_looking_leaves_the_recorded_tensors_as_they_are():
    def fn(x):
        y = x * 2
        y.unsqueeze_(0)
        y.t_()
        return y

    run = compile_with_glue(fn, eager=True, passes={"hoist_metadata": False})
    run.call(torch.ones(3))
    before = {node: str(value_of(node)) for node in run.graph.graph.nodes}
    analysis = EffectAnalysis.for_graph(run.graph)
    kinds = [analysis.of(run.graph, node) for node in run.graph.graph.nodes]
    assert {node: str(value_of(node)) for node in run.graph.graph.nodes} == before
    assert sum(bool(e.writes) or e.kind is Kind.BARRIER for e in kinds) >= 2


def test_looking_adds_no_symbols_that_somebody_must_bind():
    run = compile_with_glue(lambda x: torch.nonzero(x).float() * 2, eager=True, passes={"hoist_metadata": False})
    run.call(torch.ones(3))
    analysis = EffectAnalysis.for_graph(run.graph)
    for node in run.graph.graph.nodes:
        analysis.of(run.graph, node)
    assert not analysis.fake_mode.shape_env.pending_fresh_unbacked_symbols


def runs_of(fn, *args, monkeypatch):
    """How often calls of the graph of ``fn`` were run on fake tensors, and the effects of each."""
    run = compile_with_glue(fn, eager=True, passes={"hoist_metadata": False})
    run.call(*args)
    ran = []
    original = EffectAnalysis._run
    monkeypatch.setattr(
        EffectAnalysis, "_run", lambda self, node, *rest: ran.append(node) or original(self, node, *rest)
    )
    analysis = EffectAnalysis.for_graph(run.graph)
    return ran, {node: analysis.of(run.graph, node) for node in run.graph.graph.nodes}


def test_pure_calls_on_rows_of_another_number_are_run_once(monkeypatch):
    def fn(x, weight):
        rows = [x[torch.nonzero(x[:, i])[:, 0]] for i in range(4)]
        return [torch.nn.functional.linear(each, weight[i]) for i, each in enumerate(rows)]

    ran, effects = runs_of(fn, torch.ones(5, 4), torch.ones(4, 3, 4), monkeypatch=monkeypatch)
    assert sum("linear" in str(node.target) for node in ran) == 1
    linears = [found for node, found in effects.items() if "linear" in str(node.target)]
    assert [found.kind for found in linears] == [Kind.PURE] * 4


def test_calls_that_write_are_each_run(monkeypatch):
    """Which memory a call writes is read from its own operands."""

    def fn(x):
        rows = [x[torch.nonzero(x[:, i])[:, 0]] for i in range(2)]
        return [each.mul_(2) for each in rows]

    ran, effects = runs_of(fn, torch.ones(5, 4), monkeypatch=monkeypatch)
    writes = [found.writes for node, found in effects.items() if node.target == "mul_"]
    assert len(writes) == 2
    assert writes[0] != writes[1]
    assert sum(node.target == "mul_" for node in ran) == 2


def test_other_equalities_of_sizes_are_another_call(monkeypatch):
    def fn(x):
        first, second = (torch.nonzero(x[:, i])[:, 0] for i in range(2))
        grid = x.new_ones(first.shape[0], second.shape[0]), x.new_ones(first.shape[0], first.shape[0])
        return [each.relu() for each in grid]

    ran, _ = runs_of(fn, torch.ones(5, 4), monkeypatch=monkeypatch)
    assert sum(node.target == "relu" for node in ran) == 2


def test_a_context_is_neither_entered_nor_left():
    """Leaving inference mode restores the dispatcher's state of when it was entered."""

    def fn(x):
        with torch.inference_mode():
            y = x * 2
        return x + 1, y

    effects = effects_of(fn, torch.ones(3))
    assert [e.kind for n, e in effects.items() if "inference" in n.name] == [Kind.BARRIER] * 2
    assert not torch.is_inference_mode_enabled()
    torch.nonzero(torch.ones(3))


def test_attention_over_block_lists_computes_and_a_higher_order_operator_that_is_not_known_may_do_anything(monkeypatch):
    def fn(query, starts):
        glue = torch.ops.glue
        offsets = glue.document_offsets(starts)
        blocks = glue.document_blocks(offsets, 1, 12, True)
        return glue.packed_attention(query, query, query, offsets, 12, True, -1, None, blocks)

    def kind():
        effects = effects_of(fn, torch.ones(1, 2, 12, 16), torch.ones(1, 12, dtype=torch.bool))
        return next(e.kind for node, e in effects.items() if "packed_attention" in str(node.target))

    assert kind() is Kind.OPAQUE
    torch._dynamo.reset()
    monkeypatch.setattr("glue_compiler.fx.call_observer.computes_only", lambda operator: False)
    assert kind() is Kind.BARRIER


class _Shifted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, table):
        made = table * 2
        made += 1  # in memory that this body makes
        return x * made

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _Counted(_Shifted):
    @staticmethod
    def forward(ctx, x, table):
        table += 1  # in memory of the caller's
        return x * table


@pytest.mark.parametrize(("function", "kind"), [(_Shifted, Kind.OPAQUE), (_Counted, Kind.BARRIER)])
def test_a_write_in_a_body_of_a_body_is_seen_outside_if_the_memory_is(function, kind):
    def fn(x, table):
        def body(x, table):
            return function.apply(x, table).sin()

        return torch.utils.checkpoint.checkpoint(body, x, table, use_reentrant=False)

    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
        effects = effects_of(fn, torch.ones(3, requires_grad=True), torch.ones(3))
    found = [e for node, e in effects.items() if "checkpoint" in str(node.target)]
    assert [each.kind for each in found] == [kind]
    assert not found[0].writes
