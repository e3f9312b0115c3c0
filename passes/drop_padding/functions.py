"""Autograd functions of a program's own that compute token by token, in backward too, such as products with weights of
4 bits: their bodies are run on fake tensors that hold another number of tokens."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from glue_compiler.compat.operators import AUTOGRAD_FUNCTION
from glue_compiler.compat.symbols import speculation
from glue_compiler.fx.flow import Refused
from glue_compiler.fx.records import bound_arguments
from glue_compiler.fx.values import tensors_in, value_in

"""(forward body, backward body, operands) → a tuple. Backward takes gradients of it, and what forward saves."""
TOKENS = 4099
"""How many the bodies are run for: a prime, that no size of a model's is a multiple of."""

aten = torch.ops.aten
_PRODUCTS = {aten.mm.default: "self", aten.addmm.default: "mat1"}
"""→ the operand whose rows are the result's."""
_PACKED_PRODUCT = "bitsandbytes::gemm_4bit"
_VIEWS = {
    *(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default),
    *(aten.squeeze.dim, aten.alias.default, aten.detach.default),
}
_EACH = {aten._to_copy.default, aten.clone.default, aten.neg.default, aten.mul.Tensor, aten.add.Tensor}
"""Element by element, of tokens and of what is one number, or one row for all of them."""


def operands_of(node: fx.Node) -> tuple[Any, ...]:
    return node.args[2:]


def is_function(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is AUTOGRAD_FUNCTION


def result_for_tokens(node: fx.Node, place: int, rank_before: int, fake_mode: Any) -> tuple[int, tuple[int, ...]]:
    """Which result of an autograd function has a row for each token of operand ``place``, and the sizes behind those of
    the tokens. Nothing reads the other results.

    Args:
        rank_before: the operand's dimensions that count tokens: ``[B, T, ...]`` has two.

    Raises:
        Refused: a token's result, or its gradient, is not computed from this token alone, or that is not known.
    """
    module = node.graph.owning_module
    forward, backward = (getattr(module, body.target) for body in node.args[:2])  # type: ignore[union-attr, arg-type]
    given = list(map(value_in, operands_of(node)))
    with speculation(fake_mode, fake_mode.shape_env), fake_mode, torch.no_grad(), _ByToken() as mode:
        tokens = given[place] = mode.of_tokens(given[place], rank_before)
        made, saved = mode.run(forward, given)
        users = [user for user in node.users if user.users or user.target is not operator.getitem]
        read = [user.args[1] if user.target is operator.getitem else None for user in users]
        place_made = read[0] if len(set(read)) == 1 else None
        if not isinstance(place_made, int) or not mode.is_token(result := made[place_made]):
            raise Refused("an autograd function gives more than one row for each token")
        if result.shape[:rank_before] != tokens.shape[:rank_before]:
            raise Refused("an autograd function gives tokens in another order")
        # Before 2.13 what it makes on its way is among the results, and backward does not read their gradients.
        given = [mode.of_tokens(result, rank_before, may_be_zeros=True) if each is result else None for each in made]
        gradients = mode.run(backward, [*given, *saved])
        gradient = gradients[place]
        if not isinstance(gradient, Tensor) or not mode.is_token(gradient) or gradient.shape != tokens.shape:
            raise Refused("a gradient of an autograd function is not of one token")
        if not mode.is_zero(gradient):
            raise Refused("an autograd function gives a gradient to a token whose result has none")
        if any(mode.is_token(each) for i, each in enumerate(gradients) if i != place and isinstance(each, Tensor)):
            raise Refused("an autograd function has gradients of tokens for what has none")
    return place_made, tuple(result.shape[rank_before:])


class _ByToken(TorchDispatchMode):
    """Knows which tensors hold a row for each token, and refuses what is not known to keep rows apart.

    And which rows are zeros where those of the gradient are, as a hidden token's.
    """

    def __init__(self) -> None:
        super().__init__()
        self._tokens: dict[int, Tensor] = {}
        self._zeros: set[int] = set()
        self._refused: Refused | None = None

    def is_token(self, tensor: Any) -> bool:
        return id(tensor) in self._tokens

    def is_zero(self, tensor: Any) -> bool:
        return id(tensor) in self._zeros

    def of_tokens(self, like: Tensor, rank_before: int, may_be_zeros: bool = False) -> Tensor:
        sizes = (TOKENS, *[1] * (rank_before - 1), *like.shape[rank_before:])
        made = torch.empty(sizes, dtype=like.dtype, device=like.device)
        self._tokens[id(made)] = made
        if may_be_zeros:
            self._zeros.add(id(made))
        return made

    def run(self, body: Any, given: Sequence[Any]) -> Any:
        try:
            return body(*given)
        except Refused:
            raise
        except Exception as error:
            raise self._refused or Refused(f"an autograd function fails for other rows: {error}") from None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = bound_arguments(func, args, kwargs)
        read = {name for name, each in given.items() if any(map(self.is_token, tensors_in(each)))}
        if read and func.namespace != "prim":  # which asks for devices and the like
            if not _keeps_rows(func, given, read, self.is_token, result):
                self._refused = Refused(f"{func} is not known to compute token by token")
                raise self._refused
            if any(map(self.is_zero, tensors_in(list(given.values())))) and not _is_linear(func, given, self.is_zero):
                self._refused = Refused(f"{func} of a gradient is not linear")
                raise self._refused
            self._tokens[id(result)] = result
            if _keeps_zeros(func, given, self.is_zero):
                self._zeros.add(id(result))
        return result


def _keeps_rows(func: Any, given: dict[str, Any], read: set[str], is_token: Any, result: Any) -> bool:
    if func in _PRODUCTS:
        return read == {_PRODUCTS[func]}
    if func.name() == _PACKED_PRODUCT:
        return read == {"A"}
    if func in _VIEWS:
        return _is_outermost(result)
    if func in _EACH:
        others = [each for each in given.values() if isinstance(each, Tensor) and not is_token(each)]
        return _is_outermost(result) and all(each.dim() <= 1 for each in others) and result.dim() > 1
    return False


def _is_linear(func: Any, given: dict[str, Any], is_zero: Any) -> bool:
    """Of what is zero where the gradient is, among what :func:`_keeps_rows`: rows may be added up before it or behind.

    But for what two bytes of a floating-point number round.
    """
    if func is aten._to_copy.default and (dtype := given.get("dtype")) is not None:
        return bool(dtype.is_floating_point and dtype.itemsize > 1)
    return func is not aten.mul.Tensor or not all(map(is_zero, given.values()))


def _keeps_zeros(func: Any, given: dict[str, Any], is_zero: Any) -> bool:
    """Are a row's results zeros where the rows of the operands are of which ``is_zero`` is true?"""
    if func is aten.mul.Tensor:
        return any(map(is_zero, given.values()))
    if func is aten.add.Tensor:
        return is_zero(given["self"]) and is_zero(given["other"])
    added = [given.get("bias"), given["self"] if func is aten.addmm.default else None]
    read = given.get("A", given.get("mat1", given.get("self")))
    return is_zero(read) and all(each is None for each in added)


def _is_outermost(tensor: Tensor) -> bool:
    sizes = [size for size in tensor.shape if size != 1]
    return bool(sizes) and sizes[0] == TOKENS
