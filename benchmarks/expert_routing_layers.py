"""The mixture-of-experts layers of ``benchmarks.expert_routing``: transformers' own, and one written by hand.

Weights are random. The router's matrix picks the first ``experts`` features of a token as its logits, and
:func:`random_tokens` puts distinct numbers there that every dtype used here holds exactly: a layer in bf16 routes as
the same layer in fp32, so the two can be compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.expert_operators import SHAPES, Shape

LORA_RANK = 16


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """``build`` makes the layer from a shape and an experts implementation of transformers ("eager", "grouped_mm").

    ``stacked``: the weights of all experts are one tensor, so that transformers has implementations to choose from.
    ``model_type``: of the transformers model that the layer belongs to.
    """

    shape: Shape
    build: Callable[[Shape, str], nn.Module]
    model_type: str
    stacked: bool = True


def config_of(model_type: str, shape: Shape, implementation: str, **more: int) -> object:
    """The configuration of a transformers model with the experts of ``shape``."""
    from transformers import AutoConfig

    sizes = {"hidden_size": shape.hidden, "num_experts_per_tok": shape.top_k, **more}
    if model_type == "qwen3_moe":
        sizes |= {"num_experts": shape.experts, "moe_intermediate_size": shape.intermediate, "norm_topk_prob": True}
    else:
        sizes |= {"num_local_experts": shape.experts, "intermediate_size": shape.intermediate}
    config = AutoConfig.for_model(model_type, **sizes)
    config._experts_implementation = implementation
    return config


def qwen3_layer(shape: Shape, implementation: str) -> nn.Module:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    return Qwen3MoeSparseMoeBlock(config_of("qwen3_moe", shape, implementation))


def gpt_oss_layer(shape: Shape, implementation: str) -> nn.Module:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

    return GptOssMLP(config_of("gpt_oss", shape, implementation))


def mixtral_layer(shape: Shape, implementation: str) -> nn.Module:
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    return MixtralSparseMoeBlock(config_of("mixtral", shape, implementation))


class GatedExpert(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(rows)) * self.up_proj(rows))


class ModuleListLayer(nn.Module):
    """Separate expert modules and a loop over all of them, as models were written before stacked weights."""

    def __init__(self, shape: Shape, implementation: str = "eager") -> None:
        super().__init__()
        self.shape = shape
        self.gate = nn.Linear(shape.hidden, shape.experts, bias=False)
        self.experts = nn.ModuleList([GatedExpert(shape) for _ in range(shape.experts)])

    def forward(self, hidden_states: Tensor) -> Tensor:
        tokens = hidden_states.view(-1, hidden_states.shape[-1])
        weights, selected = self.gate(tokens).float().softmax(-1).topk(self.shape.top_k)
        weights = (weights / weights.sum(-1, keepdim=True)).to(tokens.dtype)
        mask = F.one_hot(selected, self.shape.experts).permute(2, 1, 0)
        result = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            slot, token = torch.where(mask[number])
            rows = expert(tokens[token]) * weights[token, slot, None]
            result.index_add_(0, token, rows.to(tokens.dtype))
        return result.view_as(hidden_states)


LAYERS = {
    "qwen3": LayerKind(SHAPES["qwen3"], qwen3_layer, "qwen3_moe"),
    "gpt_oss": LayerKind(SHAPES["gpt_oss"], gpt_oss_layer, "gpt_oss"),
    "mixtral": LayerKind(SHAPES["mixtral"], mixtral_layer, "mixtral"),
    "mixtral_list": LayerKind(
        dataclasses.replace(SHAPES["mixtral"], name="Mixtral-8x7B, ModuleList"), ModuleListLayer, "mixtral", False
    ),
}
"""By the name that ``--models`` takes."""


def small(kind: LayerKind) -> LayerKind:
    """The same kind of layer in a size for the CPU."""
    shape = dataclasses.replace(kind.shape, tokens=48, top_k=2, experts=4, hidden=32, intermediate=48)
    return dataclasses.replace(kind, shape=shape)


class FirstResult(nn.Module):
    """The hidden states alone, of layers that return their router's scores as well."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states: Tensor) -> Tensor:
        result = self.layer(hidden_states)
        return result[0] if isinstance(result, tuple) else result


def build_layer(kind: LayerKind, implementation: str, dtype: torch.dtype, device: str) -> nn.Module:
    """``[1, tokens, hidden]`` to the same; the same weights for each implementation."""
    torch.manual_seed(1)
    with torch.device(device):
        layer = kind.build(kind.shape, implementation).to(dtype)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "experts." in name:
                parameter.normal_(std=0.5 / kind.shape.hidden**0.5)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                parameter.zero_()[:, : kind.shape.experts].fill_diagonal_(1)
    return FirstResult(layer)


def random_tokens(shape: Shape, dtype: torch.dtype, device: str) -> Tensor:
    """``[1, tokens, hidden]``: some experts are more popular than others, as in trained models."""
    torch.manual_seed(2)
    tokens = torch.randn(shape.tokens, shape.hidden, device=device)
    scores = torch.randn(shape.tokens, shape.experts, device=device) + 0.3 * torch.randn(shape.experts, device=device)
    ranks = scores.argsort(-1).argsort(-1)
    tokens[:, : shape.experts] = (ranks - shape.experts // 2) * (4 / shape.experts)
    return tokens[None].to(dtype)


class LoraLinear(nn.Module):
    """``base(x) + up(down(x))`` with ``base`` frozen, as peft writes it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        like = {"device": base.weight.device, "dtype": base.weight.dtype}
        self.down = nn.Linear(base.in_features, LORA_RANK, bias=False, **like)
        self.up = nn.Linear(LORA_RANK, base.out_features, bias=False, **like)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.up(self.down(x))


class LoraOnInput(nn.Module):
    """A frozen layer behind a trainable low-rank change of its input: backward passes through the experts."""

    def __init__(self, layer: nn.Module, shape: Shape) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        like = next(layer.parameters())
        self.down = nn.Linear(shape.hidden, LORA_RANK, bias=False, device=like.device, dtype=like.dtype)
        self.up = nn.Linear(LORA_RANK, shape.hidden, bias=False, device=like.device, dtype=like.dtype)
        with torch.no_grad():
            self.up.weight[: shape.experts] = 0  # the routing stays exact

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.layer(hidden_states + self.up(self.down(hidden_states)))


class LoraOnStackedWeights(nn.Module):
    """Frozen stacked weights, each with ``up[e] @ down[e]`` added in every step."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.adapted = [name for name, parameter in layer.named_parameters() if parameter.dim() == 3]
        self.ups, self.downs = nn.ParameterList(), nn.ParameterList()
        for name in self.adapted:
            weight = layer.get_parameter(name)
            experts, rows, columns = weight.shape
            self.ups.append(nn.Parameter(weight.new_empty(experts, rows, LORA_RANK).normal_(std=0.02)))
            self.downs.append(nn.Parameter(weight.new_empty(experts, LORA_RANK, columns).normal_(std=0.02)))

    def forward(self, hidden_states: Tensor) -> Tensor:
        weights = {
            name: self.layer.get_parameter(name) + up @ down
            for name, up, down in zip(self.adapted, self.ups, self.downs, strict=True)
        }
        return torch.func.functional_call(self.layer, weights, (hidden_states,))


def with_lora_on_experts(layer: nn.Module) -> nn.Module:
    """``layer`` with its experts' weights frozen and adapted, the way that its weights are held."""
    if any(parameter.dim() == 3 for parameter in layer.parameters()):
        return LoraOnStackedWeights(layer)
    layer.requires_grad_(False)
    for module in list(layer.modules()):
        if isinstance(module, GatedExpert):
            for name, child in list(module.named_children()):
                setattr(module, name, LoraLinear(child))
    return layer
