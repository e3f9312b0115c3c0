"""Every use of torch's private parts, and every difference between torch 2.11 and 2.15. Nothing else.

Other modules call these functions instead of importing ``torch._dynamo``, ``torch._inductor`` and the like, so that a
new torch release is met in this folder alone: one file for each part of torch.
"""

from glue_compiler.compat.dynamo import (
    FrameHook,
    dynamo_flags,
    error_chain,
    forget_compiled,
    glue_error_in,
    install_frame_hook,
    is_compiled,
    is_data_dependent_failure,
    is_recompile_limit,
    is_soft_failure,
    patch_dynamo,
)
from glue_compiler.compat.inductor import (
    CacheKeyPass,
    cache_key_patch,
    checked_inductor_option,
    compile_with_aot_eager,
    compile_with_inductor,
    inductor_mode_options,
    inductor_option_names,
    is_inductor_option,
)
from glue_compiler.compat.loop_capture import instruction_index, loop_about_to_start, traced_iteration
from glue_compiler.compat.symbols import (
    fake_mode_of,
    fake_tensor_type,
    is_functorch_wrapped,
    is_real,
    is_unbacked,
    may_be_equal,
    rename_unbacked,
    restored_on_error,
    speculation,
    unbacked_symbols,
    upper_bound,
)
from glue_compiler.compat.tracing import (
    copy_node_attributes,
    current_compile_id,
    graph_break_of,
    observed,
    trace_artifact,
    trace_is_on,
)
from glue_compiler.compat.versions import NEWEST_TORCH, OLDEST_TORCH, hash_of_files, version_at_least, warn_if_untested

__all__ = [
    "CacheKeyPass",
    "FrameHook",
    "NEWEST_TORCH",
    "OLDEST_TORCH",
    "cache_key_patch",
    "checked_inductor_option",
    "compile_with_aot_eager",
    "compile_with_inductor",
    "copy_node_attributes",
    "current_compile_id",
    "dynamo_flags",
    "error_chain",
    "fake_mode_of",
    "fake_tensor_type",
    "forget_compiled",
    "glue_error_in",
    "graph_break_of",
    "hash_of_files",
    "inductor_mode_options",
    "inductor_option_names",
    "install_frame_hook",
    "instruction_index",
    "is_compiled",
    "is_data_dependent_failure",
    "is_functorch_wrapped",
    "is_inductor_option",
    "is_real",
    "is_recompile_limit",
    "is_soft_failure",
    "is_unbacked",
    "loop_about_to_start",
    "may_be_equal",
    "observed",
    "patch_dynamo",
    "rename_unbacked",
    "restored_on_error",
    "speculation",
    "trace_artifact",
    "trace_is_on",
    "traced_iteration",
    "unbacked_symbols",
    "upper_bound",
    "version_at_least",
    "warn_if_untested",
]
