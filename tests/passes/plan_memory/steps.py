"""Steps as plain data: a chain of layers, each a product and two values that a compiler fuses."""

from __future__ import annotations

from glue_compiler.ops.device_rates import Rates
from glue_compiler.passes.plan_memory.step import TrainingStep, Value

RATES = Rates(flops=1e12, memory=1e9, link=1e8)
MIB = 2**20


def chain(layers: int, product_seconds: float = 0.01, may_recompute: bool = True) -> TrainingStep:
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
    return TrainingStep(tuple(values), forward, (x,), (gradient,), 0, {})


def decoder_layer(seconds: float = 0.2) -> TrainingStep:
    """One layer, alone: three products of its input, attention of them, which returns its result and a small value as a
    list, a product of that, ``x`` added, and behind that two wide products and a narrow one. Backward needs all that
    products read or write. ``seconds``: of each product and of attention, beside which ``RATES`` copy 20 MiB."""
    values = [Value((), 0, 0, 0.0, is_input=True)]

    def add(*read: int, mib: float = 1, takes: float = 1e-4, **kind: bool) -> int:
        values.append(Value(read, len(values), int(mib * MIB), takes, **kind))
        return len(values) - 1

    def product(*read: int, mib: float = 1, **kind: bool) -> int:
        return add(*read, mib=mib, takes=seconds, is_kernel=True, **kind)

    bent = add(0)
    q, k, v = (product(bent) for _ in range(3))
    attention = product(q, k, v, mib=0, is_tuple=True)
    result, sums = add(attention), add(attention, mib=0.01)
    between = add(0, product(result))
    normed = add(between)
    gate, up = product(normed, mib=3), product(normed, mib=3)
    gated = add(gate, up, mib=3)
    returned = add(between, product(gated))
    forward = tuple(range(len(values)))
    gradient = add(mib=0, is_input=True, is_backward=True)
    for needed in ((gated,), (gate, up), (normed,), (between, result), (q, k, v, result, sums), (bent,)):
        values.append(Value((gradient, *needed), len(values), MIB, seconds, is_kernel=True, is_backward=True))
        gradient = len(values) - 1
    return TrainingStep(tuple(values), forward, (returned,), (gradient,), 0, {})
