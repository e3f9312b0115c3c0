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
from benchmarks.peers import Adapters, adapters_of, base_of, checkpoint_of, published, targets_of, with_lengths

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
        with pytest.raises(ValueError, match=f"{name} has no row 'gpt-oss' here; it has qwen3-bf16, "):
            published(name, "gpt-oss", peer.TRAINED, TINY, "meta")


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
    positions = torch.arange(TINY.tokens)[None]
    of_peer = end_to_end_rows.replace(workload, model=torch.nn.Linear(2, 2))
    assert step_flops(of_peer, positions) == step_flops(ROWS["qwen3-bf16"].build(TINY, "meta", "sdpa"), positions)


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


@needs("torchtitan")
@pytest.mark.slow
@pytest.mark.parametrize("row", peer_torchtitan.TRAINED)
def test_torchtitan_has_the_loss_of_the_row(row, monkeypatch):
    """Forward alone: flex_attention has no backward on a CPU, and torchtitan makes its blocks on a GPU."""
    from torch.nn.attention.flex_attention import create_block_mask

    model = pytest.importorskip("torchtitan.models.qwen3.model.model")
    monkeypatch.setattr(model, "create_attention_mask", partial(create_block_mask, device="cpu"))
    torch.manual_seed(0)
    expected = ROWS[row].build(TINY, "cpu", "sdpa")
    torch.manual_seed(0)
    actual = peer_torchtitan.build(row, TINY, "cpu", "aot_eager")
    assert sum(each.numel() for each in actual.model.parameters()) == expected.model.num_parameters()
    with torch.no_grad(), actual.around():
        found = [each.model(**batch_of(each)).loss.item() for each in (actual, expected)]
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    assert found[0] == pytest.approx(math.log(actual.config.vocab_size), rel=0.02)


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
