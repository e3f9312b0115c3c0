"""Loops with a twist that a reader of spellings, or one without versions, takes for another loop; each beside its like.

Compared with eager in fp64: outputs, gradients, and which gradients there are.
"""

import warnings

import pytest
import torch
import torch.nn.functional as F

from glue_compiler.errors import GlueWarning
from tests.captured import Run
from tests.passes.group_experts.loops import EXPERTS, TOP_K, WIDTH, compiled, inputs_for, routings
from tests.slow import one_in


@torch._dynamo.allow_in_graph
def rewrites(tensor, value):
    """Nothing is known of it; it writes what it is given."""
    with torch.no_grad():
        tensor.fill_(value)
    return tensor.sum()


def _body(x, weights, gate_up, out, token, slot, expert):
    out.index_add_(0, token, F.linear(x[token], gate_up[expert, :WIDTH]) * weights[token, slot, None])


def _loop(x, selected, weights, gate_up):
    out = torch.zeros_like(x)
    for expert in range(EXPERTS):
        _body(x, weights, gate_up, out, *torch.where(selected == expert), expert)
    return out


def _masked(x, selected, weights, gate_up):
    """``out[mask] += rows``, which adds a token once."""
    out = torch.zeros_like(x)
    for expert in range(EXPERTS):
        mask = (selected == expert).any(-1)
        out[mask] += F.linear(x[mask], gate_up[expert, :WIDTH])
    return out


# -- operands by schema


def _top_k(axis):
    def loop(x, selected, weights, gate_up, down):
        logits = x.detach() @ gate_up.detach()[0, :EXPERTS].T
        chosen = torch.topk(logits, x.shape[0] if axis == 0 else TOP_K, axis=axis).indices
        return _masked(x, chosen, weights, gate_up)

    return loop


def _permuted(**how):
    def loop(x, selected, weights, gate_up, down):
        mask = F.one_hot(selected, num_classes=EXPERTS).permute(**how)
        out = torch.zeros_like(x)
        for expert in range(EXPERTS):
            token, slot = torch.where(mask[expert])
            _body(x, weights, gate_up, out, token, slot, expert)
        return out

    return loop


def _sum(**how):
    def loop(x, selected, weights, gate_up, down):
        selected = weights.detach().topk(EXPERTS, dim=-1).indices
        out = torch.zeros_like(x)
        for expert in range(EXPERTS):
            token = torch.where((selected == expert).any(dim=-1))[0]
            weight = (weights * (selected == expert)).sum(**how)
            out.index_add_(0, token, F.linear(x[token], gate_up[expert, :WIDTH]) * weight[token].view(-1, 1))
        return out

    return loop


def _index_add(**how):
    def loop(x, selected, weights, gate_up, down):
        out = torch.zeros_like(x)
        for expert in range(EXPERTS):
            token, _ = torch.where(selected == expert)
            out.index_add_(0, token, F.linear(x[token], gate_up[expert, :WIDTH]), **how)
        return out

    return loop


def _index_put(accumulate):
    def loop(x, selected, weights, gate_up, down):
        out = torch.zeros_like(x)
        for expert in range(EXPERTS):
            token, _ = torch.where(selected == expert)
            out.index_put_((token,), F.linear(x[token], gate_up[expert, :WIDTH]), accumulate=accumulate)
        return out

    return loop


def any_of_the_other_axis(x, selected, weights, gate_up, down):
    out = torch.zeros_like(x)
    for expert in range(EXPERTS):
        token = torch.where((selected == expert).any(axis=0))[0]
        out.index_add_(0, token, F.linear(x[token], gate_up[expert, :WIDTH]))
    return out


# -- versions


def _written_routing(where):
    def loop(x, selected, weights, gate_up, down):
        selected = selected.clone()
        if where == "before":
            selected[:2] = 3
        masks = [selected == expert for expert in range(EXPERTS)]
        if where == "after":
            selected[:2] = 3
        out = torch.zeros_like(x)
        for expert, mask in enumerate(masks):
            _body(x, weights, gate_up, out, *torch.where(mask), expert)
        return out

    return loop


def mask_written_before(x, selected, weights, gate_up, down):
    mask = F.one_hot(selected, num_classes=EXPERTS).permute(2, 0, 1)
    mask[3] = 0
    out = torch.zeros_like(x)
    for expert in range(EXPERTS):
        _body(x, weights, gate_up, out, *torch.where(mask[expert]), expert)
    return out


def _barrier(of):
    def loop(x, selected, weights, gate_up, down):
        selected = weights.detach().topk(TOP_K, dim=-1).indices
        other = torch.zeros_like(selected)
        noted = rewrites(selected if of == "selected" else other, 1)
        return _masked(x, selected, weights, gate_up), noted

    return loop


def routing_between_mask_and_loop(x, selected, weights, gate_up, down):
    """The weights of a row are those of its slot when it is computed."""
    weights = weights.clone()
    out = torch.zeros_like(x)
    for expert in range(EXPERTS):
        _body(x, weights, gate_up, out, *torch.where(selected == expert), expert)
        with torch.no_grad():
            weights.mul_(0.5)
    return out


def _written(what):
    def loop(x, selected, weights, gate_up, down):
        values = {"rows": x.clone(), "weights": gate_up.detach().clone()}
        out = torch.zeros_like(x)
        for expert in range(EXPERTS):
            token, _ = torch.where(selected == expert)
            rows = values["rows"][token]
            out.index_add_(0, token, F.linear(rows.detach(), values["weights"][expert, :WIDTH]))
            if what is not None:
                with torch.no_grad():
                    values[what].add_(1)
        return out + x

    return loop


def _equal_when_made(written):
    """Two tensors that are equal when they are made."""

    def loop(x, selected, weights, gate_up, down):
        one, two = x.detach().exp(), x.detach().exp()
        if written:
            two.add_(1)
        out = torch.zeros_like(x)
        for expert in range(EXPERTS):
            token, _ = torch.where(selected == expert)
            out.index_add_(0, token, F.linear((two if expert == 2 else one)[token], gate_up[expert, :WIDTH]))
        return out

    return loop


# -- experts and accumulators


def _counted_from(first):
    def loop(x, selected, weights, gate_up, down):
        out = torch.zeros_like(x)
        for expert in range(first, EXPERTS):
            token, _ = torch.where(selected == expert)
            out.index_add_(0, token, F.linear(x[token], gate_up[expert, :WIDTH]))
        return out

    return loop


def _ids(dtype):
    def loop(x, selected, weights, gate_up, down):
        return _loop(x, selected.to(dtype), weights, gate_up)

    return loop


def experts_backwards(x, selected, weights, gate_up, down):
    out = torch.zeros_like(x)
    for expert in reversed(range(EXPERTS)):
        _body(x, weights, gate_up, out, *torch.where(selected == expert), expert)
    return out


def _accumulator(make):
    def loop(x, selected, weights, gate_up, down):
        out, others = make(x)
        for expert in range(EXPERTS):
            token, _ = torch.where(selected == expert)
            out = out.index_add(0, token, F.linear(x[token], gate_up[expert, :WIDTH]))
        return (out, *others)

    return loop


def needs_a_gradient(x):
    start = (x * 0).sum(0, keepdim=True).expand_as(x)
    return start, (start,)


def in_a_view(x, selected, weights, gate_up, down):
    held = torch.zeros(2, *x.shape, dtype=x.dtype)
    for expert in range(EXPERTS):
        token, _ = torch.where(selected == expert)
        held[1].index_add_(0, token, F.linear(x[token], gate_up[expert, :WIDTH]))
    return held.sin()


def looked_at_through_a_view(x, selected, weights, gate_up, down):
    out = torch.zeros_like(x)
    column = out[:, 0]
    seen = []
    for expert in range(EXPERTS):
        token, _ = torch.where(selected == expert)
        out.index_add_(0, token, F.linear(x[token], gate_up[expert, :WIDTH]))
        seen.append(column.sum())
    return out, torch.stack(seen)


def in_another_layout(x, selected, weights, gate_up, down):
    out = torch.zeros(x.shape[1], x.shape[0], dtype=x.dtype).t()
    for expert in range(EXPERTS):
        token, _ = torch.where(selected == expert)
        out.index_add_(0, token, F.linear(x[token], gate_up[expert, :WIDTH]))
    return out.t().reshape(-1)


def like_a_transposed_one(x, selected, weights, gate_up, down):
    out = torch.zeros_like(x.t().contiguous().t())
    for expert in range(EXPERTS):
        token, _ = torch.where(selected == expert)
        out.index_add_(0, token, F.linear(x[token], gate_up[expert, :WIDTH]))
    return out.t().view(-1)


def cut_to_integers(x, selected, weights, gate_up, down):
    """A cast after the weights that is more than a rounding."""
    chosen = weights.detach().topk(TOP_K, dim=-1).indices
    out = torch.zeros_like(x)
    for expert in range(EXPERTS):
        token, slot = torch.where(chosen == expert)
        out[token] += (F.linear(x[token], gate_up[expert, :WIDTH]) * weights[token, slot, None]).to(torch.int64)
    return out + x


# -- bodies


def _in_body(body):
    def loop(x, selected, weights, gate_up, down):
        out = torch.zeros_like(x)
        for expert in range(EXPERTS):
            token, _ = torch.where(selected == expert)
            out.index_add_(0, token, body(x[token], gate_up[expert], expert))
        return out

    return loop


def layer_norm(rows, weight, expert):
    return F.layer_norm(F.linear(rows, weight[:WIDTH]), (WIDTH,), weight[0], weight[1])


def shared_layer_norm(rows, weight, expert):
    return F.layer_norm(F.linear(rows, weight[:WIDTH]), (WIDTH,))


def einsum(rows, weight, expert):
    return torch.einsum("rk,nk->rn", rows, weight[:WIDTH])


def a_number_of_each(rows, weight, expert):
    """[rows] times a number of the expert."""
    return F.linear(rows, weight[:WIDTH]) * (rows[:, 0] * weight[0, 0]).unsqueeze(-1)


def in_place_activation(rows, weight, expert):
    return F.silu(F.linear(rows, weight[:WIDTH]), inplace=True)


def in_place_then_read(rows, weight, expert):
    hidden = F.linear(rows, weight[:WIDTH])
    return F.silu(hidden, inplace=True) + hidden


def promoted(rows, weight, expert):
    """In place it keeps the dtype that it would widen out of place."""
    return F.linear(rows, weight[:WIDTH]).half().mul_(weight[0]).double()


GROUPED = {
    "topk, axis=1": _top_k(1),
    "sum, axis=-1": _sum(axis=-1),
    "permute(dims=)": _permuted(dims=(2, 0, 1)),
    "index_add_, alpha=1": _index_add(alpha=1),
    "index_put_, accumulate": _index_put(True),
    "routing written before": _written_routing("before"),
    "a barrier writes something else": _barrier("other"),
    "nothing written": _written(None),
    "equal tensors": _equal_when_made(False),
    "experts from 1 on": _counted_from(1),
    "ids in int32": _ids(torch.int32),
    "experts backwards": experts_backwards,
    "zeros, out of place": _accumulator(lambda x: (torch.zeros_like(x), ())),
    "a start that needs a gradient": _accumulator(needs_a_gradient),
    "in a layout that is kept": like_a_transposed_one,
    "a LayerNorm that all share": _in_body(shared_layer_norm),
    "activation in place": _in_body(in_place_activation),
    "a number of each expert": _in_body(a_number_of_each),
}
LEFT_ALONE = {
    "topk, axis=0": _top_k(0),
    "sum, axis=0": _sum(axis=0),
    "index_add_, alpha=2": _index_add(alpha=2),
    "index_put_": _index_put(False),
    "any of the other axis": any_of_the_other_axis,
    "routing written after": _written_routing("after"),
    "mask written before": mask_written_before,
    "a barrier may write the routing": _barrier("selected"),
    "weights of slots written": routing_between_mask_and_loop,
    "rows written": _written("rows"),
    "weights written": _written("weights"),
    "equal tensors, one written": _equal_when_made(True),
    "experts from -1 on": _counted_from(-1),
    "ids in int8": _ids(torch.int8),
    "ids in uint8": _ids(torch.uint8),
    "ids in float": _ids(torch.float64),
    "in a view": in_a_view,
    "read through a view": looked_at_through_a_view,
    "LayerNorm of each": _in_body(layer_norm),
    "einsum": _in_body(einsum),
    "in place, then read": _in_body(in_place_then_read),
}
EITHER = {
    "promoted": _in_body(promoted),
    "another layout": in_another_layout,
    "cut to integers": cut_to_integers,
}
"""What counts is that they compute what eager does."""
SQUARE = {"sum, axis=-1", "sum, axis=0", "any of the other axis"}
"""As many tokens as slots, so that both axes would do."""


def results(fn, selected, inputs):
    """Outputs, and the gradient of each input or None."""
    inputs = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out = fn(inputs[0], selected.clone(), *inputs[1:])
    outputs = list(out) if isinstance(out, tuple) else [out]
    generator = torch.Generator().manual_seed(1)
    loss = sum((o * torch.randn(o.shape, generator=generator, dtype=o.dtype)).sum() for o in outputs if o.requires_grad)
    loss.backward()
    return outputs, [tensor.grad for tensor in inputs]


def check(loop, selected, inputs) -> Run:
    run = compiled(loop, eager=True, fullgraph=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", GlueWarning)
        actual = results(run.call, selected, inputs)
    expected = results(loop, selected, inputs)
    for wanted, got in zip(expected, actual, strict=True):
        assert [each is None for each in got] == [each is None for each in wanted]
        torch.testing.assert_close([g for g in got if g is not None], [w for w in wanted if w is not None])
        strides = [[each.stride() for each in side if each is not None] for side in (got, wanted)]
        assert wanted is not expected[0] or strides[0] == strides[1]
    return run


def _grouped(run):
    return sum(report.passes[0].counts.get("loops_grouped", 0) for report in run.session.graphs)


def _case(name=""):
    torch.manual_seed(0)
    selected = routings(top_k=EXPERTS)["spread"][:EXPERTS] if name in SQUARE else routings()["spread"]
    return selected, inputs_for(selected)


@pytest.mark.parametrize("name", one_in(3, GROUPED))
def test_grouped(name):
    assert _grouped(check(GROUPED[name], *_case(name))) == 1


@pytest.mark.parametrize("name", one_in(4, LEFT_ALONE))
def test_left_alone(name):
    run = check(LEFT_ALONE[name], *_case(name))
    assert run.session.graphs
    assert _grouped(run) == 0
    assert run.session.graphs[0].passes[0].name == "group_experts"


@pytest.mark.parametrize("name", EITHER)
def test_right_either_way(name):
    check(EITHER[name], *_case(name))
