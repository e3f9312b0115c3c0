"""torchtitan's models in benchmarks.end_to_end, set up as its trainer does on one GPU with ``compile.enable``.

Its own model, weights through its own conversion of checkpoints, each block and the loss compiled, and attention within
documents (``block_causal``), through flex_attention or torch's varlen kernel, the mask made in each step as its trainer
makes it. torchtitan finds documents by the token that ends them, and positions go on over a whole row.

Of a block with experts it compiles attention, norms, router, reordering and the experts' grouped products, each by
itself, and what moves tokens stays eager; of gpt-oss it compiles attention's kernel and no block. gpt-oss attends over
the whole row, as it does in transformers, which gives its masks no positions. Experts are chosen with a bias that is to
balance them: it is added, as in the published configurations, and stays zero, as transformers has none. torchtitan
moves it before the optimizer's step, for gpt-oss and not for Qwen3.

torchtitan 0.2.2 is the last release for torch 2.11; later ones need a newer torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.end_to_end_rows import Size, Workload
from benchmarks.peers import Outcome, checkpoint_of, imported, published, targets_of, with_experts_apart

HOW = "torchtitan 0.2.2 is for torch 2.11"
TRAINED = ("qwen3-bf16", "qwen3-autocast", "qwen3-moe", "gpt-oss")
END = SimpleNamespace(eos_id=-1)
"""In the place of a tokenizer. The row's random ids end no document."""


@dataclass(frozen=True)
class Family:
    """One of torchtitan's models for a row.

    Attributes:
        model: makes it, its weights in torch's default dtype.
        weights: the row's, by torchtitan's names.
        parallelize: what its trainer does with a model; on one GPU that is to compile it.
    """

    model: Callable[[], Any]
    weights: dict[str, Tensor]
    parallelize: Callable[..., Any]


class Step(nn.Module):
    """What the trainer does with a batch, up to the loss."""

    def __init__(self, model: Any, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, input_ids: Tensor, position_ids: Tensor, labels: Tensor, ended_ids: Tensor) -> Outcome:
        masks = self.model.get_attention_masks(ended_ids, END)
        targets = targets_of(labels)
        return Outcome(self.loss(self.model(input_ids, masks), targets) / (targets != -100).sum())


def build(row: str, size: Size, device: str, compiler: str, attention: str = "flex") -> Workload:
    """What the row trains, compiled; ``attention`` is torchtitan's name for it, "flex" or "varlen".

    Raises:
        ImportError: torchtitan is missing, or for another torch.
        ValueError: torchtitan has no such row here, or not with this attention.
    """
    distributed = _torchtitan("distributed")
    row_has = published("torchtitan", row, TRAINED, size, device)
    family = {"qwen3": _qwen3, "qwen3_moe": _qwen3, "gpt_oss": _gpt_oss}[row_has.config.model_type]
    made = family(row_has, size, device, attention)
    dtype = next(iter(made.weights.values())).dtype
    with _torchtitan("tools.utils").set_default_dtype(dtype), torch.device(device):
        model = made.model()
        with torch.no_grad():
            model.init_weights()  # of which its buffers stay
    missing, unexpected = model.load_state_dict(made.weights, strict=False)
    if unexpected or any(not name.endswith(".expert_bias") for name in missing):
        raise ValueError(f"torchtitan's model has other weights than the row: {missing}, {unexpected}")

    job = _torchtitan("config").JobConfig()
    job.compile.enable, job.compile.backend = True, compiler
    job.activation_checkpoint.mode = "none"
    job.training.seq_len = size.tokens
    one = dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp", "world_size"), 1)
    layers = nn.ModuleList(model.layers.values())
    made.parallelize(model, distributed.ParallelDims(**one), job)
    loss = _torchtitan("components.loss").build_cross_entropy_loss(job)
    return replace(row_has, model=Step(model, loss).train(), layers=layers, batch=_with_ends(row_has.batch))


def _qwen3(row_has: Workload, size: Size, device: str, attention: str) -> Family:
    qwen3 = _torchtitan("models.qwen3")
    config = row_has.config
    experts: dict[str, Any] = {}
    if config.model_type == "qwen3_moe":
        routing = {"route_norm": config.norm_topk_prob, "score_before_experts": False}
        experts = {
            "moe_enabled": True,
            "moe_inter_dim": config.moe_intermediate_size,
            "moe_args": _routing(config.num_experts, config, device, **routing),
        }
    arguments = qwen3.Qwen3ModelArgs(
        vocab_size=config.vocab_size,
        dim=config.hidden_size,
        hidden_dim=config.intermediate_size,
        n_layers=config.num_hidden_layers,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        norm_eps=config.rms_norm_eps,
        rope_theta=config.rope_parameters["rope_theta"],
        max_seq_len=size.tokens,
        enable_weight_tying=config.tie_word_embeddings,
        attn_type=attention,
        attn_mask_type="block_causal",
        **experts,
    )
    weights = qwen3.Qwen3StateDictAdapter(arguments, None).from_hf(with_experts_apart(checkpoint_of(row_has)))
    return Family(lambda: qwen3.Qwen3Model(arguments), weights, qwen3.parallelize_qwen3)


def _gpt_oss(row_has: Workload, size: Size, device: str, attention: str) -> Family:
    if attention != "flex":
        raise ValueError("torchtitan has gpt-oss with flex_attention alone")
    gpt_oss = _torchtitan("models.gpt_oss")
    config = row_has.config
    rope = config.rope_parameters
    arguments = gpt_oss.GptOssModelArgs(
        vocab_size=config.vocab_size,
        dim=config.hidden_size,
        moe_inter_dim=config.intermediate_size,
        n_layers=config.num_hidden_layers,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        norm_eps=config.rms_norm_eps,
        sliding_window_size=config.sliding_window,
        original_seq_len=rope["original_max_position_embeddings"],
        rope_theta=rope["rope_theta"],
        rope_factor=rope["factor"],
        ntk_alpha=rope["beta_slow"],
        ntk_beta=rope["beta_fast"],
        max_seq_len=size.tokens,
        attn_mask_type="causal",
        moe_args=_routing(
            config.num_local_experts, config, device, route_norm=True, score_before_experts=False, gate_bias=True
        ),
    )
    weights = gpt_oss.GptOssStateDictAdapter(arguments, None).from_hf(_as_blocks(checkpoint_of(row_has)))
    return Family(lambda: gpt_oss.GptOssModel(arguments), weights, gpt_oss.parallelize_gptoss)


def _routing(experts: int, config: Any, device: str, **settings: bool) -> Any:
    """A token goes to the experts of greatest softmax."""
    return _torchtitan("models.moe").MoEArgs(
        num_experts=experts,
        num_shared_experts=0,
        top_k=config.num_experts_per_tok,
        score_func="softmax",
        use_grouped_mm=device == "cuda",  # tokens are moved for it by a kernel in Triton
        **settings,
    )


def _as_blocks(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """gpt-oss's experts by the names, and in the order of dimensions, of its checkpoints in MXFP4."""
    stacked = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    return {
        **{name: weight for name, weight in weights.items() if not name.endswith(stacked)},
        **{f"{name}_blocks": weight.mT for name, weight in weights.items() if name.endswith(stacked)},
    }


def _with_ends(
    batch: Callable[[int, torch.Generator], dict[str, Tensor]],
) -> Callable[[int, torch.Generator], dict[str, Tensor]]:
    """The batches, with ``ended_ids``: the ids, the last of each document replaced by the token that ends one."""

    def made(tokens: int, generator: torch.Generator) -> dict[str, Tensor]:
        found = batch(tokens, generator)
        is_last = torch.nn.functional.pad(found["position_ids"][:, 1:] == 0, (0, 1), value=True)
        return {**found, "ended_ids": found["input_ids"].masked_fill(is_last, END.eos_id)}

    return made


def _torchtitan(module: str) -> Any:
    return imported(f"torchtitan.{module}", "torchtitan", HOW)
