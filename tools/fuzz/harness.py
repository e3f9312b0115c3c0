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

UNSPOILED = "without what spoils the inputs"
TOLERANCE = {"float64": 1e-8, "float32": 2e-4, "bfloat16": 5e-2}


def observe(program: dict[str, Any], wrap: Any = None) -> dict[str, Any]:
    """What each call of the program gives, by label: outputs, gradients, inputs afterwards, Python state, leaks."""
    for name in program["COMPILED"] if wrap is not None else ():  # a function may be gone from a smaller program
        program[name] = wrap(program[name]) if name in program else None
    seen: dict[str, Any] = {}
    watched: list[Any] = []
    with contextlib.ExitStack() as stack:
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        for setting in program["SETTINGS"]:
            stack.enter_context(setting())
        if wrap is None:
            # Eager's fused kernel on a CPU has wrong gradients for queries whose keys are all hidden by finite numbers.
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        run_calls(program, seen, watched)
    # Layers that have no choice are drawn on purpose.
    said = {str(w.message) for w in caught if w.category.__name__ == "GlueWarning"}
    seen["warnings"] = sorted(text for text in said if not text.startswith("glue: memory_budget chooses nothing"))
    seen["alive afterwards"] = still_alive(watched)
    if wrap is None and program["NAN_MAY_VANISH"] and program["SPOILED"] and "STATE" not in program:
        program["SPOILED"] = False
        seen[UNSPOILED] = observe(program)
        program["SPOILED"] = True
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


class Written(str):
    """Stands for a value that nobody could read any more, since what it was to be computed from has been written."""


class Memory:
    """What tensors hold: a deferred tensor may refuse to be read once that is something else."""

    def __init__(self, inputs: Any) -> None:
        self.tensors = [t for t in inputs if isinstance(t, torch.Tensor)]
        self.versions = [versions_of(t) for t in self.tensors]
        self.copies = [t.detach().clone() for t in self.tensors]

    def is_written(self) -> bool:
        versions = [versions_of(t) for t in self.tensors]
        pairs = zip(self.tensors, self.copies, strict=True)
        return versions != self.versions or any(a.shape != b.shape or bool(differ(a, b).any()) for a, b in pairs)

    def excused(self, error: Exception) -> str:
        text = f"{type(error).__name__}: {error}"
        return Written(text) if type(error).__name__ == "GlueDeferredError" and self.is_written() else text


def versions_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def differ(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a, b = a.detach(), b.detach()
    return (a != b) & ~((a != a) & (b != b))


def run_calls(program: dict[str, Any], seen: dict[str, Any], watched: list[Any]) -> None:
    """``LATE``: what one call gives is read behind the next one."""
    inputs: Any = None
    waiting: list[Any] = []
    for number, (how, seed, context) in enumerate(program["CALLS"], 1):
        if how == "fresh":
            inputs = program["make"](seed)
        elif how == "refill":
            with torch.no_grad():
                program["refill"](inputs, seed)
        label = f"call {number}: "
        memory = Memory(inputs)
        results: dict[str, Any] = {}
        try:
            one_call(program, inputs, context, results, memory)
        except Exception as error:
            results = {"error": memory.excused(error)}
        watched += [(label + name, weakref.ref(t)) for name, t in results.items() if isinstance(t, torch.Tensor)]
        watched += [(f"{label}input {i}", weakref.ref(t)) for i, t in enumerate(inputs) if isinstance(t, torch.Tensor)]
        for i, value in enumerate(inputs):
            if isinstance(value, torch.Tensor):
                seen[f"{label}input {i} afterwards"] = value.detach().clone()
        if "STATE" in program:
            seen[label + "STATE"] = repr(program["STATE"])
        waiting.append((label, results, memory))
        del results, memory
        if len(waiting) > program["LATE"]:
            read(seen, *waiting.pop(0))
    for each in waiting:
        read(seen, *each)


def read(seen: dict[str, Any], label: str, results: dict[str, Any], memory: Memory) -> None:
    for name, value in results.items():
        if not isinstance(value, torch.Tensor):
            seen[label + name] = value
            continue
        if name.startswith("output"):
            seen[label + name + " requires grad"] = value.requires_grad
        try:
            # Not a clone: one of deferred logits waits as they do, and the next call may write what they come from.
            seen[label + name] = torch.stack([value.detach()])[0]
        except Exception as error:
            seen[label + name] = memory.excused(error)


def one_call(program: dict[str, Any], inputs: Any, context: Any, results: dict[str, Any], memory: Memory) -> None:
    """A step: a call, backward from some outputs, and a step of an optimizer; ``TAKES`` are looked at in between."""
    with context():
        outputs = program["f"](*inputs)
    program["between"](outputs, inputs)
    results |= {f"output {i}": value for i, value in enumerate(outputs)}
    take(program, outputs, "called", results, memory)
    generator = torch.Generator().manual_seed(0)
    loss: Any = 0
    able = [i for i, value in enumerate(outputs) if isinstance(value, torch.Tensor) and value.requires_grad]
    chosen = [i for i in able if program["in_loss"](i, outputs[i])] or able
    for i, value in enumerate(outputs):
        if isinstance(value, torch.Tensor):
            direction = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        if i in chosen:
            loss = loss + (value.double() * direction.to(value.device)).sum()
    if isinstance(loss, torch.Tensor):
        leaves = [(i, t) for i, t in enumerate(inputs) if isinstance(t, torch.Tensor) and t.requires_grad]
        found = torch.autograd.grad(loss, [t for _, t in leaves], allow_unused=True)
        results |= {f"gradient of input {i}": g for (i, _), g in zip(leaves, found, strict=True)}
        take(program, outputs, "differentiated", results, memory)
        for (_, value), gradient in zip(leaves, found, strict=True):
            # Zeros may stand for None, and a step with zeros decays a weight.
            if gradient is not None and (gradient.any() or not program["ZERO_FOR_NONE"]):
                program["step"](value, gradient)
    take(program, outputs, "stepped", results, memory)


def take(program: dict[str, Any], outputs: Any, when: str, results: dict[str, Any], memory: Memory) -> None:
    """What a caller makes of each output at this time; its numbers are read with everything else."""
    for number, (at, look) in enumerate(program["TAKES"]):
        for i, value in enumerate(outputs if at == when else ()):
            if isinstance(value, torch.Tensor):
                taken: Any = None
                try:
                    taken = torch.as_tensor(look(value))
                except Exception as error:
                    taken = memory.excused(error)
                results[f"output {i}, taken {number}"] = taken


def differences(program: dict[str, Any], expected: dict[str, Any], actual: dict[str, Any]) -> list[str]:
    """What is not the same, in words."""
    found = []
    ended = next((label for label, value in actual.items() if is_error(label) and isinstance(value, Written)), "")
    behind = range(int(ended.split()[1].rstrip(":")) if ended else 0, 1 + len(program["CALLS"]) if ended else 0)
    unspoiled = expected.get(UNSPOILED, {})
    for label in [*expected, *(label for label in actual if label not in expected)]:
        if label == UNSPOILED:
            continue
        want, got = expected.get(label), actual.get(label)
        if isinstance(actual.get(label.removesuffix(" requires grad")), Written):
            continue
        if label == "alive afterwards":
            want, got = [], [name for name in got if name not in want]  # type: ignore[union-attr]
        # What was written cannot be read any more, and a call that ended so had no step, which later calls see.
        if isinstance(got, Written) or any(label.startswith(f"call {number}:") for number in behind):
            continue
        if want is not None and got is not None and (is_error(label) or (is_text(want) and is_text(got))):
            continue
        if isinstance(want, float) and isinstance(got, float):  # a number that a program has read
            want, got = torch.tensor(want, dtype=torch.float64), torch.tensor(got, dtype=torch.float64)
        if isinstance(want, torch.Tensor) and isinstance(got, torch.Tensor):
            loose = any(part in label for part in program["NAN_MAY_VANISH"])
            if reason := tensors_differ(want, got, TOLERANCE[program["PRECISION"]], loose, unspoiled.get(label)):
                found.append(f"{label}: {reason}")
        elif label.endswith("requires grad") and got and program["ZERO_FOR_NONE"]:
            continue  # no data selected a parameter; that its gradient is zero is checked
        elif want is None and isinstance(got, torch.Tensor) and program["ZERO_FOR_NONE"] and not got.any():
            continue
        elif want is not got and (isinstance(want, torch.Tensor) or isinstance(got, torch.Tensor) or want != got):
            found.append(f"{label}: eager {shown(want)}, compiled {shown(got)}")
    return sorted(found, key=lambda each: ": error: " not in each)  # first what the others follow from


def is_error(label: str) -> bool:
    return label.endswith(": error")


def is_text(value: Any) -> bool:
    """An error of what a caller has taken."""
    return isinstance(value, str) and "Error: " in value


def tensors_differ(
    want: torch.Tensor, got: torch.Tensor, tolerance: float, nan_may_vanish: bool = False, unspoiled: Any = None
) -> str:
    """Why; "" if they are equal. ``nan_may_vanish``: where eager has NaN may be the number that ``unspoiled`` has,
    of inputs without it, as documented; where that has NaN too, or is none, anything goes."""
    if (want.dtype, tuple(want.shape), want.device) != (got.dtype, tuple(got.shape), got.device):
        return f"eager is {want.dtype} {tuple(want.shape)}, compiled is {got.dtype} {tuple(got.shape)}"
    if not (want.is_floating_point() or want.is_complex()):
        return "" if torch.equal(want, got) else f"eager {shown(want)}, compiled {shown(got)}"
    want, got = want.double(), got.double()
    if nan_may_vanish:
        free = want.isnan()
        if isinstance(unspoiled, torch.Tensor) and unspoiled.shape == want.shape:
            clean = unspoiled.double()
            near = torch.isclose(got, clean, rtol=tolerance, atol=tolerance * max(1.0, largest(clean)), equal_nan=True)
            free = free & (near | clean.isnan())
        got = torch.where(free, want, got)
    if not torch.equal(want.isnan(), got.isnan()):
        return f"eager has {int(want.isnan().sum())} NaN, compiled has {int(got.isnan().sum())}"
    if torch.allclose(got, want, rtol=tolerance, atol=tolerance * max(1.0, largest(want)), equal_nan=True):
        return ""
    return f"off by {largest(got - want):.3g} of {largest(want):.3g}"


def largest(tensor: torch.Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def shown(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) < 200 else text[:200] + "..."
