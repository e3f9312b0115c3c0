"""expert_sort: the order of the loop, without the loop."""

from __future__ import annotations

import pytest
import torch

from glue_compiler.ops import expert_sort


def test_rows_of_one_expert_come_in_the_order_of_the_loop(routing):
    order, _, counts, offsets = expert_sort(routing.ids, routing.num_experts)
    top_k = routing.ids.shape[1]
    for expert in range(routing.num_experts):
        position, token = routing.rows_of(expert)
        end = int(offsets[expert])
        slots = order[end - int(counts[expert]) : end]
        assert torch.equal(slots.long(), token * top_k + position)


def test_k_major_is_a_stable_sort_of_the_transposed_ids(routing):
    tokens, top_k = routing.ids.shape
    keys = torch.where((routing.ids < 0) | (routing.ids >= routing.num_experts), routing.num_experts, routing.ids)
    walk = keys.t().reshape(-1).argsort(stable=True)
    expected = walk % max(tokens, 1) * top_k + walk // max(tokens, 1)
    assert torch.equal(expert_sort(routing.ids, routing.num_experts)[0].long(), expected)


def test_token_major_is_a_stable_sort_of_the_ids(routing):
    keys = torch.where((routing.ids < 0) | (routing.ids >= routing.num_experts), routing.num_experts, routing.ids)
    order = expert_sort(routing.ids, routing.num_experts, False)[0]
    assert torch.equal(order.long(), keys.reshape(-1).argsort(stable=True))


@pytest.mark.parametrize("k_major", [True, False])
def test_inverse_undoes_order(routing, k_major):
    order, inverse, _, _ = expert_sort(routing.ids, routing.num_experts, k_major)
    assert torch.equal(inverse[order.long()].long(), torch.arange(order.numel(), device=order.device))


def test_counts_and_offsets_leave_sentinels_out(routing):
    _, _, counts, offsets = expert_sort(routing.ids, routing.num_experts)
    assert torch.equal(offsets, routing.offsets())
    belongs = (routing.ids >= 0) & (routing.ids < routing.num_experts)
    assert int(counts.sum()) == int(belongs.sum())


def test_results_are_int32_and_strides_of_the_ids_do_not_matter(ragged):
    expected = expert_sort(ragged.ids, ragged.num_experts)
    assert all(result.dtype == torch.int32 for result in expected)
    transposed = ragged.ids.t().contiguous().t()
    every_second = torch.stack([ragged.ids, ragged.ids + 7], dim=-1)[..., 0]
    for ids in (transposed, every_second, ragged.ids.int()):
        assert all(map(torch.equal, expert_sort(ids, ragged.num_experts), expected))


def test_a_vector_of_ids_is_one_slot_per_token(ragged):
    ids = ragged.ids[:, 0]
    assert all(map(torch.equal, expert_sort(ids, 5), expert_sort(ids.unsqueeze(1), 5)))


def test_an_expert_chosen_twice_by_a_token_gets_two_rows(device):
    ids = torch.tensor([[2, 2], [0, 2]], device=device)
    order, _, counts, _ = expert_sort(ids, 3)
    assert counts.tolist() == [1, 0, 3]
    assert order.tolist() == [2, 0, 1, 3]  # expert 2: first positions first


def test_many_slots_and_experts_cross_every_block(device):
    ids = torch.randint(0, 300, (2500, 4), device=device)
    keys = ids.t().reshape(-1)
    walk = keys.argsort(stable=True)
    order, _, counts, _ = expert_sort(ids, 300)
    assert torch.equal(order.long(), walk % 2500 * 4 + walk // 2500)
    assert torch.equal(counts.long(), torch.stack([(keys == expert).sum() for expert in range(300)]))


def test_wrong_arguments_are_value_errors(device):
    ids = torch.zeros(4, 2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="num_experts must be at least 1"):
        expert_sort(ids, 0)
    with pytest.raises(ValueError, match="int32 or int64"):
        expert_sort(ids.float(), 2)
    with pytest.raises(ValueError, match="dims"):
        expert_sort(ids[None], 2)


def test_opcheck(ragged):
    torch.library.opcheck(expert_sort, (ragged.ids, ragged.num_experts))
    torch.library.opcheck(expert_sort, (ragged.ids[:, 0], ragged.num_experts, False))
