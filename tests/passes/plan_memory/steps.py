"""Steps as plain data: a chain of layers, each a product and two values that a compiler fuses."""

from __future__ import annotations

from glue_compiler.ops.device_rates import Rates
from glue_compiler.passes.plan_memory.step import Step, Value

RATES = Rates(flops=1e12, memory=1e9, link=1e8)
MIB = 2**20


def chain(layers: int, product_seconds: float = 0.01, may_recompute: bool = True) -> Step:
    """Each layer is ``wide = product(x)``, ``bent = f(wide)``, ``x = x + narrow(bent)``; ``wide`` and ``bent`` are four
    times as large as ``x``, which is of 1 MiB. Backward needs ``wide``, ``bent`` and ``x``."""
    values = [Value((), 0, 0, 0.0, is_input=True)]
    values.append(Value((0,), 1, MIB, 1e-3, is_kernel=True))
    needed = []
    x = 1
    for _ in range(layers):
        wide = len(values)
        values.append(Value((x,), wide, 4 * MIB, product_seconds, is_kernel=True, may_recompute=may_recompute))
        values.append(Value((wide,), wide + 1, 4 * MIB, 1e-4))
        values.append(Value((wide + 1,), wide + 2, MIB, product_seconds, is_kernel=True))
        values.append(Value((x, wide + 2), wide + 3, MIB, 1e-4))
        needed.append((x, wide, wide + 1))
        x = wide + 3
    forward = tuple(range(len(values)))
    gradient = len(values)
    values.append(Value((), gradient, 0, 0.0, is_input=True, is_backward=True))
    for read in reversed(needed):
        place = len(values)
        values.append(Value((gradient, *read), place, MIB, product_seconds, is_kernel=True, is_backward=True))
        gradient = place
    return Step(tuple(values), forward, (x,), (gradient,), 0, {})
