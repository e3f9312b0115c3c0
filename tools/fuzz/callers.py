"""What the caller of a program does with what it returned: reads at once or late, and writes in between."""

from __future__ import annotations

from tools.fuzz.draw import Draw
from tools.fuzz.programs import Step

REFILLS = (
    "old.detach().copy_(new)",
    "old.data.copy_(new)",
    "old.detach().view(-1)[:] = new.reshape(-1)",
    "old.untyped_storage().copy_(new.clone().untyped_storage())",
    "old.data = new.detach().clone()",
    "old.detach().set_(new.detach().clone())",
    "old.detach().zero_().add_(new)",
)
"""How the inputs of a call are written for the next."""
BETWEEN = ("out += 1", "out.detach().add_(1)", "out.mul_(2)", "out.view_as(out).neg_()")
"""How a caller writes an output before backward, in sight of autograd: sdpa reads what ``.data`` has written."""

BETWEEN_FOR_INPUTS = ("out.detach().zero_()", "out.detach().copy_(out.flip(0))")
"""Likewise for one input, of any dtype; eager raises if it has saved that."""

UPDATES = (
    "with torch.no_grad(): value.add_(gradient, alpha=-0.1)",
    "value.detach().sub_(gradient, alpha=0.1)",
    "value.data.sub_(gradient, alpha=0.1)",
    "value.data = value.data - 0.1 * gradient",
    "value.grad = gradient.clone(); torch.optim.SGD([value], lr=0.1).step(); value.grad = None",
    "value.grad = gradient.clone(); torch.optim.AdamW([value], lr=0.1, foreach=True).step(); value.grad = None",
    # The fused step reads a gradient by its parameter's strides.
    "value.grad = gradient.contiguous(); torch.optim.AdamW([value], lr=0.1, fused=True).step(); value.grad = None",
    "torch._foreach_add_([value.data], [gradient], alpha=-0.1)",
)
"""How an optimizer writes parameters, in sight of version counters or past them."""

NUMPY_REFILLS = ("old.detach().numpy()[...] = new.detach().numpy()",)
NUMPY_UPDATES = ("value.detach().numpy()[...] -= 0.1 * gradient.numpy()",)

TAKES = (
    "out",
    "out + 0",
    "out.clone()",
    "out.detach()",
    "out.detach()",
    "out.data",
    "out[:1]",
    "out.detach().view(-1)[:2]",
    "out.detach().double()",
    "out.sum(-1) if out.dim() else out",
    "out.argmax(-1) if out.numel() else out",
    "out.detach().cpu().numpy()",
    "out.detach().cpu().numpy().copy()",
    "torch.from_numpy(out.detach().cpu().numpy())",
    "torch.nn.Parameter(out.detach(), requires_grad=False)",
    "torch.nn.Parameter(out.detach().clone(), requires_grad=False)",
    "copy.deepcopy(out.detach())",
    "copy.copy(out.detach())",
    "pickle.loads(pickle.dumps(out.detach()))",
    "torch.from_dlpack(out.detach())",
    "out.tolist()",
    "torch.stack([out.detach()])[0]",
    "torch.cat([out.detach().flatten(), out.detach().flatten()])",
)


def draw_step(draw: Draw) -> Step:
    """Of programs whose results may wait for a reader most are read late, of others half."""
    if not draw.chance(draw.late):
        return Step()
    cpu = draw.device == "cpu"
    update = draw.pick("pass", *UPDATES, *UPDATES, *(NUMPY_UPDATES * 2 if cpu else ()))
    times = [draw.pick("called", "called", "differentiated", "stepped") for _ in range(draw.pick(0, 1, 1, 2))]
    takes = tuple((when, draw.pick(*TAKES)) for when in times)
    in_loss = draw.mostly("out.dim() == 0", "True", "i == 0", "i % 2 == 1", share=draw.late)
    return Step(in_loss, takes, update, late=draw.chance(0.8 * draw.late))


def draw_refill(draw: Draw) -> str:
    """Of all inputs, or of a batch and not of parameters."""
    which = draw.mostly("", "if not isinstance(old, torch.nn.Parameter): ", "if old is inputs[0]: ", share=0.35)
    return which + draw.mostly(*refills(draw.device), share=0.4)


def refills(device: str) -> tuple[str, ...]:
    return REFILLS + (NUMPY_REFILLS * 2 if device == "cpu" else ())
