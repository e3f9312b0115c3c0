"""Attention with a mask that the graph is given, and of which it is known what it shows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from glue_compiler.ops import attention_choice, batch_memo
from glue_compiler.passes.specialize_attention import rewrite
from tests.handoff.two_graphs import (
    Between,
    attention,
    distances,
    operands,
    packed,
    positions,
)


@pytest.mark.parametrize(
    "attend",
    [
        pytest.param(lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m.expand(-1, 2, -1, -1)), id="expand"),
        pytest.param(lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m[..., : k.shape[2]]), id="slice"),
        pytest.param(
            lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, torch.where(m, 0.0, -torch.inf).double()),
            id="numbers",
        ),
        pytest.param(lambda q, k, v, m: ((q @ k.mT / 4).masked_fill(~m, -torch.inf).softmax(-1)) @ v, id="written out"),
        pytest.param(
            lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m & (distances(q[0, :, :, 0]) < 4)),
            id="a window more",
        ),
        pytest.param(
            lambda q, k, v, m: checkpoint(lambda *a: attention(*a).sin(), q, k, v, m, use_reentrant=False),
            id="in a checkpoint",
        ),
    ],
)
def test_attention_in_other_forms(attend):
    assert Between(attend=attend).run() == ["packed"]


def test_rows_and_grouped_heads():
    given = torch.cat([positions(), positions((3, 9))])
    assert Between().run(given, operands(rows=2)) == ["packed"]
    grouped = Between(attend=lambda *args: F.scaled_dot_product_attention(*args, enable_gqa=True))
    assert grouped.run(given, operands(rows=2, heads=4, key_heads=2)) == ["packed"]


def test_one_mask_for_all_rows():
    assert Between().run(positions(), operands(rows=3)) == ["packed"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("autocast", [False, True])
def test_narrow_dtypes(dtype, autocast):
    between = Between()
    tensors = [t.detach().to(torch.float32 if autocast else dtype) for t in operands()]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), torch.no_grad():
        make, attend = between.compiled
        got, want = attend(*tensors, make(positions())), attention(*tensors, packed(positions()))
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    assert between.reports()[-1].counts["packed"] == 1


def test_a_mask_that_is_written_where_it_is_used_is_read():
    def attend(q, k, v, mask):
        mask[..., 0] = True
        return attention(q, k, v, mask)

    assert Between(attend=attend).run() == ["listed"]


class _AsOnAGpu:
    """Operators of glue, with the offsets that varlen attention takes on a GPU: their number is a value."""

    def __getattr__(self, name):
        return getattr(torch.ops.glue, "exact_document_offsets" if name == "document_offsets" else name)


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_exact_offsets_are_computed_once_for_all_calls(compiler, monkeypatch):
    monkeypatch.setattr(rewrite, "_glue", _AsOnAGpu())
    monkeypatch.setattr(attention_choice, "_cpu_reason", lambda compiler: None)
    computed, original = [], torch.ops.glue.exact_document_offsets.default

    def attend(q, k, v, mask):
        return checkpoint(lambda *a: attention(*a).sin(), q, q.sin(), q.cos(), mask, use_reentrant=False)

    between = Between(attend=attend, compiler=compiler)
    compute = batch_memo._compute
    monkeypatch.setattr(batch_memo, "_compute", lambda *args: computed.append(args) or compute(*args))
    for number, lengths in enumerate(((5, 1, 6), (9, 8), (1, 2, 3), (4,))):
        forms = between.run(positions(lengths), calls=4)
        assert forms == (["packed"] if number < 2 else [])
        assert len(computed) == number + 1
    prologues = [p.prologue.graph for p in between.reports("memoize_metadata") if p.prologue]
    assert len(prologues) == 2
    assert all(len(gm.graph.find_nodes(op="call_function", target=original)) == 1 for gm in prologues)


def test_a_mask_that_is_written_behind_the_attention_is_known_in_front_of_it():
    def attend(q, k, v, mask):
        first = attention(q, k, v, mask)
        mask[..., 0] = True
        return first + attention(v, k, q, mask)

    between = Between(attend=attend)
    for lengths in ((5, 1, 6), (2, 10)):
        between.run(positions(lengths))
    (report,) = (report for report in between.reports() if report.changed)
    assert {form: report.counts[form] for form in ("packed", "listed")} == {"packed": 1, "listed": 1}
