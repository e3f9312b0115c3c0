"""Private parts that passes and tools need, and so which of them this torch can run."""

from __future__ import annotations

from glue_compiler.compat.parts import ANY, Feature, Uses

_SHAPES = "torch.fx.experimental.symbolic_shapes:ShapeEnv"
_VALUES = {
    "torch._subclasses.fake_tensor:FakeTensor": ANY,
    "torch._subclasses.fake_tensor:FakeTensorMode": ANY,
    "torch.fx.experimental.sym_node:SymNode.__init__": Uses(("self", "expr", "shape_env", "pytype", "hint")),
}
"""Fake tensors and symbolic numbers."""

REWRITES = Feature(
    "rewriting of graphs",
    {
        "torch._C._functorch:is_functorch_wrapped_tensor": ANY,
        **_VALUES,
        "torch.fx.experimental.sym_node:SymNode.expr": ANY,
        "torch.fx.experimental.sym_node:SymNode.hint": ANY,
        "torch.fx.experimental.symbolic_shapes:free_unbacked_symbols": Uses(("x",)),
        f"{_SHAPES}._rename_unbacked_to": Uses(("self", "orig_s", "new_s")),
        f"{_SHAPES}._update_version_counter": Uses(("self",)),
        f"{_SHAPES}.bound_sympy": Uses(("self", "expr")),
        f"{_SHAPES}.ignore_fresh_unbacked_symbols": Uses(("self",)),
        f"{_SHAPES}.replace": Uses(("self", "expr")),
        f"{_SHAPES}.suppress_guards": Uses(("self",)),
        **{
            f"{_SHAPES}().{table}": ANY
            for table in (
                *("backed_var_to_val", "replacements", "unbacked_renamings", "var_to_range"),
                "var_to_sources",
            )
        },
    },
)
"""What every pass needs, and the way back from one that fails."""

PASSES = {
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
            "torch._functorch._aot_autograd.graph_capture_wrappers:create_joint": Uses(
                texts=("partitioner_tag", "is_forward")
            ),
            "torch._functorch.config:enable_activation_offloading": ANY,
            "torch._functorch.partitioners:min_cut_rematerialization_partition": Uses(("joint_module",)),
            "torch._inductor.config:custom_partitioner_fn": ANY,
            "torch._prims.rng_prims:run_and_save_rng_state": ANY,
            "torch.fx.proxy:_COPY_META_FIELDS": Uses(texts=("ac_graph_id",)),
            "torch.utils.checkpoint:CheckpointPolicy.MUST_CPU_OFFLOAD": ANY,
        },
    ),
    "fuse_dequantization": Feature(
        "pass fuse_dequantization",
        {
            "torch._functorch.partitioners:min_cut_rematerialization_partition": Uses(("joint_module",)),
            "torch._higher_order_ops.triton_kernel_wrap:KernelSideTable.add_constant_args": Uses(("self", "args")),
            "torch._higher_order_ops.triton_kernel_wrap:KernelSideTable.add_kernel": Uses(("self", "kernel")),
            "torch._higher_order_ops.triton_kernel_wrap:triton_kernel_wrapper_functional": ANY,
            "torch._inductor.config:custom_partitioner_fn": ANY,
        },
    ),
    "share_layers": Feature(
        "pass share_layers",
        {
            "torch._inductor.compile_fx:FxCompileMode.NORMAL": ANY,
            "torch._inductor.compile_fx:_recursive_record_user_visible_output_idxs": Uses(("gm",)),
            "torch._inductor.compile_fx:fx_compile_mode": ANY,
            "torch._inductor.config:cpp_wrapper": ANY,
            "torch._inductor.config:custom_partitioner_fn": ANY,
            "torch._inductor.config:triton.cudagraphs": ANY,
            "torch._inductor.graph:GraphLowering.placeholder": Uses(names=("bw_donated_idxs",)),
            "torch._inductor.graph:SubgraphLowering.__init__": Uses(("self", "parent")),
            "torch._inductor.ir:InvokeSubgraph.create": Uses(("subgraph",)),
            "torch._prims.rng_prims:run_and_save_rng_state": ANY,
            "torch._prims.rng_prims:run_with_rng_state": ANY,
            "torch.ops:higher_order.invoke_subgraph": ANY,
        },
    ),
    "specialize_attention": Feature(
        "pass specialize_attention",
        {
            "torch._inductor.choices:InductorChoices.get_flex_attention_bwd_configs": Uses(
                ("self", "head_dim", "dtype")
            ),
            "torch._inductor.choices:InductorChoices.get_flex_attention_fwd_configs": Uses(
                ("self", "head_dim", "dtype")
            ),
            "torch._inductor.virtualized:V.choices": ANY,
            "torch.nn.attention:sdpa_kernel": Uses(("backends", "set_priority")),
            "torch.nn.attention.flex_attention:BlockMask.as_tuple": Uses(("self",)),
            "torch.nn.attention.flex_attention:_apply_kernel_options": Uses(("query", "key", "value")),
            "torch.nn.attention.flex_attention:_identity": ANY,
            "torch.ops:aten._flash_attention_backward": ANY,
            "torch.ops:aten._flash_attention_forward": ANY,
        },
    ),
    "trace_vmap": Feature(
        "pass trace_vmap",
        {
            "torch._C._functorch:_vmap_decrement_nesting": ANY,
            "torch._functorch.predispatch:_add_batch_dim": ANY,
            "torch._functorch.predispatch:_remove_batch_dim": ANY,
            "torch._functorch.predispatch:_vmap_decrement_nesting": ANY,
            "torch._functorch.predispatch:_vmap_increment_nesting": ANY,
            "torch._functorch.predispatch:lazy_load_decompositions": ANY,
            "torch.fx.experimental.proxy_tensor:make_fx": ANY,
        },
    ),
    "sum_embedding_grads": Feature(
        "pass sum_embedding_grads",
        {"torch.utils._python_dispatch:is_traceable_wrapper_subclass": ANY},
    ),
}

OFFLOAD_CONTEXT = Feature(
    "offload_checkpoints",
    {
        "torch._functorch._aot_autograd.utils:make_boxed_func": Uses(("f",)),
        "torch.autograd.function:Function.apply": ANY,
        "torch.utils.checkpoint:CheckpointFunction": ANY,
    },
)
"""What ``checkpoint_calls.py`` reads from frames."""

LOOKS = Feature("way to forget a compile", {"torch._dynamo.eval_frame:reset_code": ANY})
"""Without it, a look at a model counts as one of its compiles."""


def can_run(pass_name: str) -> bool:
    """Has this torch the private parts that the pass of this name needs? Warns once if not."""
    if not REWRITES.is_available():
        return False
    return pass_name not in PASSES or PASSES[pass_name].is_available()
