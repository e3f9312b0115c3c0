"""A graph as plain data. The keys are explained where they are written."""

from __future__ import annotations

import enum
import math
from typing import Any

import torch
from torch import fx

from glue_compiler import compat
from glue_compiler.compat import saved_symbols
from glue_compiler.errors import GlueGraphFileError
from glue_compiler.fx import bodies
from glue_compiler.fx.training_pair import TrainingPair
from glue_compiler.fx.values import Symbolic, has_value, is_plain, leaves, storage_of, value_of
from glue_compiler.graph_file.names import name_of

FORMAT = "glue graph 1"
MOST_VALUES = 64
"""Elements up to which the values of an attribute are written."""

Plain = Any
"""What JSON can hold."""


def encode_graph(graph: fx.GraphModule | TrainingPair) -> Plain:
    return _Encoder().document(graph)


class _Encoder:
    def __init__(self) -> None:
        self.storages: dict[int, int] = {}
        self.texts: dict[str, int] = {}
        self.modules: dict[int, int] = {}
        self.encoded_modules: list[Plain] = []
        self.symbols: dict[str, None] = {}

    def document(self, graph: fx.GraphModule | TrainingPair) -> Plain:
        is_pair = isinstance(graph, TrainingPair)
        roots = [graph.forward, graph.backward] if isinstance(graph, TrainingPair) else [graph]
        numbers = [self._module(root) for root in roots]
        values = [
            leaf
            for root in roots
            for module in bodies.graph_modules(root)
            for node in module.graph.nodes
            for leaf in leaves(value_of(node))
        ]
        shape_env = saved_symbols.shape_env_in(values)
        return {
            "format": FORMAT,
            "torch": torch.__version__,
            "roots": numbers,
            "num_outputs": graph.num_outputs if is_pair else None,
            # By the numbers that "roots" and {"module": number} use; a body may belong to several calls.
            "modules": self.encoded_modules,
            # Stack traces and other long texts, by number: layers repeat them.
            "texts": list(self.texts),
            "shape_env": saved_symbols.encode_symbols(shape_env, self.symbols) if shape_env is not None else None,
        }

    def _module(self, gm: fx.GraphModule) -> int:
        if id(gm) in self.modules:
            return self.modules[id(gm)]
        number = self.modules[id(gm)] = len(self.encoded_modules)
        self.encoded_modules.append(None)
        attributes = {
            str(node.target): self._attribute(node, bodies.attribute_of(gm, node))
            for node in gm.graph.find_nodes(op="get_attr")
        }
        nodes = [self._node(node) for node in gm.graph.nodes]
        self.encoded_modules[number] = {"attributes": attributes, "nodes": nodes}
        return number

    def _attribute(self, node: fx.Node, value: Any) -> Plain:
        if isinstance(value, fx.GraphModule):
            return {"module": self._module(value)}
        if isinstance(value, torch.Tensor) and is_plain(value):
            described = self._tensor(value)
            if value.numel() <= MOST_VALUES and compat.is_real(value):
                # In order of the logical elements, as Python numbers, which every dtype converts back from exactly.
                described["values"] = [self._constant(item) for item in value.detach().flatten().tolist()]
            return described
        raise GlueGraphFileError(
            f"node '{node.name}' reads a {type(value).__name__}, which cannot be written to a file"
        )

    def _node(self, node: fx.Node) -> Plain:
        try:
            target = name_of(node.target) if node.op == "call_function" else str(node.target)
            encoded = {"op": node.op, "name": node.name, "target": target}
            for key, arguments in (("args", list(node.args)), ("kwargs", dict(node.kwargs))):
                if arguments:
                    encoded[key] = self._value(arguments)
        except GlueGraphFileError as error:
            raise GlueGraphFileError(f"node '{node.name}': {error}") from None
        encoded |= self._metadata(node)
        return encoded

    def _metadata(self, node: fx.Node) -> dict[str, Plain]:
        encoded: dict[str, Plain] = {}
        # Without a value (a subclass of Tensor, say), passes take the node for something that they do not understand.
        if has_value(node) and self._is_describable(value_of(node)):
            encoded["example_value" if "example_value" in node.meta else "val"] = self._value(value_of(node))
        if node.meta.get("unbacked_bindings"):
            names = [symbol.name for symbol in node.meta["unbacked_bindings"]]
            self.symbols.update(dict.fromkeys(names))
            encoded["unbacked_bindings"] = names
        if trace := node.meta.get("stack_trace"):
            encoded["stack_trace"] = self._text(trace)
        if stack := node.meta.get("nn_module_stack"):
            # The class by name: its module need not be importable where the file is read.
            encoded["layers"] = self._text(
                "\n".join(
                    f"{key}\t{path}\t{getattr(kind, '__qualname__', kind)}" for key, (path, kind) in stack.items()
                )
            )
        plain = {key: value for key, value in node.meta.items() if isinstance(value, int | str | enum.Enum)}
        plain.pop("stack_trace", None)
        if plain:
            encoded["meta"] = {key: self._value(value) for key, value in plain.items()}
        return encoded

    def _is_describable(self, value: Any) -> bool:
        return all(
            is_plain(leaf) if isinstance(leaf, torch.Tensor) else leaf is None or isinstance(leaf, _DESCRIBABLE)
            for leaf in leaves(value)
        )

    def _text(self, text: str) -> int:
        return self.texts.setdefault(text, len(self.texts))

    def _value(self, value: Any) -> Plain:
        """Arguments and recorded values: JSON's own constants as they are, anything else as a dict with one kind."""
        if isinstance(value, fx.Node):
            return {"node": value.name}
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, Symbolic):
            return {"number": self._number(value)}
        if isinstance(value, list):
            return [self._value(item) for item in value]
        if isinstance(value, tuple):  # torch.Size and named tuples too: operators take any tuple
            return {"tuple": [self._value(item) for item in value]}
        if isinstance(value, dict):
            return {"dict": [[self._value(key), self._value(item)] for key, item in value.items()]}
        if isinstance(value, slice):
            return {"slice": [self._value(part) for part in (value.start, value.stop, value.step)]}
        return self._constant(value)

    def _constant(self, value: Any) -> Plain:
        if isinstance(value, enum.Enum):
            return {"enum": [name_of(type(value)), value.name]}
        if value is None or type(value) in (bool, int, str):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"float": repr(value)}
        if isinstance(value, complex):
            return {"complex": [repr(value.real), repr(value.imag)]}
        if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
            return {"torch": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        if value is Ellipsis:
            return {"ellipsis": True}
        return {"object": name_of(value)}

    def _tensor(self, tensor: torch.Tensor) -> dict[str, Plain]:
        if not is_plain(tensor):
            raise GlueGraphFileError(f"a {type(tensor).__name__} as an argument cannot be written to a file")
        storage = self.storages.setdefault(storage_of(tensor), len(self.storages))
        return {
            "tensor": str(tensor.dtype).removeprefix("torch."),
            "size": [self._size(size) for size in tensor.shape],
            "stride": [self._size(step) for step in tensor.stride()],
            "offset": self._size(tensor.storage_offset()),
            "device": str(tensor.device),
            # Tensors with the same number share memory.
            "storage": storage,
            "requires_grad": tensor.requires_grad,
            "leaf": tensor.is_leaf,
            "parameter": isinstance(tensor, torch.nn.Parameter),
        }

    def _size(self, number: Any) -> Plain:
        return self._number(number) if isinstance(number, Symbolic) else int(number)

    def _number(self, number: Any) -> Plain:
        for expression in (number.node._expr, number.node.expr):
            self.symbols.update(dict.fromkeys(sorted(symbol.name for symbol in expression.free_symbols)))
        return saved_symbols.encode_number(number)


_DESCRIBABLE = (*Symbolic, bool, int, float, complex, str, torch.dtype, torch.device)
