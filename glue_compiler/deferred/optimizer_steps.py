"""Logits that are read after an optimizer's step, as for a training accuracy: the weight is copied before the step.

The copy is freed with the logits, or when the model is called again, before its next peak. On a GPU it is made where
it raises no peak. Elsewhere, the first steps copy to host memory; if logits are then read late, later steps copy on
the GPU, as the logits that the program asks for would be there in eager, too.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from glue_compiler.compat.runtime import is_capturing

_STEPS_ON_HOST = 3
_PLAIN = (Tensor, torch.nn.Parameter)


class OptimizerSteps:
    """Copies the operands of living logits (:class:`~glue_compiler.deferred.operands.Watched`) before an optimizer
    writes them.

    Attributes:
        were_read_late: has this process read logits after a step?
    """

    def __init__(self) -> None:
        self.were_read_late = False
        self._lock = threading.Lock()
        self._operands: weakref.WeakSet[Any] = weakref.WeakSet()
        self._is_hooked = False
        self._steps_on_host = _STEPS_ON_HOST

    def will_be_read(self, operand: Any) -> None:
        with self._lock:
            if not self._is_hooked:
                register_optimizer_step_pre_hook(_before_step)
                self._is_hooked = True
            self._operands.add(operand)

    def free_copies(self, tensors: Iterable[Tensor]) -> None:
        """Those of ``tensors``: logits of an earlier call that were not read yet are not readable any more."""
        copied = [each for each in self._living() if each.is_copied]
        if copied:
            memory = set(map(_memory, tensors))
            for each in copied:
                if _memory(each.operand) in memory:
                    each.use_copy(None)

    def before(self, optimizer: Optimizer) -> None:
        operands = [each for each in self._living() if each.can_be_copied()]
        if not operands or is_capturing():
            return
        given = (each for group in optimizer.param_groups for each in group["params"])
        parameters = [each for each in given if type(each) in _PLAIN and each.layout is torch.strided]
        written = set(map(_memory, parameters))
        operands = [each for each in operands if _memory(each.operand) in written]
        # Logits of several calls, such as those whose gradients are summed, share a copy.
        unique = {_identity(each.operand): each.operand for each in operands}
        on_host = not self.were_read_late and not _has_room(unique.values(), parameters, optimizer)
        if on_host and not self._steps_on_host:
            return
        self._steps_on_host -= on_host
        copies = {key: tensor.to("cpu", copy=True) if on_host else tensor.clone() for key, tensor in unique.items()}
        for each in operands:
            each.use_copy(copies[_identity(each.operand)])

    def _living(self) -> list[Any]:
        with self._lock:
            return list(self._operands)


STEPS = OptimizerSteps()
"""Hooks are global to torch, and so is this."""


@torch.compiler.disable  # in a compiled step, too; torch breaks the graph there anyway
def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``args`` begin with the optimizer, as a method's do; a closure makes logits during the step."""
    STEPS.before(optimizer)
    if len(args) > 1 and callable(args[1]):
        return (args[0], _before_writes(optimizer, args[1]), *args[2:]), kwargs
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": _before_writes(optimizer, kwargs["closure"])}
    return None


def _before_writes(optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
    @functools.wraps(closure)
    def run() -> Any:
        loss = closure()
        STEPS.before(optimizer)
        return loss

    return run


def _memory(tensor: Tensor) -> Any:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _identity(tensor: Tensor) -> Any:
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _has_room(copied: Iterable[Tensor], parameters: Iterable[Tensor], optimizer: Optimizer) -> bool:
    """Do copies raise no peak, neither now nor during the step?

    A step is taken to need the bytes of its parameters twice for what is temporary (``foreach`` needs them once), and
    twice more for what its first one makes.
    """
    tensors = list(copied)
    if not tensors or tensors[0].device.type != "cuda":
        return True
    device = tensors[0].device
    of_step = sum(each.nbytes for each in parameters) * (2 if optimizer.state else 4)
    statistics = torch.cuda.memory_stats(device)
    now, peak = (statistics[f"allocated_bytes.all.{name}"] for name in ("current", "peak"))
    return bool(now + sum(each.nbytes for each in tensors) + of_step <= peak)
