"""Forms of one loop over experts: each is rewritten, or left alone with a reason, and gives what eager code gives."""

import re
import textwrap

import pytest
import torch
import torch.nn.functional as F

from tests.captured import compile_with_glue, result_and_gradients
from tests.slow import one_in
from tools.fuzz.equivalents import GROUPED, INDICES, MASKS, NO_MASK, SUMS

E, N, K, WIDTH, INNER = 2, 5, 2, 3, 4

LOOP = """
def loop(x, logits, weights, up, down):
    selected = torch.topk(logits, K, dim=-1).indices
    out = torch.zeros_like(x)
    for e in range(E):
        {indices}
        rows = (F.relu(x[token] @ up[e]) @ down[e]) * weights[token, slot, None]
        {add}
    return out
"""
INDEX, ADD = next(iter(INDICES)), next(iter(SUMS))


def made(mask="{selected} == {e}", index=INDEX, add=ADD):
    indices = index.format(mask=mask.format(selected="selected", e="e"), token="token", slot="slot")
    text = textwrap.dedent(LOOP).format(indices=indices, add=add.format(out="out", token="token", rows="rows"))
    scope = {"torch": torch, "F": F, "E": E, "K": K, "N": N, "WIDTH": WIDTH}
    exec(text, scope)
    return scope["loop"]


def inputs():
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "x": (N, WIDTH),
        "logits": (N, E + 1),
        "weights": (N, K),
        "up": (E, WIDTH, INNER),
        "down": (E, INNER, WIDTH),
    }
    made = {name: torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5 for name, shape in shapes.items()}
    made["logits"] = made["logits"][:, :E]
    return [tensor.requires_grad_(name != "logits") for name, tensor in made.items()]


def check(loop, reason):
    run = compile_with_glue(loop, passes={"group_experts": True}, eager=True)
    expected, actual = result_and_gradients(loop, inputs()), result_and_gradients(run.call, inputs())
    assert len(expected) == len(actual) == 5
    for want, got in zip(expected, actual, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    if reason == GROUPED:
        assert run.counts == {"loops_grouped": 1, "experts_grouped": E}, run.skip_reasons
    else:
        assert "loops_grouped" not in run.counts
        assert any(re.search(reason, given) for given in run.skip_reasons), run.skip_reasons


@pytest.mark.parametrize("mask", one_in(5, MASKS))
def test_every_mask_of_an_expert(mask):
    check(made(mask=mask), MASKS[mask])


@pytest.mark.parametrize("index", one_in(5, INDICES))
def test_every_way_to_find_the_rows(index):
    check(made(index=index), INDICES[index])


@pytest.mark.parametrize("add", one_in(5, SUMS))
def test_every_sum_over_experts(add):
    check(made(add=add), SUMS[add])


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        ("{selected}[: N - 1] == {e}", NO_MASK),
        ("({selected} == {e})[1:]", NO_MASK),
        ("({selected} == {e}).roll(1, 0)", NO_MASK),
        ("({selected} == {e}) & (weights > 0)", NO_MASK),
        ("({selected} == {e}).all(-1, keepdim=True).expand(-1, K)", NO_MASK),
        ("({selected}[:, :1] == {e}).expand(-1, K)", NO_MASK),
        ("F.one_hot({selected}, E).cumsum(-1)[..., {e}]", NO_MASK),
        # Masks of other ids than those that topk gave.
        ("{selected}.t().reshape(N, K) == {e}", GROUPED),
        ("2 * {selected} == {e}", GROUPED),
        ("{selected}.flip(0) == {e}", GROUPED),
    ],
)
def test_what_is_nearly_a_mask(mask, reason):
    check(made(mask=mask), reason)
