"""The engines of torch as users write them around a model of transformers, with glue inside, outside or by layers."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.training import Engine


def ddp(compiles_inside=False, accumulates=False, checkpoints=False, **how: Any) -> Engine:
    def prepare(model, compiles):
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        # Of 1 MiB whatever is asked for; of the process, so each engine sets it.
        torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = int(how.get("bucket_cap_mb", 2) * 2**19)
        if compiles_inside == "layers":
            for layer in model.model.layers:
                compiles.in_place(layer)
            return DistributedDataParallel(model, **how)
        if compiles_inside:
            return DistributedDataParallel(compiles.in_place(model), **how)
        return compiles(DistributedDataParallel(model, **how))

    def around(call, is_last):
        return contextlib.nullcontext() if is_last else call.no_sync()

    return Engine(prepare, 2, around) if accumulates else Engine(prepare)


def fsdp(compiled="before", accumulates=False, shape=None, tolerance=1e-10, checkpoints=False, **how: Any) -> Engine:
    def prepare(model, compiles):
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        world = torch.distributed.get_world_size()
        names = {"mesh_dim_names": ("replicate", "shard")} if shape else {}
        mesh = torch.distributed.init_device_mesh("cpu", shape or (world,), **names)
        for layer in model.model.layers:
            if compiled == "layers":
                compiles.in_place(layer)
            fully_shard(layer, mesh=mesh, **how)
            if compiled == "layers after":
                compiles.in_place(layer)
        if compiled == "before":
            compiles.in_place(model)
        fully_shard(model, mesh=mesh, **how)
        return compiles(model) if compiled == "after" else model

    @contextlib.contextmanager
    def around(call, is_last):
        model = getattr(call, "_orig_mod", call)
        model.set_requires_gradient_sync(is_last)
        yield

    return Engine(prepare, 2, around) if accumulates else Engine(prepare, tolerance=tolerance)


def with_plan(plan, by_layers=False) -> Engine:
    """``parallelize_module`` with the styles that ``plan`` gives for a layer and for what is around the layers."""

    def prepare(model, compiles):
        mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        of_layer, around = plan()
        parallelize_module(model, mesh, around)
        for layer in model.model.layers:
            parallelize_module(layer, mesh, of_layer)
            if by_layers:
                compiles.in_place(layer)
        return model if by_layers else compiles(model)

    return Engine(prepare, shares=2, dynamic=False, steps=2)


def expert_parallel(how, by_layers=False) -> Engine:
    """transformers' expert parallelism: each rank has half of a layer's experts; both train on one batch."""

    def prepare(model, compiles):
        from transformers.distributed.expert_parallel import apply_expert_parallelism

        mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        plan = model.config.base_model_ep_plan
        of_layers = {
            f"model.{name.replace('*', str(number))}": style
            for name, style in plan.items()
            for number in range(len(model.model.layers))
        }
        apply_expert_parallelism(model, mesh, mesh, of_layers, how)
        if by_layers:
            for layer in model.model.layers:
                compiles.in_place(layer)
        return model if by_layers else compiles(model)

    return Engine(prepare, shares=2, dynamic=False, steps=2)


def tensor_plan():
    columns = dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ColwiseParallel())
    columns |= dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), ColwiseParallel())
    rows = dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), RowwiseParallel())
    return columns | rows, {"lm_head": ColwiseParallel(output_layouts=Replicate())}


def sequence_plan():
    of_layer, _ = tensor_plan()
    rows = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    of_layer |= {
        "input_layernorm": SequenceParallel(),
        "post_attention_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        ),
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "self_attn.o_proj": rows,
        "mlp.down_proj": rows,
    }
    around = {
        "model.embed_tokens": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False
        ),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    return of_layer, around


DDP = {
    "outside": ddp(),
    "inside": ddp(compiles_inside=True),
    "layers": ddp(compiles_inside="layers"),
    "outside, static_graph": ddp(static_graph=True),
    "inside, static_graph": ddp(compiles_inside=True, static_graph=True),
    "outside, views of buckets": ddp(gradient_as_bucket_view=True),
    "outside, small buckets": ddp(bucket_cap_mb=0.01),
    "inside, small buckets": ddp(compiles_inside=True, bucket_cap_mb=0.01),
    "outside, unused": ddp(find_unused_parameters=True),
    "outside, no_sync": ddp(accumulates=True),
    "inside, no_sync": ddp(compiles_inside=True, accumulates=True),
    "inside, views, no_sync": ddp(compiles_inside=True, accumulates=True, gradient_as_bucket_view=True),
}
HALF_AS_WIDE = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
FSDP = {
    "before": fsdp("before"),
    "after": fsdp("after"),
    "layers": fsdp("layers"),
    "layers after": fsdp("layers after"),
    "after, keeps": fsdp("after", reshard_after_forward=False),
    "layers, keeps": fsdp("layers", reshard_after_forward=False),
    "layers, reshards": fsdp("layers", reshard_after_forward=True),
    "layers, offload": fsdp("layers", offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "after, offload": fsdp("after", offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "layers, mixed": fsdp("layers", mp_policy=HALF_AS_WIDE, tolerance=1e-4),
    "after, mixed": fsdp("after", mp_policy=HALF_AS_WIDE, tolerance=1e-4),
    "layers, accumulates": fsdp("layers", accumulates=True),
    "after, accumulates": fsdp("after", accumulates=True),
}
IN_REGIONS = {"before": FSDP["before"], "after": FSDP["after"], "checkpointed": fsdp("after", checkpoints=True)}
PLANNED = {
    "sharded": fsdp("after", checkpoints=True),
    "outside": ddp(checkpoints=True),
    "inside, no_sync": ddp(compiles_inside=True, checkpoints=True, accumulates=True),
}
HSDP = {
    "layers": fsdp("layers", shape=(2, 2)),
    "after": fsdp("after", shape=(2, 2)),
}


def of_transformers() -> Engine:
    """transformers' own plan of a model, which shares the head's classes and gathers the logits."""

    def prepare(model, compiles):
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism

        mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        plan = {}
        for name, style in model.tp_plan.items():
            for number in range(len(model.model.layers) if "*" in name else 1):
                module = name.replace("*", str(number))
                plan |= {f"{module}.weight": style, module: style}
        return compiles(apply_tensor_parallelism(model, mesh, plan))

    return Engine(prepare, shares=2, dynamic=False, steps=2)


TENSOR = {
    "whole": with_plan(tensor_plan),
    "layers": with_plan(tensor_plan, by_layers=True),
    "sequence, whole": with_plan(sequence_plan),
    "transformers, whole": of_transformers(),
    "sequence, layers": with_plan(sequence_plan, by_layers=True),
}
EXPERTS = {
    "all_reduce, layers": expert_parallel("all_reduce", by_layers=True),
    "all_to_all, whole": expert_parallel("all_to_all"),
}
FAMILIES = {"ddp": DDP, "fsdp": FSDP, "regions": IN_REGIONS, "hsdp": HSDP, "tensor": TENSOR, "experts": EXPERTS}
