"""Ways to write one loss: expressions for the mean of ``-log(softmax(hidden @ weight.T))`` at the targets.

They may use ``hidden`` ``[B, T, K]``, ``weight`` ``[V, K]``, ``target`` ``[B, T]`` of which no class is ignored, and
the numbers ``N = B * T``, ``T`` and ``V``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LOGITS = "F.linear(hidden, weight)"
ROWS = f"{LOGITS}.view(-1, V)"
CLASSES = "target.view(-1)"

HEADS = {
    "linear": "F.linear(hidden, weight)",
    "matmul with t": "hidden @ weight.t()",
    "matmul with mT": "torch.matmul(hidden, weight.mT)",
    "matmul with permute": "hidden.matmul(weight.permute(1, 0))",
    "einsum": "torch.einsum('btk,vk->btv', hidden, weight)",
    "einsum with an ellipsis": "torch.einsum('...k,vk->...v', hidden, weight)",
    "einsum, the weight first": "torch.einsum('vk,btk->btv', weight, hidden)",
    "inner": "torch.inner(hidden, weight)",
    "tensordot": "torch.tensordot(hidden, weight, dims=([2], [1]))",
    "mm of rows": "hidden.view(-1, hidden.shape[-1]).mm(weight.t()).view(-1, T, V)",
    "addmm": "torch.addmm(weight.new_zeros(V), hidden.flatten(0, 1), weight.t()).view(-1, T, V)",
    "bmm": "torch.bmm(hidden, weight.t().expand(hidden.shape[0], -1, -1))",
    "the other way round": "(weight @ hidden.mT).mT",
    "times one": "F.linear(hidden, weight) * 1.0",
    "divided by one": "F.linear(hidden, weight) / 1",
    "plus nothing": "F.linear(hidden, weight) + 0",
    "converted": "F.linear(hidden, weight).double().contiguous()",
}
"""Of the logits ``[B, T, V]``."""

LOSSES = {
    "cross_entropy": "F.cross_entropy({rows}, {classes})",
    "by keywords": "F.cross_entropy(target={classes}, input={rows}, reduction='mean')",
    "a module": "torch.nn.CrossEntropyLoss()({rows}, {classes})",
    "flatten": "F.cross_entropy({logits}.flatten(0, 1), target.flatten())",
    "classes in the middle": "F.cross_entropy({logits}.transpose(1, 2), target)",
    "permuted": "F.cross_entropy({logits}.permute(0, 2, 1), target)",
    "movedim": "F.cross_entropy({logits}.movedim(-1, 1), target)",
    "the sum, divided": "F.cross_entropy({rows}, {classes}, reduction='sum') / N",
    "each row's, then the mean": "F.cross_entropy({rows}, {classes}, reduction='none').mean()",
    "with an index that is ignored": "F.cross_entropy({rows}, {classes}, ignore_index=-1)",
    "nll_loss": "F.nll_loss(F.log_softmax({rows}, -1), {classes})",
    "nll_loss of a method": "F.nll_loss({logits}.log_softmax(2).view(-1, V), {classes})",
    "the module of nll_loss": "torch.nn.NLLLoss()(torch.nn.LogSoftmax(-1)({rows}), {classes})",
    "special.log_softmax": "F.nll_loss(torch.special.log_softmax({rows}, -1), {classes})",
    "gather": "-{logits}.log_softmax(-1).gather(-1, target.unsqueeze(-1)).mean()",
    "gather as a function": "-torch.gather(F.log_softmax({rows}, 1), 1, {classes}[:, None]).squeeze(1).mean()",
    "take_along_dim": "-torch.take_along_dim({logits}.log_softmax(-1), target[..., None], dim=-1).mean()",
    "an index": "-{rows}.log_softmax(-1)[torch.arange(N), {classes}].mean()",
    "logsumexp less the logit": "(x := {logits}).logsumexp(-1).sub(x.gather(-1, target[..., None])[..., 0]).mean()",
    "the logit less logsumexp": "-((x := {logits}).gather(-1, target[..., None]) - x.logsumexp(-1, True)).mean()",
    "less logsumexp, then gathered": "-((x := {logits}) - x.logsumexp(-1, True)).gather(-1, target[..., None]).mean()",
    "log of the softmax": "-{logits}.softmax(-1).log().gather(-1, target[..., None]).mean()",
    "softmax, gathered, then the log": "-{logits}.softmax(-1).gather(-1, target[..., None]).log().mean()",
    "one-hot targets": "-(F.one_hot(target, V) * {logits}.log_softmax(-1)).sum() / N",
    "probabilities as targets": "F.cross_entropy({rows}, F.one_hot({classes}, V).to(hidden.dtype))",
    "exp, sum and log": "(x := {logits}).exp().sum(-1).log().sub(x.gather(-1, target[..., None])[..., 0]).mean()",
    "chunks": "sum(F.cross_entropy(x, t, reduction='sum') for x, t in zip({rows}.chunk(2), {classes}.chunk(2))) / N",
    "a label smoothing of zero": "F.cross_entropy({rows}, {classes}, label_smoothing=0.0)",
    "the operator": "torch.ops.aten.cross_entropy_loss({rows}, {classes})",
    "negative and mean in one": "torch.neg(torch.mean(F.log_softmax({logits}, 2).gather(2, target[:, :, None])))",
    "weights that are one": "F.cross_entropy({rows}, {classes}, weight=weight.new_ones(V))",
}
"""Of logits, with ``rows`` of them, and ``classes`` of the targets."""

LOSS = {
    **{f"logits by {name}": f"F.cross_entropy(({text}).reshape(-1, V), {CLASSES})" for name, text in HEADS.items()},
    **{f"the loss by {name}": text.format(logits=LOGITS, rows=ROWS, classes=CLASSES) for name, text in LOSSES.items()},
}


_SETUP = """
def fn(hidden, weight, target):
    N, T, V = target.numel(), target.shape[1], weight.shape[0]
    return """


def program(text: str) -> Callable[..., Tensor]:
    """A function of ``hidden, weight, target`` that returns ``text``."""
    names: dict[str, Any] = {"torch": torch, "F": F, "inf": math.inf}
    exec(_SETUP + text, names)
    return names["fn"]
