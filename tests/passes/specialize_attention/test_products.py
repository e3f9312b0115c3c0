"""Softmax between two products that einsum writes, beside products of another kind."""

import pytest
import torch
import torch.nn.functional as F

from tests.passes.specialize_attention.attention import LENGTH, assert_as_eager, counts, inputs, specialized


def between(of_scores, of_result):
    """Causal attention whose products are ``(tensor, tensor) -> tensor``."""

    def fn(query, key, value):
        token = torch.arange(query.shape[2])
        scores = (of_scores(query, key) * 0.25).masked_fill(token[:, None] < token, float("-inf"))
        return of_result(scores.softmax(-1), value)

    return fn


def einsum(equation, swapped=False):
    return lambda a, b: torch.einsum(equation, b, a) if swapped else torch.einsum(equation, a, b)


SCORES = {
    "named": einsum("bhqd,bhkd->bhqk"),
    "spaces": einsum(" b h i d , b h j d -> b h i j"),
    "the other way round": einsum("bhkd,bhqd->bhqk", swapped=True),
    "of keys to queries": einsum("bhqd,bhkd->bhkq"),
    "of a transposed key": lambda q, k: torch.einsum("bhqd,bhdk->bhqk", q, k.transpose(-1, -2)),
    "matmul": lambda q, k: q @ k.mT,
}
RESULTS = {"named": einsum("bhqk,bhkd->bhqd"), "matmul": torch.matmul}


@pytest.mark.parametrize("result", list(RESULTS))
@pytest.mark.parametrize("scores", list(SCORES))
def test_products_that_are_those_of_attention(scores, result):
    assert_as_eager(between(SCORES[scores], RESULTS[result]), {"causal": 1})


OTHERS = {
    "heads are summed": (lambda q, k: torch.einsum("bhqd,bgkd->bgqk", q, k), RESULTS["named"]),
    "a diagonal": (lambda q, k: torch.einsum("bhqd,bhkd,q->bhqk", q, k, torch.ones(LENGTH).double()), RESULTS["named"]),
    "the value is transposed": (SCORES["named"], lambda w, v: torch.einsum("bhqk,bhdk->bhqd", w, v.transpose(-1, -2))),
    "a result in another order": (SCORES["named"], einsum("bhqk,bhkd->bqhd")),
    "the weights are transposed": (SCORES["named"], einsum("bhkq,bhkd->bhqd")),
}


@pytest.mark.parametrize("name", list(OTHERS))
def test_other_products_are_left_alone(name):
    assert_as_eager(between(*OTHERS[name]), {})


@pytest.mark.parametrize(
    ("weigh", "reasons"),
    [(lambda s: F.dropout(F.softmax(s, -1), 0.0), 1), (lambda s: F.softmax(s, -2), 1), (F.relu, 0)],
)
def test_softmax_between_products_of_three_dimensions_says_why_it_stays(weigh, reasons):
    given = [each.detach().transpose(0, 2).flatten(1, 2).transpose(0, 1) for each in inputs()]
    run = specialized(lambda q, k, v: torch.bmm(weigh(torch.bmm(q, k.mT)), v))
    run.call(*given)
    assert counts(run) == {}
    assert [reason for reason in run.skip_reasons if "not of query, key and value" in reason] == run.skip_reasons
    assert len(run.skip_reasons) == reasons


# -- products that are added to something


def summed(added, of_scores=torch.baddbmm, **factors):
    """Causal attention whose scores are added to ``added``, as gpt_neox_japanese of transformers adds them to zeros."""

    def fn(query, key, value):
        rows = [each.reshape(-1, LENGTH, 16) for each in (query, key, value)]
        scores = of_scores(added(query), rows[0], rows[1].mT, **factors)
        token = torch.arange(LENGTH)
        scores = scores.view(*query.shape[:2], LENGTH, LENGTH).masked_fill(token[:, None] < token, float("-inf"))
        return scores.softmax(-1) @ value

    return fn


def zeros(query):
    return torch.zeros(2, LENGTH, LENGTH, dtype=query.dtype)


def zeros_written(query):
    found = zeros(query)
    found[0, 3] = 2.0
    return found


LISTED = {"listed": 1}
SUMS = {
    "zeros": (summed(zeros, alpha=0.25), {"causal": 1}),
    "one zero": (summed(lambda q: torch.zeros((), dtype=q.dtype)), {"causal": 1}),
    "not read": (summed(lambda q: torch.full((2, 1, LENGTH), float("nan"), dtype=q.dtype), beta=0), {"causal": 1}),
    "ones": (summed(lambda q: zeros(q) + 1), LISTED),
    "another for each key": (summed(lambda q: torch.arange(LENGTH).to(q.dtype)), LISTED),
    "zeros that are written": (summed(zeros_written), "written in place"),
    "zeros that have a gradient": (summed(lambda q: q[..., :1].sum() * zeros(q)), LISTED),
    "a negative factor": (summed(zeros, alpha=-0.5), "its scale is -0.5"),
    "twice itself": (summed(zeros, lambda *args: torch.baddbmm(*args) * 2), {"causal": 1}),
    "in place": (summed(zeros, lambda added, *factors: added.baddbmm_(*factors)), "numbers are added"),
}


@pytest.mark.parametrize("name", list(SUMS))
def test_a_product_that_is_added_to_zeros_is_a_product(name):
    assert_as_eager(*SUMS[name])
