# Runs a program eagerly and compiled, and compares what can be seen from outside. Self-contained: this text is also the
# last part of each script that shows a failure.
import contextlib
import gc
import time
import warnings
import weakref
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

TOLERANCE = {"float64": 1e-8, "float32": 2e-4, "bfloat16": 5e-2}


def observe(program: dict[str, Any], wrap: Any = None) -> dict[str, Any]:
    """What each call of the program gives, by label: outputs, gradients, inputs afterwards, Python state, leaks."""
    for name in program["COMPILED"] if wrap is not None else ():  # a function may be gone from a smaller program
        program[name] = wrap(program[name]) if name in program else None
    seen: dict[str, Any] = {}
    watched: list[Any] = []
    # Eager's fused kernel on a CPU has wrong gradients for queries whose keys are all hidden by finite numbers.
    kernels = sdpa_kernel(SDPBackend.MATH) if wrap is None else contextlib.nullcontext()
    with warnings.catch_warnings(record=True) as caught, kernels:
        warnings.simplefilter("always")
        run_calls(program, seen, watched)
    # A budget that cannot be kept is drawn on purpose.
    said = {str(w.message) for w in caught if w.category.__name__ == "GlueWarning"}
    seen["warnings"] = sorted(text for text in said if not text.startswith("glue: the memory_budget of"))
    seen["alive afterwards"] = still_alive(watched)
    return seen


def still_alive(watched: list[Any]) -> list[str]:
    """Labels of what has not been freed; a device's thread of autograd lets go of its last gradients a moment later."""
    end = time.monotonic() + (2.0 if torch.cuda.is_initialized() else 0.0)
    if any(ref() is not None for _, ref in watched):
        gc.collect()
    while True:
        alive = sorted(label for label, ref in watched if ref() is not None)
        if not alive or time.monotonic() >= end:
            return alive


def run_calls(program: dict[str, Any], seen: dict[str, Any], watched: list[Any]) -> None:
    inputs: Any = None
    for number, (how, seed, context) in enumerate(program["CALLS"], 1):
        if how == "fresh":
            inputs = program["make"](seed)
        elif how == "refill":
            with torch.no_grad():
                program["refill"](inputs, seed)
        label = f"call {number}: "
        try:
            results = one_call(program["f"], inputs, context, program["between"])
        except Exception as error:
            results = {"error": f"{type(error).__name__}: {error}"}
        watched += [(label + name, weakref.ref(t)) for name, t in results.items() if isinstance(t, torch.Tensor)]
        watched += [(f"{label}input {i}", weakref.ref(t)) for i, t in enumerate(inputs) if isinstance(t, torch.Tensor)]
        for name, value in results.items():
            is_tensor = isinstance(value, torch.Tensor)
            # Not a clone: one of deferred logits waits as they do, and the next call may write what they come from.
            seen[label + name] = torch.stack([value.detach()])[0] if is_tensor else value
            if is_tensor and name.startswith("output"):
                seen[label + name + " requires grad"] = value.requires_grad
        for i, value in enumerate(inputs):
            if isinstance(value, torch.Tensor):
                seen[f"{label}input {i} afterwards"] = value.detach().clone()
        if "STATE" in program:
            seen[label + "STATE"] = repr(program["STATE"])
        del results


def one_call(f: Any, inputs: Any, context: Any, between: Any) -> dict[str, Any]:
    with context():
        outputs = f(*inputs)
    between(outputs, inputs)
    results = {f"output {i}": value for i, value in enumerate(outputs)}
    generator = torch.Generator().manual_seed(0)
    loss: Any = 0
    for value in outputs:
        if isinstance(value, torch.Tensor):
            direction = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        if isinstance(value, torch.Tensor) and value.requires_grad:
            loss = loss + (value.double() * direction.to(value.device)).sum()
    if isinstance(loss, torch.Tensor):
        leaves = [(i, t) for i, t in enumerate(inputs) if isinstance(t, torch.Tensor) and t.requires_grad]
        found = torch.autograd.grad(loss, [t for _, t in leaves], allow_unused=True)
        results |= {f"gradient of input {i}": g for (i, _), g in zip(leaves, found, strict=True)}
    return results


def differences(program: dict[str, Any], expected: dict[str, Any], actual: dict[str, Any]) -> list[str]:
    """What is not the same, in words."""
    found = []
    for label in [*expected, *(label for label in actual if label not in expected)]:
        want, got = expected.get(label), actual.get(label)
        if label == "alive afterwards":
            want, got = [], [name for name in got if name not in want]  # type: ignore[union-attr]
        if label.endswith("error") and want is not None and got is not None:
            continue
        if isinstance(want, torch.Tensor) and isinstance(got, torch.Tensor):
            if reason := tensors_differ(want, got, TOLERANCE[program["PRECISION"]]):
                found.append(f"{label}: {reason}")
        elif label.endswith("requires grad") and got and program["ZERO_FOR_NONE"]:
            continue  # no data selected a parameter; that its gradient is zero is checked
        elif want is None and isinstance(got, torch.Tensor) and program["ZERO_FOR_NONE"] and not got.any():
            continue
        elif want is not got and (isinstance(want, torch.Tensor) or isinstance(got, torch.Tensor) or want != got):
            found.append(f"{label}: eager {shown(want)}, compiled {shown(got)}")
    return found


def tensors_differ(want: torch.Tensor, got: torch.Tensor, tolerance: float) -> str:
    if (want.dtype, tuple(want.shape), want.device) != (got.dtype, tuple(got.shape), got.device):
        return f"eager is {want.dtype} {tuple(want.shape)}, compiled is {got.dtype} {tuple(got.shape)}"
    if not (want.is_floating_point() or want.is_complex()):
        return "" if torch.equal(want, got) else f"eager {shown(want)}, compiled {shown(got)}"
    want, got = want.double(), got.double()
    if bool((got.isnan() & ~want.isnan()).any()):
        return f"eager has {int(want.isnan().sum())} NaN, compiled has {int(got.isnan().sum())}"
    # What is made of NaN may be anything: kernels without a mask give zeros for a query of NaN.
    got = torch.where(want.isnan(), want, got)
    if torch.allclose(got, want, rtol=tolerance, atol=tolerance * max(1.0, largest(want)), equal_nan=True):
        return ""
    return f"off by {largest(got - want):.3g} of {largest(want):.3g}"


def largest(tensor: torch.Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def shown(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) < 200 else text[:200] + "..."
