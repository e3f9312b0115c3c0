"""The ways in which Python may write one call: method or function, positional or by keyword, ``dim`` or ``axis``."""

from __future__ import annotations

from tools.fuzz.draw import Draw

_OPERATORS = {
    "eq": ("==", "eq"),
    "ne": ("!=", "ne"),
    "lt": ("<", "gt"),
    "le": ("<=", "ge"),
    "gt": (">", "lt"),
    "ge": (">=", "le"),
    "bitwise_and": ("&", "bitwise_and"),
    "bitwise_or": ("|", "bitwise_or"),
    "add": ("+", "add"),
    "mul": ("*", "mul"),
}
_WITH_ALPHA = ("add", "sub")


def binary(draw: Draw, name: str, left: str, right: str) -> str:
    """A comparison, a sum, a product; both operands tensors, or the right one a number."""
    symbol, swapped = _OPERATORS[name]
    choice = draw.mostly(0, 5, 6, 7, 8, 9)
    if choice < 5:
        return f"({left} {symbol} {right})"
    if choice == 5:
        return f"({right} {_OPERATORS[swapped][0]} {left})"
    if choice == 6:
        return f"torch.{name}({left}, {right})"
    if choice == 7:
        return f"torch.{name}(other={right}, input={left})"
    if choice == 8:
        return f"{_wrapped(left)}.{name}({right})"
    return f"{_wrapped(left)}.{name}(other={right})"


def along(draw: Draw, name: str, operand: str, dim: int, *, further: str = "", plain: str = "") -> str:
    """``cumsum``, ``sum``, ``argsort``, ...: a call that takes a dimension; ``further`` keywords follow.

    ``plain``: the arguments in front of the dimension, as ``topk`` has one.
    """
    first = f"{plain}, " if plain else ""
    end = f", {further}" if further else ""
    choice = draw.mostly(0, *range(10))
    if choice < 3:
        return f"{_wrapped(operand)}.{name}({first}{dim}{end})"
    if choice < 5:
        return f"{_wrapped(operand)}.{name}({first}dim={dim}{end})"
    if choice == 5:
        return f"torch.{name}({operand}, {first}{dim}{end})"
    if choice == 6:
        return f"torch.{name}({operand}, {first}dim={dim}{end})"
    if choice == 7 and not plain:
        return f"torch.{name}(input={operand}, dim={dim}{end})"
    if choice == 8:
        return f"{_wrapped(operand)}.{name}({first}axis={dim}{end})"
    return f"torch.{name}({operand}, {first}axis={dim}{end})"


def softmax(draw: Draw, operand: str, dims: int) -> str:
    dim = draw.pick(-1, -1, -1, dims - 1)
    return draw.mostly(
        f"F.softmax({operand}, dim={dim})",
        f"F.softmax({operand}, {dim})",
        f"torch.softmax({operand}, {dim})",
        f"torch.softmax(input={operand}, dim={dim})",
        f"{_wrapped(operand)}.softmax({dim})",
        f"{_wrapped(operand)}.softmax(dim={dim})",
        f"torch.nn.Softmax(dim={dim})({operand})",
        f"F.softmax({operand}, dim={dim}, dtype=FLOAT)",
        f"torch.softmax({operand}, axis={dim})",
    )


def where(draw: Draw, condition: str, yes: str, no: str, *, tensors: bool = True) -> str:
    """``tensors``: both values are tensors (a method needs one)."""
    options = [f"torch.where({condition}, {yes}, {no})"] * 3
    options.append(f"torch.where(condition={condition}, input={yes}, other={no})")
    if tensors:
        options += [
            f"{_wrapped(yes)}.where({condition}, {no})",
            f"{_wrapped(yes)}.where(condition={condition}, other={no})",
        ]
    return draw.pick(*options)


def no_dropout(draw: Draw, operand: str) -> str:
    """Dropout that keeps all."""
    return draw.pick(
        f"F.dropout({operand}, p=0.0, training=True)",
        f"F.dropout({operand}, 0.0)",
        f"F.dropout({operand}, 0.5, False)",
        f"F.dropout({operand}, p=0.5, training=False)",
        f"torch.dropout({operand}, 0.0, True)",
        f"torch.dropout({operand}, 0.5, train=False)",
        f"torch.dropout(input={operand}, p=0.5, train=False)",
        f"torch.dropout({operand}, p=0.0, train=True)",
    )


def transposed(draw: Draw, operand: str) -> str:
    """The last two of four dimensions."""
    base = _wrapped(operand)
    return draw.mostly(
        f"{base}.transpose(2, 3)",
        f"{base}.transpose(-1, -2)",
        f"{base}.mT",
        f"torch.transpose({operand}, dim0=2, dim1=3)",
        f"{base}.permute(0, 1, 3, 2)",
        f"{base}.swapaxes(-2, -1)",
    )


def product(draw: Draw, left: str, right: str) -> str:
    return draw.mostly(
        f"torch.matmul({left}, {right})",
        f"({left} @ {right})",
        f"{_wrapped(left)}.matmul({right})",
        f"torch.matmul(input={left}, other={right})",
        f"torch.matmul(other={right}, input={left})",
        f"torch.einsum('bhqd,bhdk->bhqk', {left}, {right})",
    )


def inverted(draw: Draw, operand: str) -> str:
    """Of booleans."""
    return draw.mostly(
        f"(~{operand})", f"torch.logical_not({operand})", f"({operand} == False)", f"{operand}.logical_not()"
    )


def _wrapped(expression: str) -> str:
    return expression if expression.isidentifier() or expression.endswith((")", "]")) else f"({expression})"
