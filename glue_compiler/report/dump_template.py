"""What a dumped graph's file holds besides the graph."""

HEADER = '''"""A graph that Dynamo captured, written by glue.

Runs alone: `python {{this file}}` calls the graph on random inputs of the recorded shapes.
"""

import contextlib

import torch
from torch import device, inf, nan
{imports}
'''

HELPERS = '''
def checkpoint_body(body, *args, **kwargs):
    """What torch.ops.higher_order.tag_activation_checkpoint stands for."""
    return torch.utils.checkpoint.checkpoint(body, *args, use_reentrant=False)


def autograd_function(forward, backward, *args, non_differentiable_idx=(), dirty_idx=(), **_):
    """What torch.ops.higher_order.autograd_function_apply stands for."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *args):
            outputs, ctx.saved = forward(*args)
            listed = outputs if isinstance(outputs, (tuple, list)) else [outputs]
            if dirty_idx:
                ctx.mark_dirty(*(listed[i] for i in dirty_idx))
            if non_differentiable_idx:
                ctx.mark_non_differentiable(*(listed[i] for i in non_differentiable_idx))
            return outputs

        @staticmethod
        def backward(ctx, *gradients):
            return backward(*gradients, *ctx.saved)

    return Function.apply(*args)


def random_tensor(shape, stride, dtype, device, requires_grad, seed=None):
    if dtype is torch.uint8 and tuple(shape) == tuple(torch.get_rng_state().shape):
        return torch.get_rng_state()  # what a generator's state is set to is no random numbers
    size = 1 + sum((n - 1) * s for n, s in zip(shape, stride)) if all(shape) else 0
    # A constant is the same in each graph that has it, wherever it is drawn.
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        storage = torch.randn(size, generator=generator)
    else:  # small, so that an index stays inside of what it indexes
        storage = torch.randint(0, 2, (size,), generator=generator)
    return storage.to(device, dtype).as_strided(shape, stride).requires_grad_(requires_grad)


def known_mask(shape, dtype, device, documents, is_causal, window, hidden, has_padding):
    """A mask that shows what the graph was compiled for; each of its documents is so many tokens long."""
    token = torch.arange(shape[-1], device=device)
    distance, shown = token[:, None] - token, torch.ones(shape, dtype=torch.bool, device=device)
    if documents:
        shown &= token[:, None] // documents == token // documents
    if is_causal:
        shown &= distance >= 0
    if window > 0:
        shown &= distance.abs() < window
    if has_padding:
        shown[..., shape[-1] // 2 :] = False
    return shown if hidden is None else torch.zeros(shape, dtype=dtype, device=device).masked_fill_(~shown, hidden)


@contextlib.contextmanager
def inside(modes):
    with contextlib.ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        yield


'''

GRAPHS = "# The graph, its bodies first."

STEP = '''Backward = GraphModule

saved = {saved}
taken = {taken}


def training_step(*inputs):
    """Takes the forward's inputs, then the gradients of its outputs. Returns outputs, then gradients."""
    results = Forward()(*inputs[:{inputs}])
    values = dict(zip(saved, results[{outputs}:]))
    gradients = iter(inputs[{inputs}:])
    returned = Backward()(*(values[name] if name in values else next(gradients) for name in taken))
    return (*results[:{outputs}], *returned)
'''

MAIN = """

def make_graph():
    return {graph}


def make_inputs():
    return [
{inputs}
    ]


def make_modes():
    return [{modes}]  # around the graph where it was captured


if __name__ == "__main__":
    torch.manual_seed(0)
    with inside(make_modes()):
        outputs = make_graph()(*make_inputs())
    for i, output in enumerate(outputs if isinstance(outputs, (tuple, list)) else [outputs]):
        shown = tuple(output.shape) if isinstance(output, torch.Tensor) else output
        print(f"output {{i}}: {{shown}}")
"""
