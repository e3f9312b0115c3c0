"""A graph from plain data."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from glue_compiler.compat import graph_inputs, saved_symbols
from glue_compiler.errors import GlueGraphFileError
from glue_compiler.fx.bodies import set_attribute
from glue_compiler.fx.training_pair import TrainingPair
from glue_compiler.fx.values import Symbolic
from glue_compiler.graph_file.encode import FORMAT, Plain
from glue_compiler.graph_file.names import named


def decode_graph(document: Plain) -> fx.GraphModule | TrainingPair:
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise GlueGraphFileError(f"not a graph that glue saved: the file does not begin with the format '{FORMAT}'")
    decoder = _Decoder(document)
    roots = [decoder.module(number) for number in document["roots"]]
    return roots[0] if len(roots) == 1 else TrainingPair(roots[0], roots[1], document["num_outputs"])


class _Decoder:
    def __init__(self, document: Plain) -> None:
        self.document = document
        empty: Plain = {"symbols": [], "replacements": [], "renamings": [], "facts": []}
        self.shape_env, self.symbols = saved_symbols.decode_symbols(document["shape_env"] or empty)
        self.fake_mode = saved_symbols.fake_mode_for(self.shape_env)
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.modules: dict[int, fx.GraphModule] = {}

    def module(self, number: int) -> fx.GraphModule:
        if number in self.modules:
            return self.modules[number]
        encoded = self.document["modules"][number]
        root = torch.nn.Module()
        for name, attribute in encoded["attributes"].items():
            set_attribute(root, name, self._attribute(attribute))
        graph = fx.Graph()
        nodes: dict[str, fx.Node] = {}
        for each in encoded["nodes"]:
            target = named(each["target"]) if each["op"] == "call_function" else each["target"]
            args, kwargs = (
                self._value(each.get("args", []), nodes),
                self._value(each.get("kwargs", {"dict": []}), nodes),
            )
            node = nodes[each["name"]] = graph.create_node(each["op"], target, tuple(args), kwargs, name=each["name"])
            if node.name != each["name"]:
                raise GlueGraphFileError(f"two nodes are named '{each['name']}'")
            self._set_metadata(node, each)
        self.modules[number] = fx.GraphModule(root, graph)
        return self.modules[number]

    def _attribute(self, encoded: Plain) -> Any:
        if "module" in encoded:
            return self.module(encoded["module"])
        tensor = self._real_tensor(encoded)
        if encoded["parameter"]:
            return torch.nn.Parameter(tensor, encoded["requires_grad"])
        return tensor.requires_grad_(encoded["requires_grad"])

    def _set_metadata(self, node: fx.Node, encoded: Plain) -> None:
        for key in ("example_value", "val"):
            if key in encoded:
                node.meta[key] = self._value(encoded[key], {})
        if "unbacked_bindings" in encoded:
            # Where in the value each symbol is, nobody who reads a loaded graph asks.
            node.meta["unbacked_bindings"] = {self.symbols[name]: () for name in encoded["unbacked_bindings"]}
        if "stack_trace" in encoded:
            node.meta["stack_trace"] = self.document["texts"][encoded["stack_trace"]]
        if "layers" in encoded:
            lines = self.document["texts"][encoded["layers"]].split("\n")
            node.meta["nn_module_stack"] = {key: (path, kind) for key, path, kind in (x.split("\t") for x in lines)}
        node.meta.update({key: self._value(value, {}) for key, value in encoded.get("meta", {}).items()})
        if node.op == "placeholder":
            graph_inputs.set_sourceless(node)

    def _value(self, encoded: Plain, nodes: dict[str, fx.Node]) -> Any:
        if isinstance(encoded, list):
            return [self._value(item, nodes) for item in encoded]
        if not isinstance(encoded, dict):
            return encoded
        if "tensor" in encoded:
            return self._fake_tensor(encoded)
        ((kind, content),) = encoded.items()
        if kind == "node":
            return nodes[content]
        if kind == "number":
            return self._number(content)
        if kind in ("tuple", "slice"):
            return (tuple if kind == "tuple" else _slice)(self._value(item, nodes) for item in content)
        if kind == "dict":
            return {self._value(key, nodes): self._value(item, nodes) for key, item in content}
        return _constant(kind, content)

    def _number(self, encoded: Plain) -> Any:
        return saved_symbols.decode_number(encoded, self.shape_env, self.symbols)

    def _size(self, encoded: Plain) -> Any:
        return encoded if isinstance(encoded, int) else self._number(encoded)

    def _fake_tensor(self, encoded: Plain) -> torch.Tensor:
        storage = self.storages.setdefault(encoded["storage"], torch.UntypedStorage(0, device="meta"))
        dtype = getattr(torch, encoded["tensor"])
        size, stride = ([self._size(number) for number in encoded[key]] for key in ("size", "stride"))
        offset = self._size(encoded["offset"])
        tensor = saved_symbols.make_fake_tensor(self.fake_mode, storage, dtype, encoded["device"], size, stride, offset)
        if encoded["requires_grad"]:
            tensor.requires_grad_()
            if not encoded["leaf"]:
                with self.fake_mode, torch.enable_grad():
                    tensor = tensor.view_as(tensor)
        return tensor

    def _real_tensor(self, encoded: Plain) -> torch.Tensor:
        """On the device where the original was, if there is one of its kind here."""
        dtype = getattr(torch, encoded["tensor"])
        size, stride = ([self._hint(number) for number in encoded[key]] for key in ("size", "stride"))
        device = encoded["device"]
        if device.startswith("cuda") and not torch.cuda.is_available():
            device = "cpu"
        tensor = torch.empty_strided(size, stride, dtype=dtype, device=device)
        if "values" in encoded:
            values = [self._value(value, {}) for value in encoded["values"]]
            return tensor.copy_(torch.tensor(values, dtype=dtype).reshape(size))
        if dtype.is_floating_point or dtype.is_complex:
            return tensor.copy_(torch.randn(size, dtype=torch.complex64 if dtype.is_complex else torch.float32))
        return tensor.zero_()

    def _hint(self, encoded: Plain) -> int:
        number = self._size(encoded)
        if isinstance(number, Symbolic):
            return int(saved_symbols.hint_of(number))
        return int(number)


def _slice(parts: Any) -> slice:
    return slice(*parts)


def _constant(kind: str, content: Plain) -> Any:
    if kind == "enum":
        return getattr(named(content[0]), content[1])
    if kind == "float":
        return float(content)
    if kind == "complex":
        return complex(*map(float, content))
    if kind == "torch":
        return getattr(torch, content)
    if kind == "device":
        return torch.device(content)
    if kind == "ellipsis":
        return Ellipsis
    if kind == "object":
        return named(content)
    raise GlueGraphFileError(f"the file holds a '{kind}', which this version of glue cannot read")
