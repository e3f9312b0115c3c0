"""What is written in place of an operator on a padded batch, and what a rule is told to decide it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from glue_compiler.fx.flow import Refused
from glue_compiler.fx.operators import Call, Operators, Value
from glue_compiler.passes.drop_padding.token_facts import Dim, Span, Tokens, is_equal, is_token, plain, size_of, size_of_part


@dataclass(frozen=True)
class Entering:
    """``value``, which is no token's own but has numbers for tokens, taken for those that count.

    Attributes:
        tokens: where; of a value that is broadcast over the rows of the batch without these.
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
    result_shapes: tuple[tuple[Any, ...] | None, ...] = field(default=())

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
        return self.operators.meta(value).shape

    def require_plain(self, *names: str) -> None:
        for name in names:
            if self.tokens_of(self.get(name)) is not None:
                raise Refused(f"tokens are in '{name}'")

    def entering(self, value: Value, dims: Sequence[Dim], ignored: int | None = None) -> Any:
        """``value`` beside what has tokens in ``dims``, which are those of as many dimensions as it has."""
        if not self.operators.is_tensor(value):
            return value
        found: list[Dim] = []
        for size, dim in zip(self.shape_of(value), dims, strict=True):
            if not any(map(is_token, dim)) or size == 1:
                found.append(plain(size))
            elif is_equal(size, size_of(dim)) or not (isinstance(size, int) or isinstance(size_of(dim), int)):
                # Two inputs of one size may have a symbol each, and the operator asks for equal sizes.
                found.append(dim)
            else:
                raise Refused(f"an operand has {size} numbers where {size_of(dim)} tokens are")
        parts = [part for dim in found for part in dim if is_token(part)]
        if not parts:
            return value
        if not any(isinstance(part, Span) for part in parts):  # one number for all tokens of a row
            place = next((i for i, dim in enumerate(dims) if len(dim) == 1 and isinstance(dim[0], Span)), None)
            if place is None:
                raise Refused("an operand has a number for each row of the batch")
            found[place] = dims[place]
        return Entering(value, Tokens(tuple(found)), ignored)

    def as_called(self, results: Sequence[Tokens | None], /, **changes: Any) -> Step:
        """The operator itself, out of place, with other arguments."""
        overload, arguments = self.operators.as_called(self.call)
        return Step(overload, {**arguments, **changes}, tuple(results))

    def written(self, overload: Any, result: Tokens, /, **arguments: Any) -> Step:
        return Step(overload, arguments, (result,))


def taken_sizes(tokens: Tokens) -> list[Any]:
    """The sizes of what is taken, for a view."""
    sizes: list[Any] = []
    for dim in tokens.dims:
        others = [size_of_part(part) for part in dim if not is_token(part)]
        number: Any = 1
        for each in others:
            number = number * each
        has_span = any(isinstance(part, Span) for part in dim)
        if not isinstance(number, int):
            raise Refused("a size beside those of the tokens is not known when the graph is compiled")
        sizes.append(-1 if has_span and number != 1 else Count() if has_span else number)
    return sizes
