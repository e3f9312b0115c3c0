"""Padded batches, and steps of models on them in eager and compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WORDS = 61


def batch(kind: str, rows: int = 3, length: int = 10) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, padding mask and labels; the labels behind hidden tokens are ignored too, as models shift them."""
    generator = torch.Generator().manual_seed(rows * 100 + length)
    ids = torch.randint(WORDS, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        hidden = min(2 * row, length - 2)
        if kind == "right":
            mask[row, length - hidden :] = 0
        elif kind == "left":
            mask[row, :hidden] = 0
        elif kind == "holes":
            mask[row, row : row + hidden] = 0
    before = torch.cat([torch.ones_like(mask[:, :1]), mask[:, :-1]], 1)
    return ids, mask, ids.masked_fill((mask == 0) | (before == 0), -100)


def compiled(function: Callable[..., Any], compiler: str = "aot_eager", **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    given = {"padding": "drop", "compiler": compiler, "strict": True, **options}
    return torch.compile(function, backend="glue", options=given)


def assert_same_step(model: nn.Module, step: Callable[..., Any], fast: Callable[..., Any], given: Any) -> None:
    """``step`` gives (loss, outputs ``[B, T, ...]``): equal where a token is seen, zeros elsewhere, equal gradients."""
    mask = given[1].bool()
    found = []
    for function in (step, fast):
        model.zero_grad(set_to_none=True)
        loss, outputs = function(*given)
        loss.backward()
        found.append((loss, outputs, {name: each.grad for name, each in model.named_parameters()}))
    (loss, outputs, gradients), (other_loss, other_outputs, other_gradients) = found
    torch.testing.assert_close(other_loss, loss)
    torch.testing.assert_close(other_outputs[mask], outputs[mask])
    assert not other_outputs[~mask].any()
    for name, gradient in gradients.items():
        assert (gradient is None) == (other_gradients[name] is None), name
        if gradient is not None:
            torch.testing.assert_close(other_gradients[name], gradient)


class Layer(nn.Module):
    """Attention under ``mask``, ``mix`` of its result, and a product; in fp64."""

    def __init__(
        self,
        mix: Callable[..., Tensor] = lambda model, x, mask: x,
        is_causal: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, 16, dtype=torch.float64)
        self.projections = nn.Linear(16, 48, dtype=torch.float64)
        self.head = nn.Linear(16, WORDS, bias=False, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(16, dtype=torch.float64)
        self.convolution = nn.Conv1d(16, 16, 3, padding=1, dtype=torch.float64)
        self.mix, self.is_causal, self.dropout = mix, is_causal, dropout

    def attention(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.attended(nn.functional.dropout(self.words(ids), self.dropout, self.training), mask)

    def attended(self, x: Tensor, mask: Tensor) -> Tensor:
        rows, length = mask.shape
        split = self.projections(x).view(rows, length, 3, 2, 8).permute(2, 0, 3, 1, 4)
        shown = mask.bool()[:, None, None, :].expand(rows, 1, length, length)
        if self.is_causal:
            places = torch.arange(length)
            shown = shown & (places[None, :] <= places[:, None])
        result = nn.functional.scaled_dot_product_attention(*split.unbind(0), attn_mask=shown)
        return x + result.transpose(1, 2).reshape(rows, length, 16)

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor | None = None) -> Any:
        hidden = self.mix(self, self.attention(ids, mask), mask)
        if labels is None:
            return hidden
        logits = self.head(hidden)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits
