"""What ranks do to a batch that layers share: metadata is computed once per batch, and never from another batch.

And a rank that fails, whose reason is told while the others wait for it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

from glue_compiler.report.session import session_for
from tests.distributed.ranks import RankFailed
from tests.models.test_packed_layers import batch, build, reads, step

LENGTHS = (7, 3, 14), (1, 22, 1), (12, 12)


def broadcasts(between_layers: bool) -> list[tuple[int, int]]:
    """Trains on one buffer that each batch is broadcast to, beside eager; reads of positions in other batches."""
    found = []
    models = [build("llama"), build("llama")]
    models[1].load_state_dict(models[0].state_dict())
    model, eager = models
    for layer in model.layers:
        layer.compile(backend="glue", options={"compiler": "aot_eager", "strict": True})
    buffer = batch(24)
    received = torch.empty_like(buffer["position_ids"])

    def receive(lengths: tuple[int, ...]) -> None:
        received.copy_(batch(*lengths)["position_ids"] if dist.get_rank() == 0 else 0)
        before = buffer["position_ids"]._version
        dist.all_reduce(received)
        dist.scatter(buffer["position_ids"], [received] * dist.get_world_size() if dist.get_rank() == 0 else None, 0)
        assert buffer["position_ids"]._version == before  # which is why versions are no proof

    for index, lengths in enumerate(LENGTHS):

        def change(*_: Any, index: int = index) -> None:
            receive(LENGTHS[(index + 1) % len(LENGTHS)])

        results = []
        for each in (eager, model):
            receive(lengths)
            handle = each.layers[1].register_forward_hook(change) if between_layers else None
            results.append(step(each, buffer))
            if handle is not None:
                handle.remove()
        for want, got in zip(*results, strict=True):
            torch.testing.assert_close(got, want)
        receive((index + 2, 22 - index))
        found.append(reads(lambda: model(**buffer)))
    return found


@pytest.mark.slow
def test_a_batch_that_a_collective_writes_in_place_is_read_again(two_ranks):
    """Once for each batch; lengths of a second one are not those of the first."""
    for found in two_ranks.run(broadcasts, False):
        assert found == [(1, 1)] * len(LENGTHS)


@pytest.mark.slow
def test_a_batch_that_a_collective_writes_between_two_layers_is_read_again(two_ranks):
    two_ranks.run(broadcasts, True)


def fails_on_one_rank() -> None:
    """A pass that fails in ``strict`` mode, while the other rank is in a collective."""
    if dist.get_rank() == 1:
        options = {"compiler": "aot_eager", "ofload": "checkpoints"}
        torch.compile(torch.sin, backend="glue", options=options)(torch.ones(3))
    dist.all_reduce(torch.ones(3))


def folder_of_dumps(folder: str) -> str:
    path = session_for(folder).folder
    return str(path.path) if path is not None else ""


@pytest.mark.slow
def test_ranks_of_a_job_without_a_launcher_dump_to_folders_of_their_own(two_ranks, tmp_path):
    """``RANK`` is a launcher's; a program may give torch the ranks by itself."""
    found = two_ranks.run(folder_of_dumps, str(tmp_path))
    assert found == [str(tmp_path / f"rank_{rank}") for rank in range(2)]


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_run_with_its_reason(two_ranks):
    with pytest.raises(RankFailed, match="^rank 1: (?s:.*)unknown option 'ofload'; did you mean 'offload'"):
        two_ranks.run(fails_on_one_rank)
