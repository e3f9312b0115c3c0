"""Fake tensors and symbols."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import sympy
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext

from glue_compiler.compat import saved_tensor_hooks


def fake_mode_of(tensors: Sequence[torch.Tensor]) -> Any | None:
    """The FakeTensorMode that the first fake tensor belongs to, or None.

    Not ``torch._guards.detect_fake_mode``: while a backend runs, that is another mode than the one which Dynamo
    traced with, whose tensors are on the nodes. Both have the same ShapeEnv.
    """
    return next((tensor.fake_mode for tensor in tensors if isinstance(tensor, fake_tensor_type())), None)  # type: ignore[attr-defined]


def is_unbacked(symbol: Any) -> bool:
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(symbol))


def has_unbacked(shape_env: Any) -> bool:
    """Was any size or number of this environment made that data decides?"""
    return any(map(is_unbacked, shape_env.var_to_range))


def unbacked_symbols(value: Any) -> set[Any]:
    """The unbacked sympy symbols in a SymInt, an expression, a tensor's shape, or a nest of those."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return set(free_unbacked_symbols(value))


def allows_sizes_from_data(fake_mode: Any) -> bool:
    """Can operators be traced whose results' sizes depend on data?"""
    return bool(getattr(getattr(fake_mode, "shape_env", None), "allow_dynamic_output_shape_ops", False))


def size_when_traced(size: int | torch.SymInt) -> int | None:
    """What a dynamic size was when its graph was traced; None where it is known only when the graph runs, or ragged."""
    if isinstance(size, int):
        return size
    traced = size.node.hint if size.node.has_hint() else None
    return traced if isinstance(traced, int) else None


def rename_unbacked(shape_env: Any, old: Any, new: Any) -> None:
    """Make the unbacked symbol ``old`` read as ``new`` in every expression of ``shape_env``."""
    shape_env._rename_unbacked_to(old, new)


@contextlib.contextmanager
def speculation(fake_mode: Any, shape_env: Any) -> Iterator[None]:
    """Run operators on fake tensors without leaving guards or unbacked symbols behind.

    Nor do hooks on saved tensors see them: a checkpoint around a first call counts what its forward saves. That one
    fails is an answer, and no news for torch's log.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_unlogged(logging.getLogger("torch._subclasses.fake_tensor")))
        stack.enter_context(saved_tensor_hooks.out_of_sight())
        stack.enter_context(enable_python_dispatcher())  # composites in C++ take no symbolic sizes
        if fake_mode is not None:
            stack.enter_context(fake_mode)
            stack.enter_context(_traced_in(fake_mode))
        if shape_env is not None:
            stack.enter_context(shape_env.suppress_guards())
            stack.enter_context(shape_env.ignore_fresh_unbacked_symbols())
        yield


@contextlib.contextmanager
def _unlogged(logger: logging.Logger) -> Iterator[None]:
    own = threading.get_ident()

    def is_of_others(record: logging.LogRecord) -> bool:
        return record.thread != own

    logger.addFilter(is_of_others)
    try:
        yield
    finally:
        logger.removeFilter(is_of_others)


@contextlib.contextmanager
def _traced_in(fake_mode: Any) -> Iterator[None]:
    """Higher-order operators take the mode of the trace for their functions, and Dynamo has one of its own there."""
    context = TracingContext.try_get()
    if context is None:
        yield
        return
    outer, context.fake_mode = context.fake_mode, fake_mode
    try:
        yield
    finally:
        context.fake_mode = outer


@contextlib.contextmanager
def restored_on_error(shape_env: Any) -> Iterator[None]:
    """Undo what was renamed in ``shape_env`` if the body raises."""
    if shape_env is None:
        yield
        return
    names = ("replacements", "unbacked_renamings", "var_to_range", "replacements_slocs")
    saved = {name: dict(getattr(shape_env, name)) for name in names if hasattr(shape_env, name)}
    try:
        yield
    except BaseException:
        for name, content in saved.items():
            attribute = getattr(shape_env, name)
            attribute.clear()
            attribute.update(content)
        replacements_changed(shape_env)
        raise


def replacements_changed(shape_env: Any) -> None:
    """Tell ``shape_env`` that its table of replacements was edited: what it has simplified is out of date."""
    shape_env._update_version_counter()
    if hasattr(shape_env, "_replacements_version_counter"):  # since 2.13, for the expressions that SymNodes keep
        shape_env._replacements_version_counter += 1


def symbols_version(shape_env: Any) -> Any:
    """Equal at two times if all expressions read the same at both: no symbol was replaced in between."""
    if shape_env is None:
        return None
    names = ("_version_counter", "_replacements_version_counter")
    found = [getattr(shape_env, name) for name in names if hasattr(shape_env, name)]
    return (*found, len(shape_env.replacements)) if found else object()


def has_symbols(tensor: torch.Tensor) -> bool:
    """May a size, a stride or the storage offset be symbolic?"""
    return getattr(tensor, "_has_symbolic_sizes_strides", True)


_NO_BOUND = 2**48


def upper_bound(expression: Any, shape_env: Any) -> int | None:
    """The value of ``expression`` when the graph was captured, or with unbacked symbols the most it can be.

    None: no bound, or no number, as the ragged size of a jagged nested tensor, which is only equal to itself.
    """
    if shape_env is None:
        return None
    value = shape_env.replace(expression)
    if is_unbacked(value):
        bound = shape_env.bound_sympy(value).upper
        # A size that may be as large as another, dynamic one has the largest integer as its bound.
        return int(bound) if bound.is_Integer and bound < _NO_BOUND else None
    traced = value.xreplace(shape_env.backed_var_to_val)
    return int(traced) if traced.is_number else None


def symbol_range(symbol: Any, shape_env: Any) -> str:
    """The values that an unbacked symbol can have, in words that are equal for equal ranges."""
    return str(shape_env.var_to_range.get(symbol)) if shape_env is not None else ""


def lower_bound(expression: Any, shape_env: Any) -> int:
    """The least that ``expression``, a size, can be in a call of the graph."""
    if isinstance(expression, int):
        return expression
    if shape_env is None:
        return 0
    bound = shape_env.bound_sympy(shape_env.replace(sympy.sympify(expression))).lower
    return int(bound) if bound.is_Integer else 0


def may_be_equal(first: Any, second: Any, shape_env: Any) -> bool:
    """Can two expressions of unbacked symbols be equal, as far as the symbols' ranges tell?"""
    return is_unbacked(first - second) and 0 in shape_env.bound_sympy(first - second)


@functools.cache
def fake_tensor_type() -> type:
    from torch._subclasses.fake_tensor import FakeTensor

    return FakeTensor


def is_functorch_wrapped(tensor: torch.Tensor) -> bool:
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def is_real(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, fake_tensor_type()) and tensor.device.type != "meta"


def known_number(tensor: torch.Tensor) -> int | float | bool | None:
    """The number that a tensor of one element, made while tracing, is known to hold; None if it is not known."""
    from torch.utils._python_dispatch import _disable_current_modes

    value = getattr(tensor, "constant", None) if isinstance(tensor, fake_tensor_type()) else tensor
    if value is None or is_functorch_wrapped(value) or value.is_meta or value.numel() != 1:
        return None
    with _disable_current_modes():
        number = value.item()
    return number if isinstance(number, int | float) else None
