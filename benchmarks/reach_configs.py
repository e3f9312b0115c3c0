"""Tiny random configurations of every family that transformers maps to a class that learns text.

A configuration is a family's own defaults with its sizes made small, by what each size is called. Of each kind of layer
one stays. Dropout is zero.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, Literal

from torch import nn

Kind = Literal["causal", "masked", "encoder-decoder", "multimodal"]
MAPPINGS: dict[Kind, str] = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "encoder-decoder": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "multimodal": "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
}
"""By kind, the table of ``transformers.models.auto.modeling_auto``."""
VOCABULARY = 96
LENGTH = 32
"""Tokens in a row."""
MOST_WEIGHTS = 10_000_000
"""Of a model: more take too long in fp64."""

_NAMES: dict[int, str] = {
    VOCABULARY: "vocab_size encoder_vocab_size decoder_vocab_size unpadded_vocab_size vocab_size_per_layer_input "
    "input_vocab_size src_vocab_size tgt_vocab_size entity_vocab_size pronunciation_vocab_size shape_vocab_size "
    "encoder_hash_byte_group_vocab num_embeddings",
    64: "hidden_size d_model n_embd emb_dim embed_dim embedding_dim dim encoder_hidden_size word_embed_proj_dim "
    "backbone_hidden_size attention_hidden_size lru_width mamba_d_ssm q_hidden_size input_embedding_size "
    "output_embedding_size projection_dim text_embed_dim encoder_dim out_hidden_size embedding_size mm_hidden_size "
    "text_hidden_size vision_hidden_size audio_hidden_size hidden_sizes d_latents adapter_in_dim adapter_out_dim "
    "adapter_input_size hidden_size_global output_dim vision_output_dim projector_input_dim projector_output_dim",
    48: "intermediate_size d_ff ffn_dim ffn_hidden_size n_inner dim_ff dff encoder_ffn_dim decoder_ffn_dim d_inner "
    "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size hidden_dim "
    "moe_shared_expert_intermediate_size feed_forward_size intermediate_size_mlp dense_intermediate_size "
    "shared_experts_intermediate_size projector_hidden_size alignment_intermediate_size mlp_dim "
    "downsample_hidden_size",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads "
    "num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads n_mamba_heads_ "
    "num_experts num_local_experts n_routed_experts moe_num_experts linear_num_value_heads linear_num_heads "
    "index_n_heads num_codebooks index_kpool upsample_groups",
    16: "head_dim attention_head_dim d_kv kv_channels dim_head attention_head_size swa_head_dim global_head_dim "
    "q_lora_rank kv_lora_rank o_lora_rank qk_nope_head_dim v_head_dim index_head_dim linear_key_head_dim "
    "linear_value_head_dim linear_head_dim mamba_d_state state_size ssm_state_size swa_v_head_dim "
    "hidden_size_per_layer_input laurel_rank adapter_rank depth_head_dim moe_latent_size",
    8: "qk_rope_head_dim rotary_dim mamba_chunk_size chunk_size time_step_rank mamba_dt_rank index_topk patch_size "
    "mamba_n_heads n_mamba_heads mamba_num_heads mamba_headdim_ rel_embed_dim",
    2: "num_filters num_experts_per_tok num_experts_per_token moe_k moe_topk linear_num_key_heads "
    "n_group num_expert_group mamba_n_groups n_groups mamba_ngroups temporal_patch_size_",
    1: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers "
    "num_decoder_layers depth depths num_blocks num_self_attends_per_block topk_group n_shared_experts "
    "num_shared_experts moe_num_shared_experts moe_layer_start_index num_nextn_predict_layers_ num_mem_blocks",
    0: "first_k_dense_replace num_dense_layers",
    256: "max_position_embeddings n_positions max_seq_len model_max_length n_ctx context_length "
    "max_source_positions max_target_positions",
    32: "image_size img_size max_img_size base_channels latent_channels",
}
SIZES = {name: size for size, names in _NAMES.items() for name in names.split()}
KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "num_global_key_value_heads")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "encoder_layers", "decoder_layers")
WINDOWS = ("sliding_window", "sliding_window_size", "attention_window_size", "local_attention", "window_size")
"""Windows reach back a few tokens."""
DROPOUTS = ("dropout", "dropout_rate", "layerdrop", "_pdrop", "drop_rate", "_dropout_prob")

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"moe_num_experts": 4, "moe_top_k": 2, "ffn_hidden_size": 48},
    },
    "deepseek_v2": {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3n_text": {"num_kv_shared_layers": 0, "altup_num_inputs": 2, "laurel_rank": 4},
    "gemma4_unified_assistant": {"text_config": {"num_kv_shared_layers": 0}},
    "gpt_neo": {
        "num_layers": 2,
        "attention_types": [[["global", "local"], 1]],
        "attention_layers": ["global", "local"],
    },
    "jamba": {
        "num_hidden_layers": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "deepseek_ocr2_text": {"mlp_layer_types": ["sparse"], "num_experts_per_tok": 2},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48},
    "chameleon": {"vocabulary_map": {"<image>": 4}},
    "emu3": {"vocabulary_map": {"<image>": 4}},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16}},
    "granite4_vision": {"deepstack_layer_map": [[-1, 0]], "downsample_rate": "4/8"},
    "paddleocr_vl_text": {"rope_parameters": {**_ROPE, "mrope_section": [3, 3, 2]}},
    "perceiver": {"max_position_embeddings": LENGTH},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 5},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 5},
    "rwkv": {"num_hidden_layers": 2},
    "step3p5": {"sliding_window": 6},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "bamba": {"num_hidden_layers": 2, "attn_layer_indices": [1]},
    "lfm2_moe": {"num_hidden_layers": 2, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 8,
    },
    "reformer": {"axial_pos_embds": False},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 1, "mask_token_id": 4},
    "xlnet": {"d_head": 16},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
    },
    "zamba2": {"hybrid_layer_ids": [1], "mamba_headdim": 16, "attention_hidden_size": 128, "attention_head_dim": 32},
}
"""What a family needs beside that."""


class NotBuilt(Exception):
    """A family without a tiny model; the message says why."""


def families(kind: Kind) -> list[str]:
    from transformers.models.auto import modeling_auto

    return list(getattr(modeling_auto, MAPPINGS[kind], {}))


def tiny_config(family: str, kind: Kind, repeats: int = 1) -> Any:
    """A configuration of ``family``. ``repeats``: so many layers of each kind.

    Raises:
        NotBuilt: none is made.
    """
    from transformers import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[family]
    try:
        defaults = config_class().to_dict()
    except Exception as error:
        raise NotBuilt(f"its configuration has no defaults that are valid: {_first_line(error)}") from error
    settings = _small(defaults, repeats)
    if kind == "causal" and "is_decoder" in defaults:
        settings["is_decoder"] = True
    if kind == "encoder-decoder" or defaults.get("is_encoder_decoder"):
        settings["decoder_start_token_id"] = settings["pad_token_id"] = 0
    _merge(settings, FAMILIES.get(family, {}))
    try:
        config = config_class(**settings)
    except Exception as error:
        raise NotBuilt(f"its configuration refuses tiny sizes: {_first_line(error)}") from error
    _set_rotary_sections(config)
    return config


def _set_rotary_sections(config: Any) -> None:
    """Of positions on several axes: how many of the rotated pairs of a head turn by each axis."""
    rope = getattr(config, "rope_parameters", None)
    if rope and "mrope_section" in (getattr(config, "ignore_keys_at_rope_validation", None) or ()):
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        for each in rope.values() if all(isinstance(each, dict) for each in rope.values()) else [rope]:
            pairs = int(head * each.get("partial_rotary_factor", 1.0)) // 2
            first = (pairs + 1) // 3
            each["mrope_section"] = [first, first, pairs - 2 * first]
    for name in config.sub_configs:
        if getattr(config, name, None) is not None:
            _set_rotary_sections(getattr(config, name))


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"[:200]


def _merge(settings: dict[str, Any], more: dict[str, Any]) -> None:
    for name, value in more.items():
        if isinstance(value, dict) and isinstance(settings.get(name), dict):
            _merge(settings[name], value)
        else:
            settings[name] = value


def _small(defaults: dict[str, Any], repeats: int = 1) -> dict[str, Any]:
    """``defaults`` of a configuration, or of one in it, with small sizes."""
    found: dict[str, Any] = {}
    for name, value in defaults.items():
        if isinstance(value, dict) and (name.endswith("_config") or "model_type" in value):
            found[name] = _small(value, repeats)
            _merge(found[name], FAMILIES.get(value.get("model_type", ""), {}))
        elif isinstance(value, dict) and "mrope_section" in value:
            found[name] = {**value, "mrope_section": [3, 3, 2]}
        elif isinstance(value, bool) or value is None:
            found[name] = value
        elif isinstance(value, float) and any(part in name for part in DROPOUTS):
            found[name] = 0.0
        elif isinstance(value, int | float) and name in SIZES:
            found[name] = _size(name, value)
        elif isinstance(value, list) and name in SIZES and all(isinstance(each, int) for each in value):
            found[name] = [_size(name, each) for each in value]
        elif isinstance(value, list) and name == "vision_feature_layer":
            found[name] = [-1] * len(value)
        elif isinstance(value, int) and name in WINDOWS:
            found[name] = min(6, value)
        elif isinstance(value, int) and name.endswith(("_token_id", "_token_index")):
            found[name] = value if 0 <= value < VOCABULARY else _special(name)
        else:
            found[name] = value
    for name in ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "architectures", "per_layer_config"):
        found.pop(name, None)
    _set_heads(found, defaults)
    _set_layers(found, defaults, repeats)
    if "use_cache" in found:
        found["use_cache"] = False
    return found


def _size(name: str, value: float) -> int | float:
    return min(SIZES[name], int(value)) if value > 0 else value


def _special(name: str) -> int:
    """An id that ordinary tokens do not have: those are 10 and more."""
    return sum(map(ord, name)) % 10


def _set_heads(found: dict[str, Any], defaults: dict[str, Any]) -> None:
    heads = next((n for n in ("num_attention_heads", "n_head", "num_heads") if isinstance(defaults.get(n), int)), None)
    for name in KEY_HEADS:
        number = defaults.get(name)
        if name in defaults and heads is not None:
            found[name] = found[heads] if number in (None, defaults[heads]) else 1 if number == 1 else 2
    if "head_dim" in defaults and defaults["head_dim"] is None:
        found["head_dim"] = 16
    rotated, plain = found.get("qk_rope_head_dim"), found.get("qk_nope_head_dim")
    if rotated is not None and plain is not None:
        if "qk_head_dim" in defaults:
            found["qk_head_dim"] = rotated + plain
        if defaults.get("head_dim") == defaults["qk_rope_head_dim"]:
            found["head_dim"] = rotated
        elif "qk_head_dim" not in defaults and defaults.get("head_dim") == sum(
            defaults[name] for name in ("qk_rope_head_dim", "qk_nope_head_dim")
        ):
            found["head_dim"] = rotated + plain
    if "mamba_expand" in found and "mamba_d_head" in found:
        found["mamba_d_head"] = found["hidden_size"] * found["mamba_expand"] // found["mamba_n_heads"]


def _set_layers(found: dict[str, Any], defaults: dict[str, Any], repeats: int) -> None:
    """Of each kind of layer the first one, four kinds at most, and all of them as often as ``repeats`` says."""
    names = [n for n in LAYERS if isinstance(defaults.get(n), int)]
    for name in names:
        found[name] *= repeats
    if not names:
        return
    name, number = names[0], defaults[names[0]]
    by_layer = [n for n, value in defaults.items() if isinstance(value, list) and len(value) == number and number > 1]
    if not by_layer:
        return
    kinds = list(zip(*(map(str, defaults[n]) for n in by_layer), strict=True))
    chosen = sorted(kinds.index(each) for each in dict.fromkeys(kinds))[:4]
    found[name] = len(chosen) * repeats
    for each in by_layer:
        found[each] = [found[each][i] for i in chosen] * repeats
    if of_layers := {int(i): sizes for i, sizes in (defaults.get("per_layer_config") or {}).items()}:
        found["per_layer_config"] = {
            place: _of_layer(found, defaults, of_layers[i])
            for place, i in enumerate(chosen * repeats)
            if i in of_layers
        }


def _of_layer(found: dict[str, Any], defaults: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """A layer's own sizes, small: where they differ from the configuration's, which has ``defaults``."""
    numbers = {n: value for n, value in defaults.items() if value is None or isinstance(value, int | float)}
    small = _small({**numbers, **sizes})
    return {n: small[n] for n in small.keys() - set(LAYERS) if small[n] is not None and small[n] != found.get(n)}


@dataclasses.dataclass(frozen=True)
class Tiny:
    """A model with random weights.

    Attributes:
        takes: the names of what its forward takes.
        attention: transformers' name for how it computes it.
    """

    model: Any
    takes: frozenset[str]
    vocabulary: int
    attention: str


def tiny_model(family: str, kind: Kind, attention: str | None, dtype: Any, repeats: int = 1) -> Tiny:
    """A model of ``family`` in ``dtype``, with ``repeats`` layers of each kind.

    ``attention``: transformers' name; None: sdpa if there is one, else eager.

    Raises:
        NotBuilt: there is none.
    """
    import torch
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto

    mapping = getattr(modeling_auto, MAPPINGS[kind].removesuffix("_NAMES"))
    config_class = CONFIG_MAPPING[family]
    try:
        model_class = mapping[config_class]
    except Exception as error:
        raise NotBuilt(_first_line(error)) from error
    model_class = model_class[0] if isinstance(model_class, tuple) else model_class
    takes = _check_takes(model_class)
    config = tiny_config(family, kind, repeats)
    try:
        for name, sub_class in config.sub_configs.items():
            if sub_class is model_class.config_class is not config_class:
                config = getattr(config, name)
        torch.manual_seed(0)
        # The grouped product that a CPU has is not of fp64; loops over experts are, and glue groups them.
        model = model_class._from_config(config, attn_implementation=attention, experts_implementation="eager")
        model = model.to(dtype)
    except Exception as error:
        raise NotBuilt(_first_line(error)) from error
    numbers = sum(p.numel() for p in model.parameters())
    if numbers > MOST_WEIGHTS:
        raise NotBuilt(f"it has {numbers:,} weights, and which of its sizes make them is not known here")
    with torch.no_grad():
        for parameter in model.parameters():  # what starts at zero, or at one, would hide what is wrong in it
            if parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    written = getattr(model.config, "_attn_implementation", None) or "eager"
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary = min(VOCABULARY, getattr(text, "vocab_size", VOCABULARY) or VOCABULARY)
    return Tiny(model.train(), takes, vocabulary, written)


def _check_takes(model_class: Any) -> frozenset[str]:
    """Names of what its forward takes, where token ids are enough."""
    parameters = inspect.signature(model_class.forward).parameters
    if model_class.forward is nn.Module.forward:
        raise NotBuilt("it has no forward: its parts are called by generate")
    if "input_ids" not in parameters:
        raise NotBuilt("it takes no token ids")
    others = [n for n, p in parameters.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    others = [name for name in others if name not in ("self", "input_ids")]
    if "shared_kv_states" in parameters:
        others.append("keys and values of another model")
    if others:
        raise NotBuilt(f"its forward needs more than text: {', '.join(others)}")
    return frozenset(parameters) - {"self"}
