"""Captured graphs to change at random: taken from drawn programs, with values recorded anew after each change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import fx

from glue_compiler.capture import FLAGS
from glue_compiler.compat.dynamo import patch_dynamo
from glue_compiler.compat.switches import ENTER_AUTOCAST, EXIT_AUTOCAST, modes_restored
from glue_compiler.fx.bodies import CHECKPOINT
from glue_compiler.fx.copying import copy_graph_module
from glue_compiler.fx.values import unbacked_in, value_of
from tools.fuzz import fake_runs
from tools.fuzz.check import NotAProgram, clean_dynamo, module_of
from tools.fuzz.kinds import draw_program
from tools.fuzz.programs import Program


@dataclass(frozen=True)
class Template:
    """A graph that Dynamo captured.

    Attributes:
        order: for each placeholder the position among the program's inputs.
        is_symbolic: most of its values have sizes that depend on data.
        make: seed → the program's inputs.
        settings: make the context managers that the program is run in.
    """

    kind: str
    graph: fx.GraphModule
    order: tuple[int, ...]
    is_symbolic: bool
    make: Callable[[int], Sequence[Any]]
    program: Program
    settings: Sequence[Callable[[], Any]] = ()

    def inputs(self, seed: int) -> list[Any]:
        made = self.make(seed)
        return [made[position] for position in self.order]


def draw_template(random: Random, kind: str, device: str) -> Template:
    """
    Raises:
        NotAProgram: if the program fails, or is not one graph of tensors.
    """
    program = draw_program(random, kind, device, twists=0.0, plain=True)
    module = module_of(program)
    graphs: list[fx.GraphModule] = []
    calls: list[tuple[Any, ...]] = []

    def keep(gm: fx.GraphModule, _: Any) -> Any:
        graphs.append(copy_graph_module(gm))

        def call(*args: Any) -> Any:
            calls.append(args)
            return gm(*args)

        return call

    inputs = module["make"](1)
    with clean_dynamo(), patch_dynamo(FLAGS):
        try:
            torch.compile(module["f"], backend=keep, dynamic=False)(*inputs)
        except Exception as error:
            raise NotAProgram(str(error)) from error
    if len(graphs) != 1 or len(calls) != 1:
        raise NotAProgram("several graphs")
    for node in graphs[0].graph.find_nodes(op="placeholder"):
        node.meta.pop("grapharg", None)  # it asks for the input with which Dynamo traced, which is gone
    order = [next((i for i, given in enumerate(inputs) if given is arg), None) for arg in calls[0]]
    if None in order:
        raise NotAProgram("a graph input that is no input of the program")
    values = [value_of(node) for node in graphs[0].graph.nodes]
    is_symbolic = sum(bool(unbacked_in(value)) for value in values) > len(values) / 2
    given = tuple(order), is_symbolic, module["make"], program, module["SETTINGS"]
    return Template(kind, graphs[0], *given)  # type: ignore[arg-type]


class CannotRecord(Exception):
    """The graph cannot be run on fake tensors; a program of this form would not be captured."""


def record_values(gm: fx.GraphModule, inputs: Sequence[Any], is_symbolic: bool = False) -> None:
    """Record on each node what it is for ``inputs``, as Dynamo does while it captures.

    ``is_symbolic``: see :class:`Template`.

    Raises:
        CannotRecord: says why.
    """
    mode = fake_runs.new_fake_mode(remembers_calls=not is_symbolic)
    with modes_restored():
        try:
            fakes = [fake_runs.as_fake(mode, value) for value in inputs]
            with mode, torch.enable_grad():
                _Recorder(gm, mode).run(*fakes)
        except Exception as error:
            raise CannotRecord(f"{type(error).__name__}: {error}") from error


class _Recorder(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule, mode: Any) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.mode = mode

    def run_node(self, node: fx.Node) -> Any:
        node.meta.pop("unbacked_bindings", None)
        value = super().run_node(node)
        if node.op == "output" or (value is None and node.target is not torch._C._log_api_usage_once):
            node.meta.pop("example_value", None)
            return value
        if isinstance(value, fx.GraphModule) or node.target in (ENTER_AUTOCAST, EXIT_AUTOCAST):
            return value
        node.meta["example_value"] = value
        if bindings := fake_runs.unbacked_bindings(self.mode, value):
            node.meta["unbacked_bindings"] = bindings
        return value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is CHECKPOINT:
            return _Recorder(args[0], self.mode).run(*args[1:])
        return super().call_function(target, args, kwargs)


def run_graph(gm: fx.GraphModule) -> Callable[..., Any]:
    """A function that interprets ``gm``, with checkpoints as eager code has them, and leaves no mode behind."""
    from glue_compiler.verify.runs import eager_reference

    call = eager_reference(gm).forward  # called as a module, a graph that fails prints its text

    def run(*inputs: Any) -> tuple[Any, ...]:
        with modes_restored(), torch.enable_grad():
            outputs = call(*inputs)
        return tuple(value for value in outputs)

    return run
