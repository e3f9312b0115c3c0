"""Is a step with checkpoint offload as exact as one without, and always the same?"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from benchmarks.checkpoint_decoder import Decoder, Shape, batch_of
from benchmarks.checkpoint_rows import clean_up, prepare

ROWS = ("none", "glue", "layers-none", "layers-glue")


def results(call: Callable[..., Tensor], model: Decoder, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """The loss, and every gradient by name."""
    x, target = batch
    for tensor in (x, *model.parameters()):
        tensor.grad = None
    loss = call(x, target)
    loss.backward()
    named = {"loss": loss, "x": x.grad, **{name: p.grad for name, p in model.named_parameters()}}
    return {name: value.detach().clone() for name, value in named.items() if value is not None}


def errors(got: dict[str, Tensor], reference: dict[str, Tensor]) -> tuple[float, float, float]:
    """Of the loss, and of the gradients the mean and the largest: norms of differences by norms of the reference."""
    assert got.keys() == reference.keys()
    relative = {
        name: float((got[name].double() - reference[name]).norm() / reference[name].norm()) for name in reference
    }
    loss = relative.pop("loss")
    return loss, sum(relative.values()) / len(relative), max(relative.values())


def print_numerics(shape: Shape, repeats: int, device: torch.device) -> None:
    """Errors against eager fp64; then ``repeats`` steps, bit by bit, with deterministic algorithms."""
    from glue_compiler.ops.copy_engine import engine

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    original = Decoder(shape, device)
    batch = batch_of(shape, device)
    x, target = batch
    exact = x.detach().double().requires_grad_(), target.double()
    model = copy.deepcopy(original).double()
    reference = results(model, model, exact)
    print(f"{'row':<12} {'loss':>10} {'gradients':>10} {'worst':>10}  {repeats} repeats")
    for row in ROWS:
        model = copy.deepcopy(original)
        call, context = prepare(row, model)

        def step(within: Callable[[], AbstractContextManager[object]] = nullcontext) -> dict[str, Tensor]:
            with context(), within():  # noqa: B023 called in this turn of the loop only
                return results(call, model, batch)  # noqa: B023

        synchronised = step(engine.synchronised)
        loss, mean, worst = errors(synchronised, reference)
        moved = engine.pool.held_bytes()
        different = sum(not _equal(step(), synchronised) for _ in range(repeats))
        verdict = f"{different} differ" if different else "bitwise equal, and to the one whose copies are waited for"
        print(
            f"{row:<12} {loss:10.2e} {mean:10.2e} {worst:10.2e}  {verdict} ({moved / 2**20:.1f} MiB moved)", flush=True
        )
        clean_up(device)
    torch.use_deterministic_algorithms(False)


def _equal(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in others)
