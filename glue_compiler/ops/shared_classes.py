"""Statistics of logits whose classes ranks share, with DTensor's own moves and gradients."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def whole_rows(rows: Any) -> Tensor:
    """This rank's copy of rows that each has whole, a DTensor; each rank's gradient is one term of a sum."""
    from torch.distributed.tensor import Partial

    local: Tensor = rows.to_local(grad_placements=[Partial()])
    return local


def own_part(weight: Any) -> Tensor:
    """This rank's part of a weight, a DTensor."""
    local: Tensor = weight.to_local()
    return local


def own_bias(bias: Any) -> Tensor:
    """This rank's part of a bias: as it is now, for writes to a DTensor are not seen by what backward reads."""
    local: Tensor = bias.to_local().clone()
    return local


def of_all_ranks(statistics: list[Tensor], like: Any) -> Tensor:
    """``k`` statistics ``[N]`` of this rank as ``[ranks, k, N]`` of all that share the DTensor ``like``: one gather.

    Each rank takes its own part of the gradient, as for logits that are gathered.
    """
    import torch
    from torch.distributed.tensor import DTensor, Replicate, Shard

    own = torch.stack(statistics)[None]
    shared = DTensor.from_local(own, like.device_mesh, [Shard(0)], run_check=False)
    whole: Tensor = shared.redistribute(placements=[Replicate()]).to_local()
    return whole
