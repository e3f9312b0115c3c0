"""How far results are from each other, and how far they may be."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from glue_compiler.pipeline.results import Numerics

# What rounding explains at once, relative to an element and to the typical one of its tensor.
_ROUNDING = {torch.float64: 1e-10, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# The same for whole tensors, where no fp64 reference can be had: many roundings, one after the other.
_MANY_ROUNDINGS = 50.0
# Or: a rewritten graph may be so many times as far from the fp64 reference as the graph before (root mean square, and
# largest). Rounding is luck; a wrong rewrite is off by the size of the values.
_TIMES_AS_FAR = (4.0, 10.0)


@dataclass(frozen=True)
class Mismatch:
    """One result that differs by more than it may.

    Attributes:
        name: ``"output 2"``, ``"gradient of input x"``, ``"input cache after the call"``.
        reason: how far it is off, or what else differs (shape, dtype), for people.
        error: the largest difference of two elements; infinity where there is none to measure.
    """

    name: str
    reason: str
    error: float


@dataclass(frozen=True)
class Named:
    """A result: a tensor, or any other value that a graph returned (None stands for a gradient that is zero)."""

    name: str
    value: Any


def find_mismatch(
    expected: Sequence[Named],
    actual: Sequence[Named],
    numerics: Numerics,
    exact: Callable[[], Sequence[Named] | None] = lambda: None,
) -> Mismatch | None:
    """The first result that differs by more than ``numerics`` allows; None if there is none.

    ``BITWISE``: every bit, where NaN equals NaN. ``CLOSE``: within the rounding of the dtype; beyond that, ``actual``
    may be as far from ``exact()``, the same results computed in fp64, as ``expected`` is, within a factor. ``exact`` is
    called where it is needed, and once; it gives None where there is no such reference.
    """
    if len(expected) != len(actual):
        return Mismatch("outputs", f"{len(expected)} results before glue, {len(actual)} after", float("inf"))
    references = functools.cache(exact)
    for number, (before, after) in enumerate(zip(expected, actual, strict=True)):

        def reference(number: int = number) -> Any:
            found = references()
            return found[number].value if found is not None and len(found) == len(expected) else None

        if found := _mismatch(before, after, numerics, reference):
            return found
    return None


def _mismatch(before: Named, after: Named, numerics: Numerics, reference: Callable[[], Any]) -> Mismatch | None:
    old, new = _as_tensors(before.value, after.value)
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        equal = type(old) is type(new) and (isinstance(old, torch.Tensor) or old == new or old != old)
        return (
            None if equal else Mismatch(before.name, f"{before.value!r} before glue, {after.value!r} after", _INFINITY)
        )
    if (old.shape, old.dtype, old.device, old.layout) != (new.shape, new.dtype, new.device, new.layout):
        kinds = [f"{t.layout} {t.dtype}{list(t.shape)} on {t.device}" for t in (old, new)]
        return Mismatch(before.name, f"{kinds[0]} before glue, {kinds[1]} after", _INFINITY)
    if old.layout is not torch.strided:
        old, new = old.to_dense(), new.to_dense()
    if torch.equal(old, new) or _same_bits(old, new):
        return None
    if not (old.is_floating_point() or old.is_complex()):
        wrong = int((old != new).sum())
        return Mismatch(before.name, f"{wrong} of {old.numel()} elements differ", float(wrong))
    wide_old, wide_new = _wide(old), _wide(new)
    error = _largest(wide_new - wide_old)
    shown = f"differs by up to {error:.3g}, where values are up to {_largest(wide_old):.3g}"
    if numerics is Numerics.BITWISE:
        return Mismatch(before.name, f"{shown}; it must be the same bits", error)
    rounding = _ROUNDING.get(old.dtype.to_real(), _ROUNDING[torch.bfloat16])
    if not _is_finite_alike(wide_old, wide_new):
        return Mismatch(before.name, "NaN or infinity in other places", _INFINITY)
    finite = torch.isfinite(wide_old)
    wide_old, wide_new = wide_old[finite], wide_new[finite]
    difference = (wide_new - wide_old).abs()
    if bool((difference <= rounding * (wide_old.abs() + _rms(wide_old))).all()):
        return None
    exact = reference()
    if not isinstance(exact, torch.Tensor) or exact.shape != old.shape:
        allowed = _MANY_ROUNDINGS * rounding * _rms(wide_old)
        return None if _rms(difference) <= allowed else Mismatch(before.name, shown, error)
    wide_exact = _wide(exact)[finite]
    for measure, times in zip((_rms, _largest), _TIMES_AS_FAR, strict=True):
        of_before, of_after = measure(wide_old - wide_exact), measure(wide_new - wide_exact)
        if not of_after <= times * of_before + rounding * measure(wide_exact):
            shown += f"; its error against fp64 is {of_after:.3g}, that of the graph before {of_before:.3g}"
            return Mismatch(before.name, shown, error)
    return None


_INFINITY = float("inf")


def _as_tensors(old: Any, new: Any) -> tuple[Any, Any]:
    """A gradient that one side left out is zero."""
    if old is None and isinstance(new, torch.Tensor):
        return torch.zeros_like(new), new
    if new is None and isinstance(old, torch.Tensor):
        return old, torch.zeros_like(old)
    return old, new


def _same_bits(old: torch.Tensor, new: torch.Tensor) -> bool:
    return bool(torch.all((old == new) | ((old != old) & (new != new))))


def _is_finite_alike(old: torch.Tensor, new: torch.Tensor) -> bool:
    """NaN and infinity in the same places."""
    finite = torch.isfinite(old)
    return torch.equal(finite, torch.isfinite(new)) and _same_bits(old[~finite], new[~finite])


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _rms(tensor: torch.Tensor) -> float:
    return float(tensor.abs().square().mean().sqrt()) if tensor.numel() else 0.0
