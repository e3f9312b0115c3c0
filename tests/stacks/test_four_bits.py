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


def losses(model: Any, call: Any) -> torch.Tensor:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    batches = torch.utils.data.DataLoader(
        token_rows(16), batch_size=4, collate_fn=transformers.DataCollatorWithFlattening()
    )
    found = []
    for batch in batches:
        loss = call(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return torch.tensor(found)


@pytest.mark.parametrize("base", [bitsandbytes_base, torchao_base])
def test_adapters_on_a_quantized_base(tmp_path, report, base):
    def adapted() -> Any:
        torch._dynamo.reset()
        model = base(tmp_path)
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
        return peft.get_peft_model(peft.prepare_model_for_kbit_training(model), config).train()

    model = adapted()
    expected = losses(model, model)
    model = adapted()
    actual = losses(model, torch.compile(model, backend="glue"))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=0)
    report.assert_attention("packed", LAYERS, compiles=2)
