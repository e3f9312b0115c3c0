"""Run-time operators of glue (namespace ``glue``), each with a plain torch reference beside its Triton kernels.

Importing this package registers them; a graph calls them as ``torch.ops.glue.<name>.default``.
"""

import glue_compiler.ops.flop_formulas  # noqa: F401  registers them
from glue_compiler.ops.counted_loop import counted_loop
from glue_compiler.ops.embedding import embedding_gradient
from glue_compiler.ops.expert_rows import expert_combine, expert_dot, expert_gather
from glue_compiler.ops.expert_sort import expert_sort
from glue_compiler.ops.grouped_linear import grouped_linear, grouped_outer
from glue_compiler.ops.grouped_linear_list import grouped_linear_list
from glue_compiler.ops.grouped_rows import grouped_repeat, grouped_sum
from glue_compiler.ops.interleaved import deinterleave
from glue_compiler.ops.known_masks import mask_documents
from glue_compiler.ops.linear_cross_entropy import linear_cross_entropy
from glue_compiler.ops.linear_row_statistics import linear_row_statistics
from glue_compiler.ops.mask_blocks import mask_blocks, row_offsets
from glue_compiler.ops.masked_attention import masked_attention
from glue_compiler.ops.packed_attention import (
    causal_attention,
    document_blocks,
    document_offsets,
    exact_document_offsets,
    packed_attention,
)
from glue_compiler.ops.private_copy import private_copy
from glue_compiler.ops.shared_prefixes import shared_tokens, spread_rows
from glue_compiler.ops.token_rows import put_rows, take_rows, target_rows, token_rows
from glue_compiler.ops.varlen_attention import varlen_attention

__all__ = [
    "causal_attention",
    "counted_loop",
    "deinterleave",
    "document_blocks",
    "document_offsets",
    "embedding_gradient",
    "exact_document_offsets",
    "expert_combine",
    "expert_dot",
    "expert_gather",
    "expert_sort",
    "grouped_linear",
    "grouped_linear_list",
    "grouped_outer",
    "grouped_repeat",
    "grouped_sum",
    "linear_cross_entropy",
    "linear_row_statistics",
    "mask_blocks",
    "mask_documents",
    "masked_attention",
    "packed_attention",
    "private_copy",
    "put_rows",
    "take_rows",
    "target_rows",
    "token_rows",
    "row_offsets",
    "shared_tokens",
    "spread_rows",
    "varlen_attention",
]
