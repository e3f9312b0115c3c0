"""Other libraries in the whole-step benchmark: what they are given of a row, and what a missing package says."""

import importlib.util
import json
import math
import subprocess
import sys
from functools import partial

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import end_to_end_rows, peer_torchtitan, peer_torchtune, peer_unsloth
from benchmarks.end_to_end_flops import step_flops
from benchmarks.end_to_end_rows import ROWS, Row, Size
from benchmarks.end_to_end_variants import VARIANTS, variant_of
from benchmarks.peers import (
    Adapters,
    adapters_of,
    base_of,
    checkpoint_of,
    published,
    targets_of,
    with_experts_apart,
    with_lengths,
)

TINY = Size(tokens=160, least=130, layers=None, is_tiny=True)
PEERS = {"torchtune": peer_torchtune, "torchtitan": peer_torchtitan, "unsloth": peer_unsloth}


def needs(*packages):
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


def batch_of(workload):
    return workload.batch(TINY.tokens, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("variant", [name for name, each in VARIANTS.items() if each.peer])
def test_a_peer_without_its_package_says_which_and_how_to_get_it(variant, monkeypatch):
    package = variant.partition("-")[0]
    monkeypatch.setattr(peer_unsloth, "SETTINGS", {})
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    with pytest.raises(ImportError) as raised:
        variant_of(variant).workload("qwen3-bf16", TINY, "cpu", "aot_eager")
    message = str(raised.value)
    assert message.startswith(f"{package} cannot be imported (ModuleNotFoundError")
    assert message.endswith(PEERS[package].HOW)
    assert "\n" not in message


def test_a_row_that_a_peer_does_not_have_is_an_error_that_names_those_it_has():
    for name, peer in PEERS.items():
        assert set(peer.TRAINED) <= set(ROWS)
        with pytest.raises(ValueError, match=f"{name} has no row 'gemma3-1b' here; it has qwen3-bf16, "):
            published(name, "gemma3-1b", peer.TRAINED, TINY, "meta")


@pytest.mark.parametrize(
    ("row", "targets"),
    [
        ("llama-lora", {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("qwen3-8b-lora", {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        ("qwen3-bf16", None),
    ],
)
def test_a_checkpoint_of_a_row_makes_its_model_again(row, targets):
    if targets:
        pytest.importorskip("peft")
    workload = published("a peer", row, ROWS, TINY, "cpu")
    assert adapters_of(workload) == (Adapters(16, 8, frozenset(targets)) if targets else None)
    weights = checkpoint_of(workload)
    torch.manual_seed(1)
    again = type(base_of(workload))(workload.config).to(torch.bfloat16)
    missing, unexpected = again.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"] if workload.config.tie_word_embeddings else [], [])
    batch = batch_of(workload)
    assert again(**batch).loss.item() == pytest.approx(workload.model(**batch).loss.item(), rel=1e-3)


def test_experts_that_are_stacked_are_given_as_they_are_published():
    workload = published("a peer", "qwen3-moe", ROWS, TINY, "cpu")
    config, weights = workload.config, checkpoint_of(workload)
    experts, inner, hidden = config.num_experts, config.moe_intermediate_size, config.hidden_size
    apart = with_experts_apart(weights)
    assert sum(each.numel() for each in apart.values()) == sum(each.numel() for each in weights.values())
    mlp = "model.layers.1.mlp"
    kinds = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    assert {name: tuple(each.shape) for name, each in apart.items() if f"{mlp}.experts" in name} == {
        f"{mlp}.experts.{place}.{kind}.weight": shape for place in range(experts) for kind, shape in kinds.items()
    }
    stacked = workload.model.model.layers[1].mlp.experts.gate_up_proj
    halves = [apart[f"{mlp}.experts.3.{kind}.weight"] for kind in ("gate_proj", "up_proj")]
    assert torch.equal(torch.cat(halves), stacked[3])
    dense = checkpoint_of(published("a peer", "qwen3-bf16", ROWS, TINY, "cpu"))
    assert with_experts_apart(dense) == dense


def test_lengths_and_targets_are_those_of_the_documents():
    workload = ROWS["qwen3-bf16"].build(TINY, "cpu", "sdpa")
    batch = batch_of(workload)
    found = batch_of(end_to_end_rows.replace(workload, batch=with_lengths(workload.batch)))
    lengths = found.pop("lengths")
    assert lengths.dtype == torch.int32
    assert torch.equal(torch.cat([torch.arange(int(each)) for each in lengths])[None], batch["position_ids"])
    assert all(torch.equal(found[name], batch[name]) for name in batch)
    labels = torch.tensor([[-100, 5, 6, -100, 8]])
    assert targets_of(labels).tolist() == [[5, 6, -100, 8, -100]]


def test_operations_are_those_of_the_row_whatever_a_peer_trains():
    workload = published("a peer", "qwen3-bf16", ROWS, TINY, "meta")
    of_peer = end_to_end_rows.replace(workload, model=torch.nn.Linear(2, 2))
    assert step_flops(of_peer, [TINY.tokens]) == step_flops(
        ROWS["qwen3-bf16"].build(TINY, "meta", "sdpa"), [TINY.tokens]
    )


def trained(workload, call):
    """Loss, and the gradients' norm: the same however their weights are arranged."""
    with workload.around():
        loss = call(**batch_of(workload)).loss
    loss.backward()
    gradients = [weight.grad for weight in workload.model.parameters() if weight.requires_grad]
    return loss.item(), math.sqrt(sum(float(each.double().square().sum()) for each in gradients))


@needs("torchtune")
@pytest.mark.slow
@pytest.mark.parametrize(("row", "family"), [("qwen3-bf16", "qwen3"), ("llama-lora", "llama")])
def test_torchtune_has_the_loss_and_the_gradients_of_the_row(row, family, monkeypatch):
    """In fp32, all weights trained; without a GPU its mask is a dense one."""

    def build(size, device, attention):
        return end_to_end_rows._packed(
            end_to_end_rows._causal_model(family, size, device, attention, torch.float32), device
        )

    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "")  # put back at the end
    monkeypatch.setitem(ROWS, row, Row(build))
    torch.manual_seed(0)
    expected = ROWS[row].build(TINY, "cpu", "sdpa")
    torch.manual_seed(0)
    actual = peer_torchtune.build(row, TINY, "cpu", "aot_eager")
    assert all(layer._compiled_call_impl is not None for layer in actual.layers)
    assert trained(actual, actual.model) == pytest.approx(trained(expected, expected.model), rel=1e-4)


def counted(ids, bins, min, max):
    """torch.histc, which counts no integers on a CPU."""
    return (ids[:, None] == torch.arange(bins)).sum(0)


def dense_flex_attention(query, key, value, block_mask, scale, enable_gqa, return_lse):
    """flex_attention with all scores, since on a CPU it has no backward and does not return their sum."""
    from torch.nn.attention.flex_attention import create_mask

    repeats = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(repeats, 1) for each in (key, value))
    length = query.shape[2]
    seen = create_mask(block_mask.mask_mod, 1, 1, length, length, query.device)
    scores = (query @ key.mT * scale).masked_fill(~seen, -math.inf)
    out = scores.softmax(-1) @ value
    return (out, scores.logsumexp(-1)) if return_lse else out


@pytest.fixture
def torchtitan_on_a_cpu(monkeypatch):
    """What torchtitan makes on a GPU alone, and what it asks of one."""
    from torch.nn.attention.flex_attention import create_block_mask

    for family in ("qwen3", "gpt_oss"):
        found = importlib.import_module(f"torchtitan.models.{family}.model.model")
        monkeypatch.setattr(found, "create_attention_mask", partial(create_block_mask, device="cpu"))
    monkeypatch.setattr(torch, "histc", counted)
    with torch._dynamo.config.patch(capture_scalar_outputs=False):  # put back at the end
        yield


@needs("torchtitan", "triton")
@pytest.mark.slow
@pytest.mark.parametrize("row", [name for name in peer_torchtitan.TRAINED if name != "gpt-oss"])
def test_torchtitan_has_the_loss_of_the_row(row, torchtitan_on_a_cpu):
    """Forward alone: flex_attention has no backward on a CPU."""
    torch.manual_seed(0)
    expected = ROWS[row].build(TINY, "cpu", "sdpa")
    torch.manual_seed(0)
    actual = peer_torchtitan.build(row, TINY, "cpu", "aot_eager")
    assert sum(each.numel() for each in actual.model.parameters()) == expected.model.num_parameters()
    with torch.no_grad(), actual.around():
        found = [each.model(**batch_of(each)).loss.item() for each in (actual, expected)]
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    assert found[0] == pytest.approx(math.log(actual.config.vocab_size), rel=0.02)


@needs("torchtitan", "triton")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "family", "settings"),
    [
        ("qwen3-bf16", "qwen3", {}),
        ("qwen3-moe", "qwen3_moe", {"norm_topk_prob": False}),
        ("qwen3-moe", "qwen3_moe", {"norm_topk_prob": True}),
        ("gpt-oss", "gpt_oss", {"num_experts_per_tok": 2}),
    ],
)
def test_torchtitan_has_the_loss_and_the_gradients_of_the_row(row, family, settings, monkeypatch, torchtitan_on_a_cpu):
    """In fp32, with weights so large that routing, sinks and masks count; bf16 has them, which gpt-oss is made in."""
    attention = "eager" if family == "gpt_oss" else "sdpa"

    def build(size, device, _):
        workload = end_to_end_rows._packed(
            end_to_end_rows._causal_model(family, size, device, attention, torch.float32), device
        )
        with torch.no_grad():
            for weight in workload.model.parameters():
                weight.add_(torch.randn_like(weight), alpha=0.1).copy_(weight.bfloat16())
        return end_to_end_rows.replace(workload, batch=whole(workload.batch)) if family == "gpt_oss" else workload

    def whole(batch):
        """One document: over the ends of documents attention goes on, where torchtitan has other positions."""
        return lambda *which: {
            **(made := batch(*which)),
            "position_ids": torch.arange(made["input_ids"].shape[1])[None],
        }

    wrapper = importlib.import_module("torchtitan.models.attention").FlexAttentionWrapper
    monkeypatch.setattr(wrapper, "_compiled_flex_attn", dense_flex_attention)
    monkeypatch.setitem(end_to_end_rows.SHAPES, family, end_to_end_rows.SHAPES[family] | settings)
    monkeypatch.setitem(ROWS, row, Row(build))
    torch.manual_seed(0)
    expected = ROWS[row].build(TINY, "cpu", attention)
    torch.manual_seed(0)
    actual = peer_torchtitan.build(row, TINY, "cpu", "aot_eager")
    assert trained(actual, actual.model.float()) == pytest.approx(trained(expected, expected.model), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("peer", "row"),
    [
        pytest.param("torchtune", "qwen3-8b-lora", marks=needs("torchtune")),
        pytest.param("unsloth", "llama-lora", marks=needs("unsloth")),
        pytest.param("unsloth", "qwen3-bf16", marks=needs("unsloth")),
    ],
)
def test_a_peer_trains_as_eager_does(peer, row, tmp_path):
    """Each in a process of its own: Unsloth patches the one that it is in. Last losses, after twelve steps each."""
    options = [
        "--device",
        "cpu",
        "--compiler",
        "aot_eager",
        "--steps",
        "2",
        "--limit",
        "500",
        "--json",
        str(tmp_path / "made.json"),
    ]
    command = [sys.executable, "-m", "benchmarks.end_to_end", "--cases", f"{row}:{peer},{row}:eager", *options]
    subprocess.run(command, check=True)
    found = {each["variant"]: each for each in json.loads((tmp_path / "made.json").read_text())["results"]}
    assert "failed" not in found[peer], found[peer]
    assert found[peer]["loss"] == pytest.approx(found["eager"]["loss"], rel=3e-4)
    assert found[peer]["warnings"] == 0
