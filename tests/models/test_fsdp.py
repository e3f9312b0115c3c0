"""FSDP2 on two processes of a CPU, layers compiled one by one: their mask is an input, and is read."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

transformers = pytest.importorskip("transformers")

LENGTHS = (7, 20, 3)


def tiny():
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 64, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**shape, **heads, use_cache=False, attn_implementation="sdpa")
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).double()


def batches(rank: int):
    generator = torch.Generator().manual_seed(rank)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    for _ in range(3):
        ids = torch.randint(64, positions.shape, generator=generator)
        yield {"input_ids": ids, "position_ids": positions, "labels": ids}


def trained(model, rank: int) -> list[torch.Tensor]:
    """Losses of three steps, then all parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for batch in batches(rank):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return [*found, *(each.detach() for each in model.parameters())]


def worker(rank: int, folder) -> None:
    from torch.distributed.fsdp import fully_shard

    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=200))
    mesh = dist.init_device_mesh("cpu", (2,))
    found = []
    for compiles in (False, True):
        torch._dynamo.reset()
        model = tiny()
        dump = f"{folder}/dump{rank}"
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
            if compiles:
                layer.compile(backend="glue", options={"compiler": "aot_eager", "dump": dump})
        fully_shard(model, mesh=mesh)
        found.append([each.to_local() if hasattr(each, "to_local") else each for each in trained(model, rank)])
    for got, want in zip(*reversed(found), strict=True):
        torch.testing.assert_close(got, want)
    (folder / f"rank{rank}").write_text("as eager")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_layers_of_two_processes(tmp_path):
    torch.multiprocessing.spawn(worker, (tmp_path,), nprocs=2, daemon=True)
    for rank in range(2):
        assert (tmp_path / f"rank{rank}").read_text() == "as eager"
        (summary,) = (json.loads(path.read_text()) for path in (tmp_path / f"dump{rank}").rglob("summary.json"))
        passes = [each for graph in summary["graphs"] for each in graph["passes"]]
        found = [each["counts"].get("listed") for each in passes if each["name"] == "specialize_attention"]
        assert set(found) == {1}
