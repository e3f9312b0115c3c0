"""The spellings of an operator in a captured graph: torch functions, Python's operators, and method names.

Only calls with positional operands are meant; what a spelling's keyword arguments change is for its reader to refuse.
"""

from __future__ import annotations

import operator

import torch

ADD = {torch.add, operator.add, "add", "__add__", "__radd__"}
MULTIPLY = {torch.mul, torch.multiply, operator.mul, "mul", "multiply", "__mul__", "__rmul__"}
ANY = {torch.any, "any"}
SUM = {torch.sum, "sum"}
CAT = {torch.cat, torch.concat, torch.concatenate}
TOP_K = {torch.topk, "topk"}
TRANSPOSE = {torch.transpose, torch.swapaxes, "transpose", "swapaxes"}
ZEROS = {torch.zeros, torch.zeros_like, "new_zeros"}
ONES = {torch.ones, torch.ones_like, "new_ones"}
EMPTY = {torch.empty, torch.empty_like, "new_empty"}
