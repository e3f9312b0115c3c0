"""What is written in place of an operator on a padded batch, and what a rule is told to decide it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from glue_compiler.fx.flow import Refused
from glue_compiler.fx.operators import Call, Operators, Value
from glue_compiler.passes.drop_padding.token_facts import Dim, Tokens, counted_part, is_token, size_of


@dataclass(frozen=True)
class Entering:
    """``value``, which is no token's own but has numbers for tokens, taken for those that count.

    Attributes:
        tokens: where, or where it has one number for all of them.
        ignored: of the targets of a loss, the label that is not counted: what hidden tokens must have. None: of others.
    """

    value: Value
    tokens: Tokens
    ignored: int | None = None


@dataclass(frozen=True)
class Count:
    """How many tokens count."""


@dataclass(frozen=True)
class Step:
    """One operator to write. Arguments are numbers, :class:`Count`, :class:`Entering` and values: of those that have
    tokens what was taken of them.

    Attributes:
        results: of each result where tokens are, None if nowhere: then it takes the place of what it was.
    """

    overload: Any
    arguments: Mapping[str, Any]
    results: tuple[Tokens | None, ...]


@dataclass(frozen=True)
class Same:
    """The result is what is taken of an operand already."""

    value: Value
    tokens: Tokens


@dataclass
class Reading:
    """One operator, for its rule.

    Attributes:
        leaf: the result that is meant.
        tokens_of: where tokens are in a value; None: nowhere.
        shows: is a value that is no token's own nonzero exactly where a token is seen, or hidden?
        whole: the tokens of a tensor ``[B, T]``.
        result_shapes: None of a result that is no tensor.
    """

    call: Call
    leaf: int
    operators: Operators
    tokens_of: Callable[[Any], Tokens | None]
    shows: Callable[[Value, Tokens], Literal["seen", "hidden"] | None]
    whole: Tokens
    result_shapes: tuple[tuple[Any, ...] | None, ...]

    def __getitem__(self, name: str) -> Any:
        return self.call.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.call.arguments.get(name, default)

    @property
    def shape(self) -> tuple[Any, ...]:
        found = self.result_shapes[self.leaf]
        if found is None:
            raise Refused("its result is no tensor")
        return found

    def tokens(self, name: str) -> Tokens:
        found = self.tokens_of(self[name])
        if found is None:
            raise Refused(f"tokens are in another operand than '{name}'")
        return found

    def shape_of(self, value: Value) -> tuple[Any, ...]:
        return self.operators.shape(value)

    def require_plain(self, *names: str) -> None:
        for name in names:
            if self.tokens_of(self.get(name)) is not None:
                raise Refused(f"tokens are in '{name}'")

    def entering(self, value: Any, dims: Sequence[Dim], ignored: int | None = None) -> Any:
        """``value``, which is broadcast to a result with tokens in ``dims``."""
        if not self.operators.is_tensor(value):
            return value
        shape = self.shape_of(value)
        shape = (*[1] * (len(dims) - len(shape)), *shape)
        found = Tokens(tuple(dims)).resized(shape)
        has_tokens = False
        for size, dim in zip(shape, dims, strict=True):
            if size == 1 or not any(map(is_token, dim)):
                continue
            # Two inputs of one size may have a symbol each, and the operator asks for equal sizes.
            if isinstance(size, int) != isinstance(size_of(dim), int) or (
                isinstance(size, int) and size != size_of(dim)
            ):
                raise Refused(f"an operand has {size} numbers where {size_of(dim)} tokens are")
            has_tokens = True
        if has_tokens and any(size == 1 and len(dim) > 1 for size, dim in zip(shape, found.dims, strict=True)):
            raise Refused("an operand has one number where tokens are beside something else")
        return Entering(value, found, ignored) if has_tokens else value

    def as_called(self, results: Sequence[Tokens | None], /, **changes: Any) -> Step:
        """The operator itself, out of place, with other arguments."""
        overload, arguments = self.operators.as_called(self.call)
        return Step(overload, {**arguments, **changes}, tuple(results))

    def written(self, overload: Any, result: Tokens, /, **arguments: Any) -> Step:
        return Step(overload, arguments, (result,))


def taken_sizes(tokens: Tokens) -> list[Any]:
    """The sizes of what is taken, for a view."""
    counted = counted_part(tokens)
    sizes: list[Any] = []
    for dim in tokens.dims:
        number: Any = math.prod(part for part in dim if not is_token(part))
        if not isinstance(number, int):
            raise Refused("a size beside those of the tokens is not known when the graph is compiled")
        sizes.append(number if counted not in dim else -1 if number != 1 else Count())
    return sizes


def require_views(tokens: Tokens) -> None:
    """Where tokens share a dimension, they are taken and put back by views, of sizes that must be known."""
    if not tokens.is_split:
        taken_sizes(tokens)
