"""The benchmark of reach: tiny models of families, what counts as wrong, and the page."""

import json

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks.reach import read_results
from benchmarks.reach_case import Case, Result, _difference, run_case
from benchmarks.reach_configs import MAPPINGS, NotBuilt, families, tiny_config, tiny_model
from benchmarks.reach_page import page


def test_every_kind_has_families():
    assert all(len(families(kind)) > 20 for kind in MAPPINGS)
    assert "llama" in families("causal")


def test_one_layer_of_each_kind_stays():
    assert tiny_config("llama", "causal").num_hidden_layers == 1
    gemma = tiny_config("gemma3_text", "causal")
    assert (gemma.num_hidden_layers, gemma.layer_types) == (2, ["sliding_attention", "full_attention"])


def test_grouped_heads_stay_grouped_and_others_do_not():
    grouped, equal, single = (tiny_config(family, "causal") for family in ("qwen3", "olmo", "gemma"))
    assert grouped.num_key_value_heads == 4 or 1 < grouped.num_key_value_heads < grouped.num_attention_heads
    assert equal.num_key_value_heads == equal.num_attention_heads
    assert single.num_attention_heads % single.num_key_value_heads == 0


def test_a_family_that_is_not_built_says_why(monkeypatch):
    monkeypatch.setattr("benchmarks.reach_configs.MOST_WEIGHTS", 1000)
    with pytest.raises(NotBuilt, match="weights"):
        tiny_model("llama", "causal", None, torch.float32)


def test_a_family_that_takes_more_than_text_says_so():
    with pytest.raises(NotBuilt, match="more than text: pixel_values"):
        tiny_model("blip", "multimodal", None, torch.float32)


def test_sizes_in_lists_and_of_nested_families_are_small():
    assert tiny_config("gemma3n_text", "causal").intermediate_size == [48] * 4
    assert tiny_config("qwen4_exp", "multimodal").text_config.indexer_budget == 16


@pytest.mark.parametrize("family", ["qwen2_vl", "glm4v_moe"])
def test_sections_of_rotary_positions_fill_the_rotated_half_of_a_head(family):
    config = tiny_config(family, "multimodal").text_config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotated = int(head * config.rope_parameters.get("partial_rotary_factor", 1.0))
    assert sum(config.rope_parameters["mrope_section"]) == rotated // 2


def test_what_is_wrong():
    want = {"loss": torch.ones(()), "weight": torch.ones(2), "unused": None}
    assert _difference(dict(want), want) == (0.0, "")
    assert _difference({**want, "weight": torch.tensor([1.0, 1.5])}, want) == (0.5, "weight")
    assert _difference({**want, "unused": torch.zeros(2)}, want) == (float("inf"), "unused is not None")
    assert _difference({**want, "weight": None}, want) == (float("inf"), "weight is None")
    assert _difference({"loss": want["loss"]}, want)[0] == float("inf")
    assert _difference({**want, "weight": torch.ones(1)}, want) == (float("inf"), "weight is of shape (1,)")
    assert _difference({"empty": torch.ones(0)}, {"empty": torch.ones(0)}) == (0.0, "")
    assert _difference({**want, "weight": torch.tensor([1.0, float("nan")])}, want)[0] == float("inf")


def test_of_a_case_that_ran_again_the_last_result_counts(tmp_path):
    path = tmp_path / "reach.jsonl"
    name = Case("llama", "causal").name
    lines = ({"case": name, "status": status} for status in ("wrong", "right"))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [result.status for result in read_results(path).values()] == ["right"]


def test_the_page():
    found = [
        Result(Case("llama", "causal").name, "right", attentions={"mask": 2}, rewrites={"packed": 2}),
        Result(Case("opt", "causal").name, "right", attentions={"without": 1}),
        Result(Case("mpt", "causal").name, "right", attentions={"without": 1}),
        Result(
            Case("doge", "causal").name,
            "right",
            attentions={"mask": 1},
            skips=[("specialize_attention", "the mask 'attn_3' has a gradient", 1)],
        ),
        Result(Case("bloom", "causal").name, "not taken"),
        Result(Case("blip", "causal").name, "not built", "its forward needs more than text: pixel_values"),
        Result(Case("phimoe", "causal").name, "failed", "KeyError: 3"),
    ]
    text = page({result.case: result for result in found})
    assert "| causal | 6 of " in text
    assert "| 3 of 4 |" in text  # opt and mpt have nothing to specialise, doge keeps its mask
    assert "| mpt, opt | causal | without mask |" in text  # families with the same cells share a line
    assert "| 1 | the mask … has a gradient | doge |" in text
    assert "| llama | causal | packed |" in text
    assert "| phimoe | packed | KeyError: 3 |" in text
    assert "| not built: its forward needs more than text: pixel_values | blip |" in text
    assert "bloom" not in text


@pytest.mark.slow
def test_a_case():
    result = run_case(Case("mixtral", "causal"))
    assert result.status == "right", result.why
    assert (result.graphs, result.breaks, result.failures) == (1, 0, [])
    assert (result.rewrites["packed"], result.rewrites["loops_grouped"], result.specialised) == (1, 1, 1)
    assert result.attentions == {"mask": 1}
