"""What is known of a mask between two graphs, and when that ends."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from glue_compiler.backend import GlueBackend
from glue_compiler.compat import branch_guards, graph_inputs
from glue_compiler.handoff.masks import look_at_masks
from glue_compiler.ops import batch_memo
from glue_compiler.verify.replay import replay
from tests.handoff.two_graphs import (
    Between,
    attention,
    causal,
    operands,
    packed,
    packed_window,
    positions,
)


def test_offsets_are_computed_once_for_all_calls(monkeypatch):
    between = Between()
    computed = []
    original = batch_memo._compute
    monkeypatch.setattr(batch_memo, "_compute", lambda *args: computed.append(args) or original(*args))
    assert between.run(calls=5) == ["packed"]
    assert len(computed) == 1
    assert between.run(positions((4, 4, 4)), calls=5) == []
    assert len(computed) == 2


def test_lengths_that_vary_take_two_compiles():
    between = Between(attend=lambda q, k, v, mask: attention(q, q.sin(), q.cos(), mask))
    assert between.run() == ["packed"]
    assert between.run(positions((9, 8))) == ["packed"]
    for lengths in ((3, 3), (20,), (1, 1, 1), (7, 7)):
        assert between.run(positions(lengths)) == []


def added(given):
    return torch.where(packed(given), torch.zeros((), dtype=torch.float64), torch.finfo(torch.float64).min)


def written_out(q, k, v, mask):
    return ((q @ k.mT) / 4 + mask[:, :, :, : k.shape[-2]]).softmax(-1) @ v


def test_a_mask_that_is_added_to_scores():
    between = Between(added, lambda q, k, v, mask: written_out(q, q.sin(), q.cos(), mask))
    assert between.run() == ["packed"]
    assert between.run(positions((9, 8))) == ["packed"]
    assert between.run(positions((3, 3))) == []
    assert between.run(change=lambda mask: mask * 1.0) == ["listed"]
    assert between.run(change=lambda mask: mask[0, 0, 7].fill_(0.0) is None or mask) == []


def test_evaluation_between_steps():
    between = Between()
    between.run()
    with torch.no_grad():
        assert between.run() == ["packed"]
        assert between.run(positions((6, 6))) == []
    assert between.run() == []
    with torch.inference_mode():  # such a mask has no version counter
        assert between.run() == ["listed"]
    assert between.run() == []


def written(mask):
    mask[0, 0, 7, 2] = True
    return mask


def written_past_its_documents(mask):
    mask.fill_(True)
    return mask


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(written, id="written"),
        pytest.param(written_past_its_documents, id="filled"),
        pytest.param(lambda mask: mask.clone(), id="a copy"),
        pytest.param(lambda mask: packed(positions()), id="an equal one"),
        pytest.param(lambda mask: torch.rand_like(mask, dtype=torch.float) < 2, id="another one"),
        pytest.param(lambda mask: mask[:, :1], id="a view"),
        pytest.param(lambda mask: mask.mT, id="transposed"),
        pytest.param(lambda mask: mask.flip(-1).flip(-2), id="computed"),
        pytest.param(lambda mask: mask.tril(-1) | torch.eye(12, dtype=torch.bool), id="computed from it"),
    ],
)
def test_a_mask_that_was_changed_is_read(change):
    between = Between()
    assert between.run(change=change) == ["listed"]
    assert between.run() == ["packed"]
    assert between.run(change=change) == []
    assert between.run() == []


def test_a_mask_that_is_written_after_it_was_used_is_the_one_that_was_used():
    between = Between()
    make, attend = between.compiled
    tensors, mask = operands(), make(positions())
    out = attend(*tensors, mask)
    mask.fill_(True)
    got = torch.autograd.grad(out.sum(), tensors)
    want = torch.autograd.grad(attention(*tensors, packed(positions())).sum(), tensors)
    torch.testing.assert_close(got, want)


def test_the_pass_that_is_off_says_and_uses_nothing():
    off = Between(passes={"specialize_attention": False})
    assert off.run() == []
    mask = off.compiled[0](positions())
    on = Between()
    on.compiled[1](*operands(), mask)
    assert on.reports()[-1].counts["listed"] == 1


def test_without_guards_masks_are_read(monkeypatch):
    monkeypatch.setattr(branch_guards, "BRANCHES", SimpleNamespace(is_available=lambda: False))
    assert Between().run() == ["listed"]


def test_a_recomputation_finds_what_the_forward_found():
    between = Between(attend=lambda *args: attention(*args).sin())
    compiled = between.compiled[1]
    between.compiled[1] = lambda *args: checkpoint(compiled, *args, use_reentrant=False)
    assert between.run() == ["packed"]
    assert between.run(positions((4, 8))) == []


def test_a_reentrant_recomputation_reads_the_mask_which_it_gets_as_an_alias():
    between = Between(attend=lambda *args: attention(*args).sin())
    compiled = between.compiled[1]
    between.compiled[1] = lambda *args: checkpoint(compiled, *args, use_reentrant=True)
    assert between.run() == ["packed", "listed"]


def test_a_recomputation_with_a_mask_that_was_written_is_an_error():
    make, attend = Between().compiled
    tensors, mask = operands(), make(positions())
    out = checkpoint(attend, *tensors, mask, use_reentrant=False)
    mask.fill_(True)
    with pytest.raises(RuntimeError):
        out.sum().backward()


def test_two_backends_and_two_masks():
    one, other = Between(packed), Between(packed_window)
    masks = [each.compiled[0](positions()) for each in (one, other)]
    tensors = operands()
    for each in (one, other):
        for mask, make in zip(masks, (packed, packed_window), strict=True):
            torch.testing.assert_close(each.compiled[1](*tensors, mask), attention(*tensors, make(positions())))
        assert [p.counts["packed"] for p in each.reports() if p.changed] == [1, 1]


@pytest.mark.slow
def test_threads():
    between = Between(attend=lambda q, k, v, mask: attention(q, q.sin(), q.cos(), mask))
    for given in (positions(), positions((9, 8))):  # torch's compiles are not for several threads at once
        between.run(given)
        between.run(given, change=lambda mask: mask.fill_(True))
    make, attend = between.compiled
    compiles, failures = len(between.session.graphs), []

    def work(seed):
        try:
            for step in range(20):
                given = positions((2 + (seed + step) % 7, 3, 4 + seed))
                tensors, mask = operands(given.shape[1]), make(given)
                if step % 4 == 3:
                    mask.fill_(True)
                want = between.functions[1](*tensors, mask)
                torch.testing.assert_close(attend(*tensors, mask), want, rtol=1e-10, atol=1e-12)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(between.session.graphs) == compiles


@pytest.mark.parametrize("make", [causal, packed_window, added])
def test_a_dump_runs_on_a_mask_that_shows_what_the_graph_knows(make, tmp_path):
    options = {"compiler": "aot_eager", "dump": str(tmp_path)}
    call = torch.compile(attention, backend=GlueBackend(), options=options)
    call(*operands(), Between(make).compiled[0](positions()))
    (file,) = tmp_path.glob("*/*specialize_attention.after.py")
    (found,) = replay(file)
    assert found.is_compared
    assert not found.differences


def test_a_piece_of_a_graph_is_told_nothing():
    """The DDP optimizer splits what Dynamo captured, and an earlier piece may have written the mask."""
    seen = []

    def in_pieces(gm, inputs):
        for node in gm.graph.find_nodes(op="placeholder")[:1]:
            graph_inputs.set_sourceless(node)
        seen.append(look_at_masks(gm))
        return gm.forward

    mask = Between().compiled[0](positions())
    torch.compile(attention, backend=in_pieces)(*operands(), mask)
    assert seen == [{}]
