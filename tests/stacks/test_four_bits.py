"""LoRA on a base of 4 bits a weight, prepared as for checkpoints: one graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.stacks.tiny import LAYERS, causal_model, token_rows, transformers

peft = pytest.importorskip("peft")

pytestmark = [pytest.mark.slow, pytest.mark.stack]


def bitsandbytes_base(folder: Any) -> Any:
    pytest.importorskip("bitsandbytes")
    causal_model(hidden_size=64, intermediate_size=64).save_pretrained(folder)
    four_bits = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_use_double_quant=True,  # its scales are made in place
    )
    return transformers.LlamaForCausalLM.from_pretrained(folder, quantization_config=four_bits, device_map="cpu")


def torchao_base(folder: Any) -> Any:
    quantization = pytest.importorskip("torchao.quantization")
    model = causal_model(hidden_size=64, intermediate_size=64)
    config = quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=quantization.PerGroup(32))
    quantization.quantize_(model.model.layers, config)
    return model


def packed_rows() -> Any:
    return torch.utils.data.DataLoader(
        token_rows(16), batch_size=4, collate_fn=transformers.DataCollatorWithFlattening()
    )


def completions_of_prompts() -> Any:
    """Four to a prompt, padded."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        ids = torch.randint(3, 50, (8, 20), generator=generator)
        ids[:, :12] = ids[:2, :12].repeat(4, 1)
        mask = (torch.arange(20) < torch.randint(13, 21, (8, 1), generator=generator)).long()
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, :12] = -100
        yield {"input_ids": ids, "attention_mask": mask, "labels": labels}


def losses(model: Any, call: Any, batches: Any) -> torch.Tensor:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    found = []
    for batch in batches:
        loss = call(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return torch.tensor(found)


def adapted(base: Any, folder: Any) -> Any:
    torch._dynamo.reset()
    model = base(folder)
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(peft.prepare_model_for_kbit_training(model), config).train()


@pytest.mark.parametrize("base", [bitsandbytes_base, torchao_base])
def test_adapters_on_a_quantized_base(tmp_path, report, base):
    model = adapted(base, tmp_path)
    expected = losses(model, model, packed_rows())
    model = adapted(base, tmp_path)
    actual = losses(model, torch.compile(model, backend="glue"), packed_rows())
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=0)
    report.assert_attention("packed", LAYERS, compiles=2)


def test_prompts_are_computed_once_on_a_quantized_base(tmp_path, report):
    model = adapted(bitsandbytes_base, tmp_path)
    expected = losses(model, model, completions_of_prompts())
    model = adapted(bitsandbytes_base, tmp_path)
    options = {"padding": "drop", "prefix": "share"}
    actual = losses(model, torch.compile(model, backend="glue", options=options), completions_of_prompts())
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=0)
    assert any(counts.get("shared_prefixes") for counts in report.counts("drop_padding"))
