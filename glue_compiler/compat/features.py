"""Private parts that passes need, and so which passes this torch can run."""

from __future__ import annotations

from glue_compiler.compat.parts import ANY, Feature, Uses

_SHAPES = "torch.fx.experimental.symbolic_shapes:ShapeEnv"

REWRITES = Feature(
    "rewriting of graphs",
    {
        "torch._C._functorch:is_functorch_wrapped_tensor": ANY,
        "torch._subclasses.fake_tensor:FakeTensor": ANY,
        "torch._subclasses.fake_tensor:FakeTensorMode": ANY,
        "torch.fx.experimental.symbolic_shapes:free_unbacked_symbols": Uses(("x",)),
        f"{_SHAPES}._rename_unbacked_to": Uses(("self", "orig_s", "new_s")),
        f"{_SHAPES}._update_version_counter": Uses(("self",)),
        f"{_SHAPES}.bound_sympy": Uses(("self", "expr")),
        f"{_SHAPES}.ignore_fresh_unbacked_symbols": Uses(("self",)),
        f"{_SHAPES}.replace": Uses(("self", "expr")),
        f"{_SHAPES}.suppress_guards": Uses(("self",)),
        **{
            f"{_SHAPES}().{table}": ANY
            for table in ("backed_var_to_val", "replacements", "unbacked_renamings", "var_to_range", "var_to_sources")
        },
    },
)
"""What every pass needs, and the way back from one that fails."""

_PASSES = {
    "memoize_metadata": Feature(
        "pass memoize_metadata",
        {
            "torch._C:_len_torch_dispatch_stack": ANY,
            "torch._C._functorch:peek_interpreter_stack": ANY,
            "torch._guards:TracingContext.try_get": ANY,
        },
    ),
    "overlap_offload": Feature(
        "pass overlap_offload",
        {
            "torch._C:_storage_Use_Count": ANY,
            "torch._C._autograd:_top_saved_tensors_default_hooks": ANY,
            "torch._functorch.config:enable_activation_offloading": ANY,
            "torch._functorch.partitioners:min_cut_rematerialization_partition": Uses(("joint_module",)),
            "torch._inductor.config:custom_partitioner_fn": ANY,
            "torch._prims.rng_prims:run_and_save_rng_state": ANY,
            "torch.utils.checkpoint:CheckpointPolicy.MUST_CPU_OFFLOAD": ANY,
        },
    ),
    "specialize_attention": Feature(
        "pass specialize_attention",
        {
            "torch.nn.attention:sdpa_kernel": Uses(("backends", "set_priority")),
            "torch.nn.attention.flex_attention:BlockMask.as_tuple": Uses(("self",)),
            "torch.nn.attention.flex_attention:_apply_kernel_options": Uses(("query", "key", "value")),
            "torch.nn.attention.flex_attention:_identity": ANY,
            "torch.ops:aten._flash_attention_backward": ANY,
            "torch.ops:aten._flash_attention_forward": ANY,
        },
    ),
}


def can_run(pass_name: str) -> bool:
    """Has this torch the private parts that the pass of this name needs? Warns once if not."""
    if not REWRITES.is_available():
        return False
    return pass_name not in _PASSES or _PASSES[pass_name].is_available()


def all_features() -> tuple[Feature, ...]:
    """Of this file."""
    return (REWRITES, *_PASSES.values())
