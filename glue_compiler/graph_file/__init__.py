"""Graphs as files: what a pass reads of a graph, without the model that it was captured from.

A file is JSON: operators and functions by name, tensors as sizes, symbols with their hints and ranges. It does not
depend on torch's version, and loading it imports nothing but the functions that the graph calls.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import TYPE_CHECKING

from glue_compiler.compat.features import SAVED_GRAPHS
from glue_compiler.errors import GlueGraphFileError
from glue_compiler.graph_file.decode import decode_graph
from glue_compiler.graph_file.encode import encode_graph

if TYPE_CHECKING:
    from os import PathLike

    from torch import fx

    from glue_compiler.fx.training_pair import TrainingPair

__all__ = ["load", "save"]


def save(graph: fx.GraphModule | TrainingPair, file: str | PathLike[str]) -> None:
    """Write ``graph`` and its bodies to ``file``; compressed, if the name ends in ``.gz``.

    Of a tensor that the graph holds as an attribute, the values are written up to 64 elements; of a larger one, sizes
    and dtype. A checkpoint's policy function is left out: it decides what is saved, not what is computed.

    Raises:
        GlueGraphFileError: for a node with a function or an argument that no other process could name, or a torch
            whose symbols glue does not know.
    """
    _check_torch()
    text = json.dumps(encode_graph(graph), separators=(",", ":"))
    path = Path(file)
    # mtime=0: the same graph gives the same bytes, so that a fixture changes only when its graph does.
    path.write_bytes(gzip.compress(text.encode(), mtime=0) if path.suffix == ".gz" else text.encode())


def load(file: str | PathLike[str]) -> fx.GraphModule | TrainingPair:
    """The graph in ``file``: a pass finds on its nodes what it found on the original, and it can be called.

    Its fake tensors belong to a mode of their own. Attributes whose values were not written have random ones.

    Raises:
        GlueGraphFileError: for another kind of file, a function that cannot be imported here, or such a torch.
    """
    _check_torch()
    path = Path(file)
    content = path.read_bytes()
    return decode_graph(json.loads(gzip.decompress(content) if path.suffix == ".gz" else content))


def _check_torch() -> None:
    if not SAVED_GRAPHS.is_available():
        raise GlueGraphFileError(f"glue's {SAVED_GRAPHS.name} is off with this torch")
