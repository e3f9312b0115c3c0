"""Rows taken from tokens in the order of a sort, and put back: as transformers' grouped experts do, and near misses."""

import pytest
import torch
import torch.nn.functional as F

from glue_compiler.passes.group_experts import permuted_rows
from tests.captured import count, result_and_gradients
from tests.passes.group_experts.loops import compiled
from tests.slow import one_in

TOKENS, WIDTH, EXPERTS, TOP_K = 10, 8, 6, 2
GATHER, COMBINE = torch.ops.glue.expert_gather.default, torch.ops.glue.expert_combine.default


@pytest.fixture(autouse=True)
def on_any_device(monkeypatch):
    monkeypatch.setattr(permuted_rows, "pays", lambda rows: rows.shape[1] > 1)


def operands(dtype=torch.float64, tokens=TOKENS):
    torch.manual_seed(0)
    sizes = ((tokens, WIDTH), (WIDTH, EXPERTS), (EXPERTS, WIDTH, WIDTH), (EXPERTS, WIDTH, WIDTH))
    return [torch.randn(*size).to(dtype).requires_grad_() for size in sizes]


def routed(x, router):
    weights, ids = torch.topk(F.softmax(x @ router, -1), TOP_K)
    return weights.reshape(-1), ids.reshape(-1)


def product(rows, weight, ids):
    return (rows.unsqueeze(1) @ weight[ids]).squeeze(1)


def undone(order):
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.size(0))
    return inverse


def experts(rows, ids, up, down):
    return product(F.silu(product(rows, up, ids)), down, ids)


def by_token(rows, tokens):
    return rows.view(tokens, TOP_K, WIDTH).sum(dim=1)


def divided(x, router, up, down):
    """transformers 5.23."""
    weights, ids = routed(x, router)
    ids, order = torch.sort(ids)
    rows = experts(x[order // TOP_K], ids, up, down) * weights[order].unsqueeze(-1)
    return by_token(rows[undone(order)], x.shape[0])


def masked(x, router, up, down):
    """transformers 5.17: rows of no expert are masked, and there are none."""
    weights, ids = routed(x, router)
    ids, order = torch.sort(ids)
    rows, weights = x[order // TOP_K], weights[order]
    is_none = (ids >= EXPERTS).unsqueeze(-1)
    ids.clamp_(max=EXPERTS - 1)
    rows.masked_fill_(is_none, 0.0)
    rows = product(rows, up, ids).masked_fill(is_none, 0.0)
    rows = product(F.silu(rows), down, ids).masked_fill(is_none, 0.0)
    return by_token((rows * weights.unsqueeze(-1))[undone(order)], x.shape[0])


def gathered_twice(x, router, up, down):
    """transformers 5.0."""
    weights, ids = routed(x, router)
    token = torch.arange(x.shape[0]).unsqueeze(1).expand(-1, TOP_K).reshape(-1)
    order = torch.argsort(ids)
    rows = experts(x[token][order], ids[order], up, down) * weights.reshape(-1, 1)[order]
    return by_token(rows[torch.argsort(order)], x.shape[0])


def selected(x, router, up, down):
    weights, ids = routed(x, router)
    order = ids.argsort(stable=True)
    rows = experts(x.index_select(0, order.div(TOP_K, rounding_mode="floor")), ids[order], up, down)
    rows = rows * weights[order][:, None]
    return rows.index_select(0, order.argsort()).reshape(-1, TOP_K, WIDTH).sum(-2)


def not_weighted(x, router, up, down):
    _, ids = routed(x, router)
    ids, order = ids.sort()
    return by_token(experts(x[order // TOP_K], ids, up, down)[order.argsort()], x.shape[0])


def weights_written_afterwards(x, router, up, down):
    weights, ids = routed(x, router)
    ids, order = torch.sort(ids)
    rows = experts(x[order // TOP_K], ids, up, down) * weights[order].unsqueeze(-1)
    out = by_token(rows[undone(order)], x.shape[0])
    with torch.no_grad():
        weights.zero_()
    return out


def two_layers(x, router, up, down):
    return divided(divided(x, router, up, down), router, up, down)


WHOLE = (divided, masked, gathered_twice, selected, not_weighted, weights_written_afterwards, two_layers)


def check(fn, inputs, **options):
    """Counts of the pass; results and all gradients are eager's."""
    torch._dynamo.reset()
    run = compiled(fn, **options)
    exact = inputs[0].dtype is torch.float64
    found = zip(result_and_gradients(run.call, inputs), result_and_gradients(fn, inputs), strict=True)
    for got, want in found:
        assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
        torch.testing.assert_close(got, want, rtol=1e-9 if exact else 5e-2, atol=1e-9 if exact else 5e-2)
    return run


@pytest.mark.parametrize("dynamic", one_in(2, [None, True]))
@pytest.mark.parametrize("fn", WHOLE)
def test_rows_are_taken_and_summed_by_token(fn, dynamic):
    run = check(fn, operands(), dynamic=dynamic)
    layers = 2 if fn is two_layers else 1
    assert (count(run.graph, GATHER), count(run.graph, COMBINE)) == (layers, layers)
    assert run.counts["rows_taken"] == run.counts["rows_summed"] == layers


@pytest.mark.parametrize("tokens", [1, 3])
def test_few_tokens(tokens):
    check(divided, operands(tokens=tokens))


def test_rows_that_are_written_afterwards():
    def fn(x, router, up, down):
        weights, ids = routed(x, router)
        ids, order = torch.sort(ids)
        rows = experts(x[order // TOP_K], ids, up, down)
        out = by_token((rows.float() * weights[order].float().unsqueeze(-1))[undone(order)], x.shape[0])
        with torch.no_grad():
            rows.zero_()
        return out

    assert check(fn, operands(torch.bfloat16)).counts["rows_summed"] == 1


def test_masks_that_hold_nowhere_are_removed():
    run = check(masked, operands())
    assert run.counts["masks_removed"] == 3
    assert count(run.graph, "masked_fill", "masked_fill_") == 0


def test_sums_in_narrow_numbers():
    check(divided, operands(torch.bfloat16))


def test_autocast_adds_in_fp32():
    def fn(x, router, up, down):
        with torch.autocast("cpu", torch.bfloat16):
            return divided(x, router, up, down)

    assert check(fn, operands(torch.float32)).counts["rows_summed"] == 1


def test_without_gradients_inductor_fuses_them():
    with torch.no_grad():
        run = compiled(divided)
        torch.testing.assert_close(run.call(*operands()), divided(*operands()))
    assert "rows_taken" not in run.counts


def any_places(x, router, up, down):
    """Not each slot once."""
    weights, ids = routed(x, router)
    order = ids.cumsum(0).remainder(ids.size(0))
    return by_token(x[order // TOP_K] * weights[order].unsqueeze(-1), x.shape[0])


def other_divisor(x, router, up, down):
    _, ids = routed(x, router)
    order = ids.argsort()
    return by_token(x[order // (TOP_K + 1)], x.shape[0])


def places_from_behind(x, router, up, down):
    order = routed(x, router)[1].argsort()
    return by_token(x[order // TOP_K - 1], x.shape[0])


def written_order(x, router, up, down):
    order = routed(x, router)[1].argsort()
    order[0] = order[1]
    return by_token(x[order // TOP_K], x.shape[0])


def sorted_in_rows(x, router, up, down):
    order = routed(x, router)[1].view(-1, TOP_K).argsort(-1).reshape(-1)
    return by_token(x[order // TOP_K], x.shape[0])


PARTS = {
    "a slice": lambda scores: scores.argsort()[:8] // TOP_K,
    "a slice of the index": lambda scores: (scores.argsort() // TOP_K)[:5],
    "narrow": lambda scores: scores.argsort().narrow(0, 0, 5) // TOP_K,
    "indexed": lambda scores: scores.argsort()[torch.arange(5)] // TOP_K,
    "a row of a view": lambda scores: scores.argsort().view(2, TOKENS)[0] // TOP_K,
}


def rows_and_scores():
    return [operands()[0], torch.randn(TOKENS * TOP_K, dtype=torch.float64)]


@pytest.mark.parametrize("name", PARTS)
def test_a_part_of_an_order_leaves_slots_out(name):
    """There are as many rows as places, and not as slots."""
    assert "rows_taken" not in check(lambda x, scores: x[PARTS[name](scores)], rows_and_scores()).counts


def test_an_order_that_a_checkpointed_function_is_given_stays():
    def fn(x, scores):
        order = scores.argsort()
        return torch.utils.checkpoint.checkpoint(lambda x, o: x[o // TOP_K].sin(), x, order, use_reentrant=False)

    assert "rows_taken" not in check(fn, rows_and_scores(), strict=True).counts


def test_an_inverse_that_is_sorted_once_more():
    def fn(x, scores):
        order = scores.argsort()
        rows = x[order // TOP_K]
        first = by_token(rows.sin()[order.argsort()], TOKENS)
        return first, rows.cos()[order.argsort()].view(TOKENS, TOP_K, WIDTH).sum(1, keepdim=True)

    assert check(fn, rows_and_scores(), strict=True).counts["rows_summed"] == 1


@pytest.mark.parametrize("fn", [any_places, other_divisor, places_from_behind, written_order, sorted_in_rows])
def test_rows_that_are_not_taken_once_stay(fn):
    counts = check(fn, operands()).counts
    assert not {"rows_taken", "rows_summed"} & counts.keys()


def sums_with(put_back, scale=lambda weights, order: weights[order].unsqueeze(-1)):
    """``put_back`` (order, ids) → places of the rows, of which each token adds up some."""

    def fn(x, router, up, down):
        weights, ids = routed(x, router)
        order = ids.argsort()
        rows = experts(x[order // TOP_K], ids[order], up, down) * scale(weights, order)
        return by_token(rows[put_back(order, ids)], x.shape[0])

    return fn


def added_places(order, ids):
    places = torch.full_like(order, -1)
    return places.index_put((order,), torch.arange(order.size(0)), accumulate=True)


def half_undone(order, ids):
    places = torch.zeros_like(order)
    places[order[:4]] = torch.arange(4)
    return places


def undone_and_written(order, ids):
    places = undone(order)
    places[0] = 0
    return places


def backwards(order, ids):
    places = torch.empty_like(order)
    places[order] = torch.arange(order.size(0) - 1, -1, -1)
    return places


NOT_UNDONE = {
    "the order itself": lambda order, ids: order,
    "descending": lambda order, ids: order.argsort(descending=True),
    "sorted descending": lambda order, ids: order.sort(descending=True).indices,
    "another order's": lambda order, ids: (-ids).argsort().argsort(),
    "added": added_places,
    "half": half_undone,
    "written": undone_and_written,
    "backwards": backwards,
}


@pytest.mark.parametrize("name", NOT_UNDONE)
def test_places_that_do_not_undo_the_order(name):
    counts = check(sums_with(NOT_UNDONE[name]), operands()).counts
    assert "rows_summed" not in counts
    assert counts["rows_taken"]


OTHER_WEIGHTS = {
    "not in the order": lambda weights, order: weights.unsqueeze(-1),
    "in another order": lambda weights, order: weights[order.flip(0)].unsqueeze(-1),
    "of columns": lambda weights, order: weights[order][:WIDTH],
    "twice": lambda weights, order: weights[order].unsqueeze(-1) * weights[order].unsqueeze(-1),
}


@pytest.mark.parametrize("name", OTHER_WEIGHTS)
def test_other_weights_stay_where_they_are(name):
    run = check(sums_with(lambda order, ids: order.argsort(), OTHER_WEIGHTS[name]), operands())
    (node,) = run.graph.graph.find_nodes(op="call_function", target=COMBINE)
    assert node.args[5] is None


def without_grad(fn):
    def run(*args):
        with torch.no_grad():
            return fn(*args)

    return run


CUT = {
    "weights": lambda rows, weights, order: rows * weights[order].unsqueeze(-1).detach(),
    "their source": lambda rows, weights, order: rows * weights.detach()[order].unsqueeze(-1),
    "weights without grad": lambda rows, weights, order: (
        rows * without_grad(lambda: weights[order].unsqueeze(-1).clone())()
    ),
    "rows": lambda rows, weights, order: rows.detach() * weights[order].unsqueeze(-1),
    "rows that were converted": lambda rows, weights, order: without_grad(rows.float)() * weights[order].unsqueeze(-1),
    "half of them": lambda rows, weights, order: (
        torch.where(order[:, None] > 5, rows, rows.detach()) * weights[order].unsqueeze(-1)
    ),
}


@pytest.mark.parametrize("name", CUT)
def test_gradients_end_where_they_do_in_eager(name):
    def fn(x, router, up, down):
        weights, ids = routed(x, router)
        order = ids.argsort()
        rows = experts(x[order // TOP_K], ids[order], up, down)
        return by_token(CUT[name](rows, weights, order)[order.argsort()], x.shape[0]) + x

    check(fn, operands())


def sums_over(view):
    def fn(x, router, up, down):
        order = routed(x, router)[1].argsort()
        return view(x[order // TOP_K][order.argsort()])

    return fn


@pytest.mark.parametrize(
    "view",
    [
        lambda rows: rows.view(TOKENS, TOP_K, WIDTH).sum(2),
        lambda rows: rows.view(TOKENS, TOP_K, WIDTH).sum(0),
        lambda rows: rows.view(TOP_K, TOKENS, WIDTH).sum(1),
        lambda rows: rows.view(TOP_K, TOKENS, WIDTH).transpose(0, 1).sum(1),
        lambda rows: rows.view(TOKENS, TOP_K, WIDTH).sum(1, keepdim=True)[:, 0],
        lambda rows: rows.view(TOKENS, TOP_K, WIDTH).mean(1),
    ],
)
def test_other_sums_stay(view):
    assert "rows_summed" not in check(sums_over(view), operands()).counts


@pytest.mark.parametrize(
    "mask",
    [
        lambda ids: ids >= EXPERTS - 1,
        lambda ids: ids > EXPERTS - 2,
        lambda ids: ids <= EXPERTS,
        lambda ids: ids * 2 >= EXPERTS,
        lambda ids: (ids + 1) >= EXPERTS,
    ],
)
def test_masks_that_may_hold_stay(mask):
    def fn(x, router, up, down):
        ids, order = torch.sort(routed(x, router)[1])
        rows = x[order // TOP_K].masked_fill(mask(ids).unsqueeze(-1), 0.0)
        return experts(rows, ids, up, down)

    assert "masks_removed" not in check(fn, operands()).counts


def test_a_mask_without_gradients_stays():
    def fn(x, router, up, down):
        ids, order = torch.sort(routed(x, router)[1])
        rows = x[order // TOP_K]
        with torch.no_grad():
            constant = rows.masked_fill((ids >= EXPERTS).unsqueeze(-1), 0.0)
        return rows * constant

    assert "masks_removed" not in check(fn, operands()).counts


def test_what_is_filled_in_has_a_gradient():
    def fn(x, router, up, down):
        ids, order = torch.sort(routed(x, router)[1])
        return x[order // TOP_K].masked_fill((ids >= EXPERTS).unsqueeze(-1), down.sum()).sin()

    assert "masks_removed" not in check(fn, operands()).counts


def test_a_sum_in_narrower_numbers_stays():
    def fn(x, router, up, down):
        order = routed(x, router)[1].argsort()
        rows = x[order // TOP_K][order.argsort()]
        return rows.view(TOKENS, TOP_K, WIDTH).sum(1, dtype=torch.float32)

    torch._dynamo.reset()
    run = compiled(fn)
    inputs = operands()
    got, want = (torch.autograd.grad((call(*inputs) ** 3).sum(), inputs[0])[0] for call in (run.call, fn))
    assert torch.equal(got, want)
    assert "rows_summed" not in run.counts


def test_a_masked_copy_that_is_returned_stays_one():
    def fn(x, router, up, down):
        ids, order = torch.sort(routed(x, router)[1])
        rows = x[order // TOP_K]
        return rows.masked_fill((ids >= EXPERTS).unsqueeze(-1), 0.0), rows

    torch._dynamo.reset()
    run = compiled(fn)
    first, second = run.call(*operands())
    assert first.data_ptr() != second.data_ptr()
    assert "masks_removed" not in run.counts


@pytest.mark.slow
def test_transformers_grouped_experts():
    transformers = pytest.importorskip("transformers", minversion="5.0")
    from tests.passes.group_experts.model_sizes import SMALL

    sizes = {**SMALL, "num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8, "num_experts_per_tok": 2}
    config = transformers.AutoConfig.for_model("qwen3_moe", **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="grouped_mm")
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    ids = torch.randint(0, 64, (2, 9))

    def step(call):
        model.zero_grad()
        call(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = step(model)
    torch._dynamo.reset()
    run = compiled(model, fullgraph=False)
    for want, got in zip(expected, step(run.call), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)
    layers = config.num_hidden_layers
    assert run.counts["rows_taken"] == run.counts["rows_summed"] == layers


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(monkeypatch):
    monkeypatch.undo()
    sizes = ((TOKENS, 64), (64, EXPERTS), (EXPERTS, 64, 64), (EXPERTS, 64, 64))
    inputs = [torch.randn(*size, device="cuda", dtype=torch.float64).requires_grad_() for size in sizes]

    def wide(x, router, up, down):
        weights, ids = routed(x, router)
        ids, order = torch.sort(ids)
        rows = experts(x[order // TOP_K], ids, up, down) * weights[order].unsqueeze(-1)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.size(0), device="cuda")
        return rows[inverse].view(x.shape[0], TOP_K, 64).sum(1)

    torch._dynamo.reset()
    run = compiled(wide)
    outputs = run.call(*inputs), wide(*inputs)
    gradients = (torch.autograd.grad(out.square().sum(), inputs) for out in outputs)
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(*outputs, rtol=1e-9, atol=1e-9)
    assert run.counts["rows_taken"] == run.counts["rows_summed"] == 1
