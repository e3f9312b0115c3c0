"""Run-time operators of glue (namespace ``glue``), each with a plain torch reference beside its Triton kernels.

Importing this package registers them; a graph calls them as ``torch.ops.glue.<name>.default``.
"""

from glue_compiler.ops.expert_rows import expert_combine, expert_dot, expert_gather
from glue_compiler.ops.expert_sort import expert_sort
from glue_compiler.ops.grouped_linear import grouped_linear, grouped_outer
from glue_compiler.ops.grouped_linear_list import grouped_linear_list
from glue_compiler.ops.grouped_rows import grouped_repeat, grouped_sum

__all__ = [
    "expert_combine",
    "expert_dot",
    "expert_gather",
    "expert_sort",
    "grouped_linear",
    "grouped_linear_list",
    "grouped_outer",
    "grouped_repeat",
    "grouped_sum",
]
