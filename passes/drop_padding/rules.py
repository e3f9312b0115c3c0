"""Which operators compute each token from values of this token alone, and how they are written for rows of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from glue_compiler.fx.flow import CONVERSIONS, Refused
from glue_compiler.fx.operators import Value
from glue_compiler.fx.values import leaves
from glue_compiler.passes.drop_padding.steps import Entering, Reading, Same, Step, taken_sizes
from glue_compiler.passes.drop_padding.token_facts import (
    Dim,
    Span,
    Tokens,
    behind,
    broadcast,
    is_equal,
    is_token,
    plain,
    regrouped,
)

aten = torch.ops.aten

Rule = Callable[[Reading], Step | Same]


def rule_of(made: Reading) -> Rule | None:
    """None: the operator is not known to compute token by token."""
    tags = made.call.recorded.overload.tags
    is_elementwise = torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
    return RULES.get(made.call.operator, _elementwise if is_elementwise else None)


# -- element by element

_KEEP_ZERO = {
    *CONVERSIONS, aten.clone, aten.contiguous, aten.detach, aten.alias, aten.neg, aten.abs, aten.relu, aten.tanh,
    aten.silu, aten.gelu, aten.sign, aten.dropout,
}  # fmt: skip


def _elementwise(made: Reading) -> Step:
    _, given = made.operators.as_called(made.call)
    values = [each for each in leaves(list(given.values())) if isinstance(each, Value)]
    found = [tokens for each in values if (tokens := made.tokens_of(each)) is not None]
    dims = broadcast(found, len(made.shape))

    def argument(value: Any) -> Any:
        if not isinstance(value, Value) or made.tokens_of(value) is not None:
            return value
        return made.entering(value, dims)

    changes = {name: fx.node.map_aggregate(value, argument) for name, value in given.items()}
    entering = [each for each in leaves(list(changes.values())) if isinstance(each, Entering)]
    result = Tokens(_result_dims(dims, made.shape), _is_zero(made, found, entering))
    return made.as_called([result] * len(made.result_shapes), **changes)


def _result_dims(dims: list[Dim], shape: tuple[Any, ...]) -> tuple[Dim, ...]:
    return tuple(dim or plain(size) for dim, size in zip(dims, shape, strict=True))


def _is_zero(made: Reading, found: list[Tokens], entering: list[Entering]) -> bool:
    operator = made.call.operator
    if operator is aten.mul:
        return any(each.is_zero for each in found) or any(made.shows(e.value, e.tokens) == "seen" for e in entering)
    if operator is aten.where:
        shown = next((made.shows(e.value, e.tokens) for e in entering if e.value == made["condition"]), None)
        replaced = {"seen": "other", "hidden": "self"}.get(shown or "", "")
        return bool(replaced) and _is_number_zero(made[replaced])
    if operator is aten.add:
        return not entering and len(found) == 2 and all(each.is_zero for each in found)
    return operator in _KEEP_ZERO and all(each.is_zero for each in found)


def _is_number_zero(value: Any) -> bool:
    return isinstance(value, int | float) and value == 0


def _same_numbers(made: Reading) -> Step:
    """A copy or a conversion of the first operand."""
    return made.as_called([made.tokens("self")])


def _dropout(made: Reading) -> Step:
    if made["p"] != 0 and made["train"]:
        raise Refused("dropout would draw other random numbers for each element")
    return made.as_called([made.tokens("input")])


# -- views


def _view(made: Reading) -> Step:
    result = regrouped(made.tokens("self"), made.shape)
    if result is None:
        raise Refused("a view takes rows and tokens of the batch apart")
    return made.written(aten.reshape.default, result, self=made["self"], shape=taken_sizes(result))


def _permute(made: Reading) -> Step:
    tokens = made.tokens("self")
    dims = [dim % len(tokens.dims) for dim in made["dims"]]
    result = tokens.with_dims(tokens.dims[dim] for dim in dims)
    return made.written(aten.permute.default, result, self=made["self"], dims=dims)


def _expand(made: Reading) -> Step:
    tokens = made.tokens("self")
    new = len(made.shape) - len(tokens.dims)
    dims = [*map(plain, made.shape[:new]), *tokens.resized(made.shape[new:]).dims]
    result = tokens.with_dims(dims)
    sizes = [-1 if any(map(is_token, dim)) else size for dim, size in zip(dims, made.shape, strict=True)]
    if not all(isinstance(size, int) for size in sizes):
        raise Refused("a size beside those of the tokens is not known when the graph is compiled")
    return made.written(aten.expand.default, result, self=made["self"], size=sizes)


def _slice(made: Reading) -> Step | Same:
    tokens = made.tokens("self")
    dim = made["dim"] % len(tokens.dims)
    size = made.shape[dim]
    if is_equal(size, tokens.shape[dim]) and made["step"] == 1:
        return Same(made["self"], tokens)
    if not tokens.holds(dim):
        result = tokens.with_dims((*tokens.dims[:dim], plain(size), *tokens.dims[dim + 1 :]))
        return made.written(aten.slice.Tensor, result, self=made["self"], dim=dim, **_bounds(made))
    match tokens.dims[dim]:
        case (Span() as span,) if made["step"] == 1 and not _is_few(size, span.size):
            start = made["start"] or 0
            kept = Span(span.start + (start if start >= 0 else max(span.size + start, 0)), size)
            if not isinstance(kept.start, int) or behind(kept, made.whole.span.size) is None:
                raise Refused("where a slice of the tokens ends is not known when the graph is compiled")
            return Same(made["self"], tokens.with_dims((*tokens.dims[:dim], (kept,), *tokens.dims[dim + 1 :])))
    raise Refused("a slice of the tokens")


def _is_few(size: Any, of: Any) -> bool:
    """Then the others are not computed at all."""
    return isinstance(size, int) and (size == 1 or not isinstance(of, int) or 2 * size < of)


def _bounds(made: Reading) -> dict[str, Any]:
    found = {name: made[name] for name in ("start", "end", "step")}
    if not all(each is None or isinstance(each, int) for each in found.values()):
        raise Refused("the bounds of a slice are not known when the graph is compiled")
    return found


def _select(made: Reading) -> Step:
    tokens = made.tokens("self")
    dim = _plain_dims(made, tokens)[0]
    if not isinstance(made["index"], int):
        raise Refused("an index is not known when the graph is compiled")
    result = tokens.with_dims((*tokens.dims[:dim], *tokens.dims[dim + 1 :]))
    return made.written(aten.select.int, result, self=made["self"], dim=dim, index=made["index"])


# -- over dimensions without tokens


def _plain_dims(made: Reading, tokens: Tokens, given: Any = None) -> list[int]:
    """The dimensions that the operator works over, of a value with ``tokens``."""
    given = made.get("dim") if given is None else given
    if given is None or given == ():
        raise Refused("it is computed over all dimensions, those of the tokens among them")
    dims = [dim % max(len(tokens.dims), 1) for dim in (given if isinstance(given, tuple) else (given,))]
    if any(tokens.holds(dim) for dim in dims):
        raise Refused("it is computed over a dimension of the tokens")
    return dims


def _along(made: Reading) -> Step:
    """A function of a dimension, such as softmax, which may change its size."""
    tokens = made.tokens("self")
    _plain_dims(made, tokens)
    return made.as_called([tokens.resized(shape) for shape in made.result_shapes])


def _reduction(made: Reading) -> Step:
    tokens = made.tokens("self")
    gone = _plain_dims(made, tokens)
    if made.get("keepdim", False):
        dims = [() if i in gone else dim for i, dim in enumerate(tokens.dims)]
    else:
        dims = [dim for i, dim in enumerate(tokens.dims) if i not in gone]
    keeps_zero = tokens.is_zero and made.call.operator in (aten.sum, aten.mean)
    return made.as_called([Tokens(tuple(dims), keeps_zero)] * len(made.result_shapes))


def _norm(made: Reading) -> Step:
    tokens = made.tokens("input")
    made.require_plain("weight", "bias")
    last = len(made["normalized_shape"])
    _plain_dims(made, tokens, tuple(range(-last, 0)))
    return made.as_called([Tokens(tokens.dims)])


def _pad(made: Reading) -> Step:
    tokens = made.tokens("self")
    padded = made["pad"]
    for place in range(len(padded) // 2):
        if tokens.holds(len(tokens.dims) - 1 - place) and padded[2 * place : 2 * place + 2] != (0, 0):
            raise Refused("tokens are padded")
    return made.as_called([tokens.resized(made.shape)])


def _joined(made: Reading) -> Step:
    """``cat`` and ``stack``."""
    values = made["tensors"]
    found = [tokens for each in values if (tokens := made.tokens_of(each)) is not None]
    rank = len(found[0].dims)
    if any(len(made.shape_of(each)) != rank for each in values):
        raise Refused("it joins tensors of different ranks")
    dims = broadcast(found, rank)
    is_new = made.call.operator is aten.stack
    dim = made["dim"] % (rank + is_new)
    if not is_new and any(map(is_token, dims[dim])):
        raise Refused("tokens are put behind each other")
    tensors = tuple(each if made.tokens_of(each) is not None else made.entering(each, dims) for each in values)
    if is_new:
        dims.insert(dim, ())
    is_zero = len(found) == len(values) and all(each.is_zero for each in found)
    return made.as_called([Tokens(_result_dims(dims, made.shape), is_zero)], tensors=tensors)


def _gather(made: Reading) -> Step:
    tokens = made.tokens("self")
    _plain_dims(made, tokens)
    index, of_index = made["index"], made.tokens_of(made["index"])
    if of_index is None:
        index = made.entering(index, tokens.dims)
        own = [size for i, size in enumerate(made.shape_of(made["index"])) if tokens.holds(i)]
        if own != [size for i, size in enumerate(tokens.shape) if tokens.holds(i)]:
            raise Refused("its index is not one of each token")
    else:
        broadcast([tokens, of_index], len(tokens.dims))
    return made.as_called([tokens.resized(made.shape)], index=index)


# -- products


def _linear(made: Reading) -> Step:
    tokens = made.tokens("input")
    made.require_plain("weight", "bias")
    _plain_dims(made, tokens, (-1,))
    dims = (*tokens.dims[:-1], *([plain(made.shape[-1])] if len(made.shape) == len(tokens.dims) else []))
    return made.as_called([Tokens(dims, tokens.is_zero and made["bias"] is None)])


def _addmm(made: Reading) -> Step:
    tokens = made.tokens("mat1")
    made.require_plain("mat2")
    _plain_dims(made, tokens, (-1,))
    dims = (tokens.dims[0], plain(made.shape[-1]))
    added = made["self"]
    if made.tokens_of(added) is None and isinstance(added, Value):
        added = made.entering(added, dims)
    return made.as_called([Tokens(dims)], self=added)


def _matmul(made: Reading) -> Step:
    first, second = (made.tokens_of(made[name]) for name in ("self", "other"))
    ranks = [len(made.shape_of(made[name])) for name in ("self", "other")]
    if min(ranks) < 2:
        raise Refused("a product with a vector")
    both = first is not None and second is not None
    for tokens, summed, own in ((first, -1, -2), (second, -2, -1)):
        if tokens is not None:
            _plain_dims(made, tokens, (summed, own) if both else (summed,))
    rank = len(made.shape)
    found = [t.with_dims([*t.dims[:-2], *_last(t, i)]) for i, t in enumerate((first, second)) if t is not None]
    dims = broadcast(found, rank)
    for name, tokens, shape_rank in zip(("self", "other"), (first, second), ranks, strict=True):
        if tokens is None:
            batch = made.shape_of(made[name])[:-2]
            places = dims[rank - shape_rank : rank - 2]
            if any(size != 1 and any(map(is_token, dim)) for size, dim in zip(batch, places, strict=True)):
                raise Refused("a product with a matrix of each token that is no token's own")
    return made.as_called([Tokens(_result_dims(dims, made.shape))])


def _last(tokens: Tokens, side: int) -> list[Dim]:
    """The last two dimensions of a product that an operand gives one of."""
    return [tokens.dims[-2], ()] if side == 0 else [(), tokens.dims[-1]]


def _embedding(made: Reading) -> Step:
    """Of ids ``[B, T]`` tokens are in its result from here on."""
    made.require_plain("weight")
    if made["scale_grad_by_freq"]:
        raise Refused("its gradients are scaled by how often ids are there, those of padding among them")
    tokens, changes = made.tokens_of(made["indices"]), {}
    if tokens is None:
        tokens = made.whole
        changes["indices"] = Entering(made["indices"], tokens)
    return made.as_called([Tokens((*tokens.dims, plain(made.shape[-1])))], **changes)


def begins(made: Reading) -> bool:
    """Is it an operator with which tokens come into a graph?"""
    return made.call.operator is aten.embedding and made.shape[:-1] == made.whole.shape


# -- losses


def _cross_entropy(made: Reading) -> Step:
    """Rows whose label is ignored add nothing: only those of hidden tokens are left out, if that is asserted."""
    tokens = made.tokens("self")
    made.require_plain("target", "weight")
    classes = 1 if len(tokens.dims) > 1 else 0
    _plain_dims(made, tokens, (classes,))
    target = made["target"]
    dims = [dim for i, dim in enumerate(tokens.dims) if i != classes]
    if made.operators.dtype(target) != torch.int64 or len(made.shape_of(target)) != len(dims):
        raise Refused("its targets are no labels")
    entering = made.entering(target, dims, made["ignore_index"])
    if not isinstance(entering, Entering):
        raise Refused("it has one label for all tokens")
    is_each = made["reduction"] == 0
    return made.as_called([Tokens(tuple(dims), True) if is_each else None], target=entering)


RULES: dict[Any, Rule] = {
    **dict.fromkeys((*CONVERSIONS, aten.clone, aten.contiguous, aten.detach, aten.alias), _same_numbers),
    aten.where: _elementwise,
    aten.dropout: _dropout,
    **dict.fromkeys((aten.view, aten.unsqueeze, aten.squeeze, aten.unflatten), _view),
    aten.permute: _permute,
    aten.expand: _expand,
    aten.slice: _slice,
    aten.select: _select,
    **dict.fromkeys(
        (aten.softmax, aten.log_softmax, aten.cumsum, aten.topk, aten.sort), _along
    ),
    **dict.fromkeys(
        (aten.sum, aten.mean, aten.amax, aten.amin, aten.max, aten.min, aten.argmax, aten.argmin, aten.logsumexp,
         aten.var, aten.std, aten.linalg_vector_norm, aten.norm, aten.any, aten.all, aten.prod),
        _reduction,
    ),
    **dict.fromkeys((aten.layer_norm, aten.rms_norm), _norm),
    **dict.fromkeys((aten.pad, aten.constant_pad_nd), _pad),
    **dict.fromkeys((aten.cat, aten.stack), _joined),
    aten.gather: _gather,
    aten.linear: _linear,
    aten.addmm: _addmm,
    aten.matmul: _matmul,
    aten.embedding: _embedding,
    aten.cross_entropy_loss: _cross_entropy,
}  # fmt: skip
