"""LoRA on a base of 4 bits a weight that FSDP2 shards: ranks learn what one eager process learns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")
pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")

from tests.distributed.engines import fsdp
from tests.distributed.training import Compiles, batches_of, counts_of

pytestmark = [pytest.mark.slow, pytest.mark.stack]

LAYERS, STEPS = 4, 3


def adapted(folder: str, checkpoints: bool) -> Any:
    import peft
    import transformers

    # FSDP2 shards floating weights: four bits are stored as what is trained.
    four_bits = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_quant_storage=torch.float32,
    )
    base = transformers.LlamaForCausalLM.from_pretrained(folder, quantization_config=four_bits, device_map="cpu")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    model = peft.get_peft_model(base, config).train()
    if checkpoints:
        base.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def learned(model: Any, call: Any, ranks: list[int]) -> list[torch.Tensor]:
    """The loss and all gradients of each step on the batches of ``ranks``, of all ranks where they train together."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.5)
    found = []
    for step in range(STEPS):
        tokens = sum((batches_of(rank, step, 1)[0]["labels"] >= 0).sum() for rank in range(2))
        total = torch.zeros(())
        for rank in ranks:
            loss = call(**batches_of(rank, step, 1)[0], num_items_in_batch=tokens).loss
            (loss * (2 // len(ranks))).backward()
            total += loss.detach()
        if len(ranks) == 1:
            dist.all_reduce(total)
        whole = [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in (p.grad for p in trained)]
        found += [total, torch.cat([grad.flatten() for grad in whole])]
        optimizer.step()
        optimizer.zero_grad()
    return found


def trains(folder: str, compiled: str, regions: str, checkpoints: bool) -> tuple[dict[str, int], str]:
    model = adapted(folder, checkpoints)
    expected = learned(model, model, [0, 1])
    compiles = Compiles({"compiler": "aot_eager", "regions": regions}, None)
    model = adapted(folder, checkpoints)
    model.model.layers = model.get_base_model().model.layers  # where engines look for them
    call = fsdp(compiled).prepare(model, compiles)
    assert all(hasattr(weight, "full_tensor") for weight in model.parameters())
    torch.testing.assert_close(learned(model, call, [dist.get_rank()]), expected, rtol=1e-4, atol=1e-6)
    return counts_of(compiles.session), str(compiles.session.capture_events)


@pytest.mark.parametrize(
    ("compiled", "regions", "checkpoints"),
    [
        ("before", "whole", False),
        ("after", "auto", False),
        ("layers", "whole", False),
        ("after", "auto", True),
        ("layers", "auto", True),
        ("layers", "whole", True),
    ],
)
def test_adapters_on_a_sharded_base(two_ranks, tmp_path, compiled, regions, checkpoints):
    """bitsandbytes makes a weight of its own of what FSDP2 gathered, at which every backend's graph ends."""
    from tests.stacks.tiny import causal_model

    causal_model(hidden_size=64, intermediate_size=64, num_hidden_layers=LAYERS).save_pretrained(tmp_path)
    is_eager = checkpoints and regions == "whole"  # as all that torch finds in such a checkpoint
    for counts, events in two_ranks.run(trains, str(tmp_path), compiled, regions, checkpoints):
        attentions = counts.get("specialize_attention.packed", 0) + counts.get("specialize_attention.listed", 0)
        assert (attentions == 0) == is_eager
        assert ("a graph ends in the body of a checkpoint" in events) == is_eager
        assert (counts.get("chunk_loss.losses", 0) > 0) == (compiled != "layers")
