"""Context parallelism on a CPU: torch's ring, which it has for kernels of GPUs alone, around the CPU's kernel."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._op_schema import OpStrategy, RuntimeSchemaInfo
from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy, register_op_strategy
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as rings

TOKENS = 2
"""The dimension of queries, keys and values that ranks divide."""
FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def _forward(mesh: Any, query: Any, key: Any, value: Any, dropout_p=0.0, is_causal=False, **how: Any) -> Any:
    assert how.pop("attn_mask", None) is None
    how |= {"dropout_p": dropout_p, "is_causal": is_causal}
    return rings._templated_ring_attention(mesh.get_group(), TOKENS, FORWARD, query, key, value, **how)


def _backward(mesh: Any, gradient: Any, *saved: Any, **how: Any) -> Any:
    assert how.pop("attn_mask", None) is None
    *saved, how["dropout_p"], is_causal = saved
    about = (mesh.get_group(), TOKENS, BACKWARD, gradient, "grad_out")
    return rings._templated_ring_attention_backward(*about, *saved, is_causal, **how)


def _handle(operator: Any, args: Any, kwargs: Any) -> Any:
    dispatcher = DTensor._op_dispatcher
    about = dispatcher.unwrap_to_op_info(operator, args, kwargs)
    dispatcher.sharding_propagator.propagate(about)
    ring = _forward if operator is FORWARD else _backward
    found = ring(about.compute_mesh, *about.local_args, **about.local_kwargs)
    return dispatcher.wrap(found, about.output_sharding.output_spec)


def _register() -> None:
    for operator, results, numbers in (FORWARD, 2, 3), (BACKWARD, 3, 6):

        def strategy(schema: Any, results: int = results) -> Any:
            tensors = sum(isinstance(arg, OpStrategy) for arg in schema.args_schema)
            mesh = schema.get_mesh_from_args(validate=False)
            choice = [Shard(TOKENS)] * (results + tensors)
            return expand_to_full_mesh_op_strategy(mesh, schema, [choice], input_index=results)

        register_op_strategy(operator, schema_info=RuntimeSchemaInfo(numbers))(strategy)


@contextlib.contextmanager
def divided(mesh: Any, buffers: list[torch.Tensor]) -> Iterator[None]:
    """``context_parallel`` over the second dimension of ``buffers``."""
    _register()
    handlers = dict.fromkeys((FORWARD, BACKWARD), _handle)
    with (
        mock.patch.dict(rings.custom_ops, handlers),
        mock.patch.object(rings._cp_options, "convert_to_f32", False),
        context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1] * len(buffers)),
    ):
        yield
