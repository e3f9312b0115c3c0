"""Ways to write one attention: expressions that all give ``softmax(query @ key.mT * scale, masked) @ value``.

They may use ``query``, ``key`` and ``value`` ``[B, H, T, D]``; bool ``visible`` ``[T, T]``, and its inverse ``hidden``;
``added``, 0 where a key is visible and minus infinity elsewhere; ``minus_infinity``, a tensor; ``scale``, ``B``, ``H``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def set_to(tensor: Tensor, index: Any, value: float) -> Tensor:
    """Written in place, in a copy."""
    tensor = tensor.clone()
    tensor[index if isinstance(index, tuple) else (..., index)] = value
    return tensor


def quotient(exponentials: Tensor) -> Tensor:
    return exponentials / exponentials.sum(-1, keepdim=True)


HELPERS = {"set_to": set_to, "quotient": quotient}

COLUMN = "minus_infinity.expand(B, H, T, 1)"
SCORES = "(query @ key.mT * scale)"
MASKED = f"{SCORES}.masked_fill(hidden, -inf)"
WEIGHTS = f"F.softmax({MASKED}, dim=-1)"

PRODUCTS = {
    "matmul": "torch.matmul(query, key.transpose(2, 3)) * scale",
    "matmul with permute": "torch.matmul(query, key.permute(0, 1, 3, 2)) * scale",
    "a named argument": "torch.matmul(other=key.swapaxes(-2, -1), input=query) * scale",
    "einsum": "torch.einsum('bhqd,bhkd->bhqk', query, key) * scale",
    "einsum, other names and order": "torch.einsum('abkd,abqd->abqk', key, query) * scale",
    "einsum with an ellipsis": "torch.einsum('...qd,...kd->...qk', query, key) * scale",
    "einsum of what is transposed": "torch.einsum('bhqd,bhdk->bhqk', query, key.mT) * scale",
    "bmm": "torch.bmm(query.flatten(0, 1), key.flatten(0, 1).mT).view(B, H, T, T) * scale",
    "baddbmm": "torch.baddbmm(query.new_zeros(()), query.flatten(0, 1), key.flatten(0, 1).mT).view(B, H, T, T) * scale",
    "baddbmm with alpha": (
        "torch.baddbmm(query.new_zeros(()), query.flatten(0, 1), key.flatten(0, 1).mT, alpha=scale).view(B, H, T, T)"
    ),
    "the query is scaled": "(query * scale) @ key.mT",
    "both are scaled": "(query * scale**0.5) @ (key * scale**0.5).mT",
    "the key is turned first": "(key @ query.mT).mT * scale",
    "div": "query @ key.mT / (1 / scale)",
    "true_divide": "torch.true_divide(query @ key.mT, 1 / scale)",
    "div in place": "(query @ key.mT).div_(1 / scale)",
    "divide in place": "(query @ key.mT).divide_(1 / scale)",
    "mul in place": "(query @ key.mT).mul_(scale)",
    "multiply": "torch.multiply(query @ key.mT, scale)",
    "multiply in place": "(query @ key.mT).multiply_(scale)",
    "a scale that is a tensor": "query @ key.mT * torch.tensor(scale, dtype=query.dtype)",
    "divided by a tensor": "(query @ key.mT) / torch.full([], 1 / scale, dtype=query.dtype)",
    "elements are multiplied": "(query.unsqueeze(3) * key.unsqueeze(2)).sum(-1) * scale",
}
"""Of the scores."""

MASKINGS = {
    "masked_fill": "{}.masked_fill(hidden, -inf)",
    "masked_fill in place": "{}.masked_fill_(hidden, -inf)",
    "masked_fill of a tensor": "{}.masked_fill(hidden, minus_infinity)",
    "where": "torch.where(visible, {}, -inf)",
    "where, the number first": "torch.where(hidden, -inf, {})",
    "where, a tensor first": "torch.where(hidden, minus_infinity, {})",
    "where as a method": "{}.where(visible, -inf)",
    "where as a method of the number": "minus_infinity.where(hidden, {})",
    "add": "{} + added",
    "add, the mask first": "added + {}",
    "add in place": "{}.add_(added)",
    "add with alpha": "torch.add({}, -added, alpha=-1)",
    "sub": "{} - -added",
    "sub in place": "{}.sub_(-added)",
    "subtract": "torch.subtract({}, -added)",
    "rsub": "torch.rsub(-added, {})",
    "set by an index": "set_to({}, hidden, -inf)",
    "masked_scatter": "{}.masked_scatter(hidden, minus_infinity.expand(B, H, T, T))",
    "twice": "{}.masked_fill(hidden, -inf).masked_fill(hidden, -inf)",
    "a finite number": "{}.masked_fill(hidden, torch.finfo(query.dtype).min)",
    "clamped below": "({} + added).clamp(min=torch.finfo(query.dtype).min)",
    "minimum": "torch.minimum({}, torch.where(visible, inf, -inf).to(query.dtype))",
    "by 1 - mask": "{} + (1.0 - visible.to(query.dtype)) * torch.finfo(query.dtype).min",
}
"""Of the scores, which stand where the braces are."""

SOFTMAXES = {
    "softmax": "F.softmax({}, dim=-1)",
    "a method": "{}.softmax(3)",
    "a module": "torch.nn.Softmax(dim=-1)({})",
    "with a dtype": "torch.softmax({}, -1, dtype=query.dtype)",
    "special": "torch.special.softmax({}, -1)",
    "the operator": "torch.ops.aten._softmax({}, -1, False)",
    "softmin": "F.softmin(-{}, dim=-1)",
    "log_softmax": "{}.log_softmax(-1).exp()",
    "exp over sum": "quotient({}.exp())",
    "exp over sum, less the maximum": "quotient((m := {}).sub(m.amax(-1, keepdim=True)).exp())",
    "exp less logsumexp": "((m := {}) - m.logsumexp(-1, keepdim=True)).exp()",
    "less the maximum first": "F.softmax((m := {}) - m.max(-1, keepdim=True).values, dim=-1)",
    "no dropout": "F.dropout(F.softmax({}, -1), 0.0, True)",
    "dropout that is off": "F.dropout(F.softmax({}, -1), 0.5, training=False)",
    "converted": "F.softmax({}, -1).to(query.dtype).contiguous()",
    "another dimension": "F.softmax({}.mT, 2).mT",
    "a column left out": f"F.softmax(torch.cat([{{}}, {COLUMN}], -1), -1)[..., :-1]",
    "concatenate": f"F.softmax(torch.concatenate([{{}}, {COLUMN}], -1), -1)[..., :-1]",
    "concat with a named axis": f"F.softmax(torch.concat([{{}}, {COLUMN}], axis=3), -1).narrow(3, 0, T)",
}
"""Of the masked scores."""

OUTPUTS = {
    "matmul": "torch.matmul({}, value)",
    "a method": "{}.matmul(value)",
    "einsum": "torch.einsum('bhqk,bhkd->bhqd', {}, value)",
    "einsum with an ellipsis": "torch.einsum('...qk,...kd->...qd', {}, value)",
    "einsum, the value first": "torch.einsum('bhkd,bhqk->bhqd', value, {})",
    "einsum that transposes": "torch.einsum('bhqk,bhkd->bqhd', {}, value).transpose(1, 2)",
    "bmm": "torch.bmm({}.flatten(0, 1), value.flatten(0, 1)).view(B, H, T, -1)",
    "turned": "(value.mT @ {}.mT).mT",
    "elements are multiplied": "({}.unsqueeze(-1) * value.unsqueeze(2)).sum(3)",
}
"""Of the weights."""

OPERATORS = {
    "sdpa": "F.scaled_dot_product_attention(query, key, value, visible, scale=scale)",
    "sdpa, numbers are added": "F.scaled_dot_product_attention(query, key, value, attn_mask=added, scale=scale)",
    "sdpa of a scaled query": "F.scaled_dot_product_attention(query * scale, key, value, visible, scale=1.0)",
}

ATTENTION = {
    **OPERATORS,
    **{
        f"scores by {name}": f"F.softmax(({text}).masked_fill(hidden, -inf), -1) @ value"
        for name, text in PRODUCTS.items()
    },
    **{f"masked by {name}": f"F.softmax({text.format(SCORES)}, -1) @ value" for name, text in MASKINGS.items()},
    **{f"weights by {name}": f"{text.format(MASKED)} @ value" for name, text in SOFTMAXES.items()},
    **{f"result by {name}": text.format(WEIGHTS) for name, text in OUTPUTS.items()},
}


_SETUP = """
def fn(query, key, value):
    B, H, T, scale = *query.shape[:3], 0.25
    visible = torch.arange(T)[:, None] >= torch.arange(T)
    hidden = ~visible
    added = torch.where(visible, 0.0, -inf).to(query.dtype)
    minus_infinity = torch.full((), -inf, dtype=query.dtype)
    return """


def program(text: str) -> Callable[..., Tensor]:
    """A function of ``query, key, value`` that returns ``text``."""
    names: dict[str, Any] = {"torch": torch, "F": F, "inf": math.inf, **HELPERS}
    exec(_SETUP + text, names)
    return names["fn"]
