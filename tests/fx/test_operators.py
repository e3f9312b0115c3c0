"""What nodes do, as operators bound by schema, and which version of memory an operand is."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from glue_compiler.fx.effects import EffectAnalysis
from glue_compiler.fx.operators import UNTRACKED, Call, Operators, Value
from glue_compiler.fx.value_numbering import number_values
from tests.captured import compile_with_glue

aten = torch.ops.aten


def captured(fn, *args):
    run = compile_with_glue(fn, eager=True, passes={"hoist_metadata": False, "group_experts": False})
    run.call(*args)
    analysis = EffectAnalysis.for_graph(run.graph)
    return Operators(number_values(run.graph, analysis), analysis), run.graph


def returned(operators, gm):
    """The values that the graph returns, as its output finds them."""
    output = gm.graph.output_node()
    return [operators.found(node, output) for node in output.args[0]]


def read(fn, *args):
    """The operator that makes what ``fn`` returns."""
    operators, gm = captured(fn, *args)
    (value,) = returned(operators, gm)
    return operators, operators.does(value)


X = torch.arange(12.0).reshape(3, 4)

SPELLINGS = {
    "softmax": [
        lambda x: F.softmax(x, dim=-1),
        lambda x: F.softmax(input=x, dim=-1),
        lambda x: torch.softmax(x, -1),
        lambda x: x.softmax(-1),
    ],
    "where": [
        lambda x: torch.where(x > 1, x, 0.0),
        lambda x: x.where(x > 1, 0.0),
        lambda x: torch.where(condition=x > 1, input=x, other=0.0),
    ],
    "topk": [lambda x: torch.topk(x, 2, dim=0)[0], lambda x: torch.topk(x, k=2, axis=0)[0], lambda x: x.topk(2, 0)[0]],
    "dropout": [lambda x: torch.dropout(x, 0.5, train=True), lambda x: F.dropout(x, 0.5, True)],
    "add": [
        lambda x: torch.add(x, x, alpha=-2),
        lambda x: torch.sub(x, x, alpha=2),
        lambda x: x.subtract(x, alpha=2),
        lambda x: torch.rsub(x, x, alpha=2),
        lambda x: x.clone().sub_(x, alpha=2),
    ],
    "mul": [
        lambda x: x * 0.25,
        lambda x: 0.25 * x,
        lambda x: x / 4,
        lambda x: torch.true_divide(x, 4.0),
        lambda x: x.div_(4),
    ],
    "sum": [lambda x: x.sum(axis=0, keepdims=True), lambda x: torch.sum(x, (0,), True)],
    "gt": [
        lambda x: x > 3,
        lambda x: 3 < x,  # noqa: SIM300
        lambda x: torch.greater(x, 3),
    ],
    "permute": [
        lambda x: x.t(),
        lambda x: x.movedim(0, 1),
        lambda x: torch.moveaxis(x, 1, 0),
        lambda x: x.swapaxes(0, -1),
        lambda x: x.swapdims(1, 0),
        lambda x: x.transpose(-1, -2),
        lambda x: x.permute(1, 0),
    ],
    "view": [
        lambda x: x.reshape(12),
        lambda x: x.flatten(),
        lambda x: x.view(-1),
        lambda x: x.contiguous().view_as(x.new_empty(12)),
        lambda x: x.ravel(),
    ],
    "slice": [lambda x: x[:, 1:3], lambda x: x.narrow(1, 1, 2)],
    "cat": [lambda x: torch.cat((x, x)), lambda x: torch.concat((x, x)), lambda x: torch.concatenate((x, x), axis=0)],
    "matmul": [lambda x: x @ x.t(), lambda x: torch.mm(x, x.t()), lambda x: x.matmul(x.mT)],
    "sort": [lambda x: x.sort().indices, lambda x: x.argsort(), lambda x: torch.argsort(x, dim=-1)],
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_is_one_call(name):
    calls = []
    for fn in SPELLINGS[name]:
        _, call = read(fn, X)
        assert call.operator is getattr(aten, name)
        named = {
            key: "tensor" if isinstance(value, Value) or key == "tensors" else value
            for key, value in call.arguments.items()
        }
        named.pop("inplace", None)
        calls.append(named)
    assert all(call == calls[0] for call in calls), calls


@pytest.mark.parametrize(
    "fill",
    [
        lambda x: x.masked_fill(x > 1, 0.0),
        lambda x: torch.masked_fill(input=x, mask=x > 1, value=0.0),
        lambda x: x.masked_fill_(x > 1, 0.0),
        lambda x: torch.where(x > 1, 0.0, x),
    ],
)
def test_what_is_filled_in_stands_first(fill):
    operators, call = read(fill, X.clone())
    assert call.operator is aten.where
    assert call.arguments["self"] == 0.0
    assert call.arguments["other"].node.op == "placeholder"
    assert operators.does(call.arguments["condition"]).operator is aten.gt


@pytest.mark.parametrize(
    "flat", [lambda x: x[:, :-1].flatten(), lambda x: x[:, :-1].ravel(), lambda x: x[:, :-1].reshape(-1)]
)
def test_a_reshape_that_copies_is_a_reshape(flat):
    operators, call = read(flat, X)
    assert call.operator is aten.view
    assert operators.does(call.arguments["self"]).operator is aten.slice


def test_a_division_that_rounds_is_no_product():
    _, call = read(lambda x: torch.div(x, 4, rounding_mode="floor"), X)
    assert call.operator is aten.div


def test_the_record_has_the_call_as_it_was():
    _, call = read(lambda x: x.div_(3), X.clone())
    assert (call.operator, call.arguments["other"]) == (aten.mul, 1 / 3)
    assert (call.recorded.overload.overloadpacket, call.recorded.arguments["other"]) == (aten.div_, 3)
    assert call.written == ("self",)


def test_where_tells_its_operands_apart():
    operators, call = read(lambda x, y: x.where(y > 0, y), X, X + 1)
    chosen, otherwise = call.arguments["self"], call.arguments["other"]
    assert [chosen.node.name, otherwise.node.name] == ["l_x_", "l_y_"]
    assert operators.does(call.arguments["condition"]).operator is aten.gt


def test_a_subscript_is_the_operators_it_dispatches():
    operators, gm = captured(lambda x: x[:, None, 1:, 0], X.reshape(3, 2, 2))
    (value,) = returned(operators, gm)
    found = []
    while (call := operators.does(value)) is not None:
        found.append((call.operator, {k: v for k, v in call.arguments.items() if k != "self"}))
        value = call.arguments["self"]
    assert [operator for operator, _ in reversed(found)] == [aten.unsqueeze, aten.slice, aten.select]
    assert found[-1][1] == {"dim": 1}
    assert operators.meta(Value(value.node)).shape == (3, 2, 2)


def test_linear_and_attention_are_whole():
    _, call = read(lambda x: F.linear(x, x, None), X)
    assert call.operator is aten.linear
    q = torch.randn(1, 2, 3, 4)
    _, call = read(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), q)
    assert call.operator is aten.scaled_dot_product_attention
    assert call.arguments["is_causal"] is True
    assert call.arguments["enable_gqa"] is False


def test_casts_are_operators():
    operators, call = read(lambda x: x.half().double(), X)
    assert call.arguments["dtype"] is torch.float64
    inner = operators.does(call.arguments["self"])
    assert (inner.operator, inner.arguments["dtype"]) == (aten._to_copy, torch.float16)


def test_a_call_that_gives_its_operand_stands_for_it():
    operators, gm = captured(lambda x: x.contiguous() + 1, X)
    add = next(node for node in gm.graph.nodes if "add" in node.name)
    match operators.does(operators.value(add)):
        case Call(aten.add, {"self": Value(node, _, _)}):
            assert node.op == "placeholder"


def test_the_mode_of_the_region_is_seen():
    def fn(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = F.linear(x, x[:, :4])
        return inside, F.linear(x, x[:, :4])

    operators, gm = captured(fn, X)
    inside, outside = returned(operators, gm)
    assert operators.does(inside).operator is operators.does(outside).operator is aten.linear
    assert [operators.meta(value).dtype for value in (inside, outside)] == [torch.bfloat16, torch.float32]
    assert operators.analysis.mode_of(gm, inside.node).autocast
    assert not operators.analysis.mode_of(gm, outside.node).autocast


def test_the_grad_mode_of_a_body_is_that_of_its_call_and_its_own():
    def body(x):
        with torch.no_grad():
            y = x * 2
        return y + x

    def fn(x):
        return checkpoint(body, x, use_reentrant=False)

    operators, _ = captured(fn, X.clone().requires_grad_())
    (scope,) = operators.numbering.root.children
    modes = {n.name: operators.analysis.mode_of(scope.module, n).grad for n in scope.module.graph.nodes}
    assert [grad for name, grad in modes.items() if name in ("y", "mul")] == [False]
    assert [grad for name, grad in modes.items() if name.startswith("add")] == [True]


# -- versions


def counted(fn):
    """What ``nonzero`` of a mask finds in it."""
    operators, gm = captured(fn, torch.tensor([True, False, True]))
    nonzero = next(node for node in gm.graph.nodes if operators.calls(node) and _is(operators, node, aten.nonzero))
    return operators, operators.calls(nonzero)[0].arguments["self"]


def _is(operators, node, packet):
    return operators.calls(node)[-1].operator is packet


def test_an_operand_that_nothing_writes_is_what_was_made():
    operators, value = counted(lambda m: torch.nonzero(m.clone()))
    assert operators.does(value).operator is aten.clone


def test_an_operand_that_was_written_as_a_whole_is_what_wrote_it():
    def fn(m):
        m = m.clone()
        m.logical_not_()
        return torch.nonzero(m)

    operators, value = counted(fn)
    call = operators.does(value)
    assert call.operator is aten.logical_not
    assert operators.does(call.arguments["self"]).operator is aten.clone


@pytest.mark.parametrize(
    ("write", "is_followed"),
    [
        (lambda x: x.mul_(2), True),
        (lambda x: x.mul_(2).add_(1), True),
        (lambda x: x.data.mul_(2), False),
        (lambda x: x.detach().mul_(2), False),
        (lambda x: x.detach().mul_(2).add_(1), False),
    ],
)
@pytest.mark.parametrize("needs_gradient", [False, True])
def test_what_wrote_an_operand_through_an_alias_without_its_gradient_is_not_the_operand(
    write, is_followed, needs_gradient
):
    def fn(x):
        x = x * 2
        write(x)
        return torch.nonzero(x)

    operators, gm = captured(fn, torch.randn(3).requires_grad_(needs_gradient))
    nonzero = next(node for node in gm.graph.nodes if operators.calls(node) and _is(operators, node, aten.nonzero))
    value = operators.calls(nonzero)[0].arguments["self"]
    assert (value.step != UNTRACKED) == (is_followed or not needs_gradient)


@pytest.mark.parametrize(
    "write",
    [
        lambda m: m.__setitem__(0, False),
        lambda m: m[1:].fill_(True),
        lambda m: m.view(-1)[0].zero_(),
        lambda m: m.detach().logical_not_()[0].zero_(),
        lambda m: m.data[1:].fill_(True),
        lambda m: torch.logical_not(m[:2], out=m[:2]),
    ],
)
def test_an_operand_that_was_written_in_part_is_not_known(write):
    def fn(m):
        m = m.clone()
        write(m)
        return torch.nonzero(m)

    operators, value = counted(fn)
    assert value.step == UNTRACKED
    assert operators.does(value) is None


def test_a_write_to_other_memory_is_no_write():
    def fn(m):
        other = m.clone()
        m = m.clone()
        other[0] = False
        return torch.nonzero(m), other

    operators, value = counted(fn)
    assert operators.does(value).operator is aten.clone


def test_a_write_afterwards_is_none_for_what_came_before():
    def fn(m):
        m = m.clone()
        found = torch.nonzero(m)
        m[0] = False
        return found, m

    operators, value = counted(fn)
    assert operators.does(value).operator is aten.clone
    assert not operators.is_fixed(value)


@torch._dynamo.allow_in_graph
def mystery(tensor):
    tensor.fill_(True)
    return tensor + 0


def test_a_barrier_may_write_what_it_is_given():
    def fn(m):
        m = m.clone()
        mystery(m)
        return torch.nonzero(m)

    _, value = counted(fn)
    assert value.step == UNTRACKED


def test_a_barrier_may_write_inputs_that_others_hold_too():
    def fn(m):
        mystery(m.float())
        return torch.nonzero(m)

    _, value = counted(fn)
    assert value.step == UNTRACKED


def test_a_barrier_cannot_write_what_it_never_saw():
    def fn(m):
        own = m.clone()
        mystery(m)
        return torch.nonzero(own)

    operators, value = counted(fn)
    assert operators.does(value).operator is aten.clone


def test_what_is_reshaped_in_place_is_not_readable():
    def fn(m):
        m = m.clone()
        found = torch.nonzero(m)
        m.unsqueeze_(0)
        return found, m

    _, value = counted(fn)
    assert value.step == UNTRACKED


def test_a_body_finds_what_its_caller_has_written():
    def fn(m):
        m = m.clone()
        m[0] = False
        return checkpoint(lambda m: torch.nonzero(m).float() * 2, m, use_reentrant=False)

    operators, gm = captured(fn, torch.tensor([True, False, True]))
    (scope,) = operators.numbering.root.children
    (placeholder,) = scope.module.graph.find_nodes(op="placeholder")
    assert operators.passed(operators.value(placeholder)) is None
    clone = next(node for node in gm.graph.nodes if operators.calls(node) and _is(operators, node, aten.clone))
    assert operators.numbering.numbers[placeholder] != operators.numbering.numbers[clone]


def test_a_body_finds_what_its_caller_has_made():
    def fn(m):
        return checkpoint(lambda m: torch.nonzero(m).float() * 2, m.clone(), use_reentrant=False)

    operators, _ = captured(fn, torch.tensor([True, False, True]))
    (scope,) = operators.numbering.root.children
    (placeholder,) = scope.module.graph.find_nodes(op="placeholder")
    assert operators.does(operators.passed(operators.value(placeholder))).operator is aten.clone


def test_symbols_of_shared_records_are_the_nodes_own():
    def fn(x):
        return [F.linear(x[torch.nonzero(x[:, i])[:, 0]], x) for i in range(3)]

    operators, gm = captured(fn, X)
    linears = [node for node in gm.graph.nodes if "linear" in node.name]
    rows = [operators.meta(operators.value(node)).shape[0] for node in linears]
    assert rows == [node.meta["example_value"].shape[0].node.expr for node in linears]
    assert len(set(rows)) == 3


@pytest.mark.parametrize("first", ["one twice", "two alike"])
def test_an_operand_that_is_passed_twice_is_not_two_that_look_alike(first):
    """The columns of a nonzero have one storage and one shape."""

    def both(x, mask):
        token, slot = torch.nonzero(mask, as_tuple=True)
        if first == "one twice":
            return x[token, token], x[token, slot]
        return x[token, slot], x[token, token]

    operators, gm = captured(both, X[:, :3], torch.eye(3, dtype=torch.bool))
    indices = [operators.does(value).arguments["indices"] for value in returned(operators, gm)]
    repeated = [first == second for first, second in indices]
    assert repeated == [first == "one twice", first == "two alike"]
