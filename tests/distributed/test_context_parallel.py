"""Ranks that divide a row's tokens: attention goes around a ring, and glue leaves it to torch.

Under ``context_parallel`` sdpa has tensors that hold a part of all tokens. A kernel of glue's in its place would attend
to the keys of one rank alone.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear

pytest.importorskip("transformers")

from tests.distributed.rings import divided
from tests.distributed.training import Compiles, counts_of
from tests.models.training import VOCABULARY, tiny

pytestmark = pytest.mark.slow

LENGTHS = 16, 24, 32, 16
LAYERS = 5


def without_masks(model: nn.Module) -> nn.Module:
    """As accelerate does for ``cp_size``: torch's rings know causal attention alone."""

    def causal(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "attention_mask": None, "is_causal": True}

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(causal, with_kwargs=True)
    return model


def batch(length: int) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(length))
    labels = torch.cat([ids[:, 1:], torch.full((2, 1), -100)], dim=1)
    return {
        "input_ids": ids,
        "position_ids": torch.arange(length).repeat(2, 1),
        "shift_labels": labels,
        "labels": labels,
    }


def trains(compiled: str, options: dict[str, Any], checkpoints: bool) -> tuple[dict[str, int], int]:
    """A model on two halves of each row, beside one in eager mode that has whole rows."""
    mesh = dist.init_device_mesh("cpu", (2,))
    compiles = Compiles({"compiler": "aot_eager", **options}, None)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(tiny("qwen3", num_hidden_layers=LAYERS))
    whole, model = models[0], without_masks(models[1])
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.model.layers:
        if compiled == "layers":
            compiles.in_place(layer)
        fully_shard(layer, mesh=mesh)
    if compiled == "whole":
        compiles.in_place(model)
    fully_shard(model, mesh=mesh)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in models]
    for length in LENGTHS:
        inputs = batch(length)
        tokens = (inputs["labels"] >= 0).sum()
        want = whole(**inputs, num_items_in_batch=tokens).loss
        want.backward()
        halves = {name: tensor.clone() for name, tensor in inputs.items()}
        with divided(mesh, list(halves.values())):
            assert halves["input_ids"].shape == (2, length // 2)
            got = model(**halves, num_items_in_batch=tokens).loss
            (2 * got).backward()  # FSDP2 takes the mean over ranks
        got = got.detach()
        dist.all_reduce(got)
        torch.testing.assert_close(got, want.detach())
        for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-8, atol=1e-10)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return counts_of(compiles.session), len(compiles.session.graphs)


@pytest.mark.parametrize("checkpoints", [False, True], ids=["saved", "checkpointed"])
@pytest.mark.parametrize(
    ("compiled", "options"), [("whole", {}), ("whole", {"regions": "auto"}), ("layers", {})], ids=str
)
def test_a_model_whose_tokens_are_divided(two_ranks, compiled, options, checkpoints):
    for counts, graphs in two_ranks.run(trains, compiled, options, checkpoints):
        assert graphs > 0
        assert not any(name.startswith("specialize_attention") and count for name, count in counts.items()), counts
        assert counts.get("chunk_loss.losses", 0) == (2 if compiled == "whole" else 0)


class Attention(nn.Module):
    def __init__(self, masked: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(48, 16, generator=generator, dtype=torch.float64) / 3)
        self.masked = masked

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        mask = (positions[:, :, None] >= positions[:, None])[:, None] if self.masked else None
        q, k, v = linear(x, self.weight).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=not self.masked)


def divided_heads() -> str:
    """Documents in a mask, and heads that ranks divide; why glue leaves attention as it is."""
    mesh, rank = dist.init_device_mesh("cpu", (2,)), dist.get_rank()
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(3, 1, 4, 16, 8, generator=generator, dtype=torch.float64)
    positions = torch.arange(16).remainder(6)[None]

    def attend(parts: Tensor, positions: Tensor, *placements: Any) -> Tensor:
        documents = (positions == 0).cumsum(-1)
        mask = (documents[:, :, None] == documents[:, None]).tril()[:, None]
        if placements:
            mask = DTensor.from_local(mask, mesh, [Replicate()])
        operands = [DTensor.from_local(part, mesh, placements) if placements else part for part in parts]
        return torch.nn.functional.scaled_dot_product_attention(*operands, mask)

    compiles = Compiles({"compiler": "aot_eager"}, None)
    with sdpa_kernel(SDPBackend.MATH):
        found = compiles(attend)(whole.chunk(2, dim=2)[rank], positions, Shard(1))
        torch.testing.assert_close(found.to_local(), attend(whole, positions).chunk(2, dim=1)[rank])
    return str([report.skips for graph in compiles.session.graphs for report in graph.passes])


def test_attention_of_tensors_that_ranks_divide_is_left(two_ranks):
    for skips in two_ranks.run(divided_heads):
        assert "query, key and value are not plain tensors" in skips


def attends(first: str, dynamic: bool | None) -> None:
    """Once inside of the context and once outside; whole rows, and rows as long as a rank's part."""
    mesh, module = dist.init_device_mesh("cpu", (2,)), Attention(masked=False)
    call = Compiles({"compiler": "aot_eager"}, dynamic)(module)
    x = torch.randn(1, 16, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    positions = torch.arange(16)[None]
    want = module(x, positions)

    def inside() -> None:
        parts = [x.clone(), positions.clone()]
        with divided(mesh, parts):
            torch.testing.assert_close(call(*parts), want[:, :, parts[1][0]])

    def outside() -> None:
        for length in (8, 16):
            torch.testing.assert_close(call(x[:, :length], positions[:, :length]), want[:, :, :length])

    for each in (inside, outside, inside) if first == "inside" else (outside, inside, outside):
        each()


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("first", ["inside", "outside"])
def test_what_was_compiled_outside_is_not_run_inside(two_ranks, first, dynamic):
    two_ranks.run(attends, first, dynamic)


def is_refused(compiles: bool) -> bool:
    mesh, module = dist.init_device_mesh("cpu", (2,)), Attention(masked=True)
    call = Compiles({"compiler": "aot_eager"}, None)(module) if compiles else module
    parts = [torch.ones(1, 16, 16, dtype=torch.float64), torch.arange(16)[None].clone()]
    with contextlib.suppress(RuntimeError), divided(mesh, parts):
        call(*parts)
        return False
    return True


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "glue"])
def test_a_mask_of_one_rank_is_refused_by_torch(two_ranks, compiles):
    """It shows no keys of others: glue, which would see that it is causal here, is not asked."""
    assert two_ranks.run(is_refused, compiles) == [True, True]
