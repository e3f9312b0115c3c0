"""mask_blocks: the lists of blocks are those of the dense mask, and small."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from glue_compiler.ops import mask_blocks
from glue_compiler.ops.document_blocks import BLOCK
from tests.ops.test_masked_attention import boolean_masks


def dense_blocks(counts: Tensor, indices: Tensor) -> Tensor:
    """bool ``[b, h, rows, columns]`` of a list, which is in order and names no block twice."""
    out = torch.zeros(indices.shape, dtype=torch.int32)
    for place in torch.cartesian_prod(*(torch.arange(n) for n in counts.shape)).tolist():
        named = indices[tuple(place)][: counts[tuple(place)]]
        assert named.tolist() == sorted(set(named.tolist()))
        out[(*place, named.long())] += 1
    return out.bool()


@given(
    batch=st.sampled_from([1, 2]),
    heads=st.sampled_from([1, 3]),
    queries=st.integers(1, 400),
    keys=st.integers(1, 400),
    density=st.sampled_from([0.0, 0.00005, 0.5, 0.99995, 1.0]),
    kind=st.sampled_from(["shows", "hides", "added"]),
    empty_rows=st.sampled_from(["zeros", "mean", "nan"]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_lists_are_those_of_the_dense_mask(batch, heads, queries, keys, density, kind, empty_rows, seed):
    generator = torch.Generator().manual_seed(seed)
    shown = torch.rand(batch, heads, queries, keys, generator=generator) < density
    mask = {"shows": shown, "hides": ~shown, "added": torch.zeros(shown.shape).masked_fill(~shown, -1e9)}[kind]
    *lists, empty = mask_blocks(mask, queries, keys, kind, empty_rows)[:9]
    part, full = dense_blocks(*lists[:2]), dense_blocks(*lists[2:4])
    assert torch.equal(dense_blocks(*lists[4:6]), part.transpose(2, 3))
    assert torch.equal(dense_blocks(*lists[6:8]), full.transpose(2, 3))
    assert not (part & full).any()
    visited, unmasked = ((part | full), full)
    rows = torch.arange(queries) // BLOCK
    columns = torch.arange(keys) // BLOCK
    is_visited = visited[:, :, rows][..., columns]
    is_unmasked = unmasked[:, :, rows][..., columns]
    needed = shown
    if kind == "added" or empty_rows == "mean":
        needed = shown | ~shown.any(-1, keepdim=True)
    assert not (needed & ~is_visited).any(), "a key is seen in a block that is left out"
    if kind != "added":
        assert not (is_unmasked & ~shown).any(), "a hidden key is in a block that is seen in full"
        assert torch.equal(empty[..., :queries], ~shown.any(-1))
    else:
        assert not empty.any()
    # Kernels check the ends of the matrix in masked blocks alone.
    assert not full[:, :, queries // BLOCK :].any()
    assert not full[..., keys // BLOCK :].any()


def test_lists_are_small():
    mask = boolean_masks(4096, 4096)["causal"]
    lists = mask_blocks(mask, 4096, 4096, "shows", "zeros")
    assert sum(each.nbytes for each in lists) < 0.01 * mask.nbytes


def test_an_expanded_mask_is_read_once():
    mask = boolean_masks(300, 300)["causal"].expand(2, 4, 300, 300)
    counts, *_ = mask_blocks(mask, 300, 300, "shows", "zeros")
    assert counts.shape == (1, 1, 3)
