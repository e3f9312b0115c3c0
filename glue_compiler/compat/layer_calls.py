"""Dynamo: calls of layers, as its translator comes to them, and how one is left to Python."""

from __future__ import annotations

import enum
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from glue_compiler.compat.parts import ANY, Feature, Uses

_TRANSLATOR = "torch._dynamo.symbolic_convert:InstructionTranslatorBase"
_BYTECODE = "torch._dynamo.bytecode_transformation"
REGIONS = Feature(
    "compile of each kind of layer once",
    {
        "torch._dynamo.symbolic_convert:SpeculationEntry.fail_and_restart_analysis": Uses(
            ("self", "error_on_graph_break")
        ),
        f"{_TRANSLATOR}.inline_user_function_return": Uses(("self", "fn", "args", "kwargs")),
        "torch._dynamo.exc:SkipFrame": ANY,
        "torch._dynamo.exc:unimplemented": Uses(("gb_type", "context", "explanation", "hints")),
        f"{_TRANSLATOR}.step": Uses(
            names=("current_speculation", "step_graph_break", "error_on_graph_break", "is_non_empty_graph")
        ),
        f"{_TRANSLATOR.removesuffix('Base')}.is_non_empty_graph": Uses(("self",), ("count_calls",)),
        f"{_TRANSLATOR}.step_graph_break": Uses(("self",), ("add_output_instructions", "instructions")),
        f"{_BYTECODE}:add_push_null": ANY,
        f"{_BYTECODE}:create_call_function": Uses(("nargs", "push_null")),
        f"{_BYTECODE}:create_instruction": Uses(("name", "arg", "argval")),
        f"{_BYTECODE}:create_jump_absolute": Uses(("target",)),
        f"{_BYTECODE}:create_load_const": Uses(("val", "checked")),
        f"{_BYTECODE}:transform_code_object": Uses(("code", "transformations")),
        "torch._dynamo.output_graph:OutputGraph.add_output_instructions": Uses(names=("output_instructions",)),
        "torch._dynamo.trace_rules:check": Uses(("obj", "is_inlined_call")),
        "torch._dynamo.types:ConvertFrameReturn": Uses(("frame_exec_strategy", "apply_to_code")),
        "torch._dynamo.types:FrameAction.SKIP": ANY,
        "torch._dynamo.types:FrameExecStrategy": ANY,
        "torch._dynamo.config:recompile_limit": ANY,
        "torch._dynamo.config:skip_nnmodule_hook_guards": ANY,
        "torch._dynamo.side_effects:SideEffects.load_cell": Uses(("self", "cellvar")),
        "torch._dynamo.variables:CellVariable": ANY,
        "torch._dynamo.variables:UserDefinedObjectVariable": ANY,
        "torch._dynamo.variables.lazy:LazyVariableTracker.peek_value": Uses(("self",)),
        "torch._dynamo.variables.lazy:LazyVariableTracker.unwrap": Uses(("self",)),
    },
)
"""Without it, graphs are whole. Also for what ``loop_tails.py`` uses."""

LEFT_TO_PYTHON = "glue: left to Python"


@dataclass(frozen=True)
class ModuleCall:
    """A function whose first argument is ``module`` is called in ``frame``, Dynamo's translator.

    ``code``: the function's. ``arguments``: Dynamo's records of all others. ``nodes``: how many were made before.
    """

    frame: Any
    code: Any
    module: torch.nn.Module
    arguments: Sequence[Any]
    nodes: int

    @property
    def at(self) -> int | None:
        """Index of the instruction behind the call."""
        at: int | None = self.frame.instruction_pointer
        return at

    @property
    def at_in_function(self) -> int:
        """Index of the instruction of the function that Dynamo converts in which this call is made."""
        at: int = self.frame.output.root_tx.instruction_pointer
        return at - 1

    @property
    def graph(self) -> fx.Graph:
        """The graph, or body of an operator, that is being made."""
        graph: fx.Graph = self.frame.output.graph
        return graph

    @property
    def may_not_break(self) -> bool:
        return bool(self.frame.one_graph or self.frame.error_on_graph_break)


def leave_to_python(frame: Any, reason: str) -> None:
    """The graph ends before the call that ``frame`` is about to trace.

    In a loop, what comes before the loop's statement is the graph, and the rest of the function is Python's.
    """
    from torch._dynamo.exc import SkipFrame, unimplemented

    root = frame.output.root_tx
    if _is_in_loop(root):
        if root.current_speculation is None:
            raise SkipFrame(reason)
        root.current_speculation.fail_and_restart_analysis(root.error_on_graph_break)
    unimplemented(gb_type=LEFT_TO_PYTHON, context="", explanation=reason, hints=[])


def _is_in_loop(frame: Any) -> bool:
    """Does code behind the instruction that is traced jump back to it, or to one before?

    Dynamo asks so, too, but looks no further than the first return.
    """
    at = frame.instruction_pointer - 1
    targets = [each.target for each in frame.instructions[at:] if each.target is not None]
    return any(frame.indexof[target] <= at for target in targets)


def is_never_converted(module: torch.nn.Module) -> bool:
    """Does Dynamo leave a module's function to Python where Python calls it, and only inlines it, as torch's own?"""
    from torch._dynamo import trace_rules

    code = getattr(module.forward, "__code__", None)
    return code is None or bool(trace_rules.check(code))


def has_hooks(module: torch.nn.Module) -> bool:
    """Does a call of ``module`` itself run more than its ``forward``?"""
    return any(vars(module).get(name) for name in _HOOKS)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def run_in_python(*, always: bool = False) -> Any:
    """What a conversion returns for a call that runs as if nothing was compiled; ``always``: for all of this code."""
    from torch._dynamo.types import ConvertFrameReturn, FrameAction, FrameExecStrategy

    skip = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)
    return ConvertFrameReturn(frame_exec_strategy=skip, apply_to_code=always)


def value_behind(variable: Any) -> Any:
    """The object that a record of Dynamo's stands for, without a look at it that would become a guard."""
    known = _seen(variable)
    if _is_lazy(known):
        return known.peek_value()
    return None if known is None else vars(known).get("value")


def local_variables(frame: Any) -> dict[str, Any]:
    """Dynamo's records by name; of a cell, which inner functions read, what is in it."""
    from torch._dynamo.exc import Unsupported
    from torch._dynamo.variables import CellVariable

    found = dict(frame.symbolic_locals)
    for name, variable in frame.symbolic_locals.items():
        if isinstance(variable, CellVariable):
            try:
                found[name] = frame.output.side_effects.load_cell(variable)
            except Unsupported:  # it is not set yet
                del found[name]
    return found


def module_behind(variable: Any) -> torch.nn.Module | None:
    value = value_behind(variable)
    return value if isinstance(value, torch.nn.Module) else None


def _seen(variable: Any) -> Any:
    """The record behind a lazy one, if something has looked at it."""
    return variable.unwrap() if _is_lazy(variable) else variable


def _is_lazy(variable: Any) -> bool:
    from torch._dynamo.variables.lazy import LazyVariableTracker

    return isinstance(variable, LazyVariableTracker)


def nodes_in(variables: Iterable[Any]) -> Iterator[fx.Node]:
    """The nodes of tensors that Dynamo's records stand for, and of those in lists and tuples."""
    for variable in variables:
        parts = vars(_seen(variable))
        if isinstance(parts.get("proxy"), fx.Proxy):
            yield parts["proxy"].node
        if isinstance(parts.get("items"), list | tuple):
            yield from nodes_in(parts["items"])


def depends_on(variables: Iterable[Any], nodes: Iterable[fx.Node]) -> bool:
    """Is a tensor among ``variables`` one of ``nodes``, or computed from one that is no input?"""
    made = {node for node in nodes if node.op != "placeholder"}
    waiting, seen = list(nodes_in(variables)), set[fx.Node]()
    while waiting:
        node = waiting.pop()
        if node in made:
            return True
        if node not in seen:
            seen.add(node)
            waiting += node.all_input_nodes
    return False


def object_in(variables: Iterable[Any]) -> type | None:
    """The class of an object among ``variables``, or in their lists and dicts, that is no tensor, number or the like.

    None, if there is none. What Dynamo has not looked at yet is not looked at.
    """
    from torch._dynamo.variables import UserDefinedObjectVariable

    found: type | None
    for variable in map(_seen, variables):
        if _is_lazy(variable) or isinstance(variable, UserDefinedObjectVariable):
            found = object_among([value_behind(variable)])
        else:
            found = object_in(_parts(vars(variable).get("items")))
        if found is not None:
            return found
    return None


def object_among(values: Iterable[Any]) -> type | None:
    """As ``object_in``, of values themselves."""
    for value in values:
        if isinstance(value, dict | list | tuple):
            found = object_among(_parts(value))
        else:
            found = None if isinstance(value, _PLAIN) or callable(value) else type(value)
        if found is not None:
            return found
    return None


def take_tensor(variables: Sequence[Any]) -> bool:
    """Does one of Dynamo's records stand for a tensor, or for a list or dict with one?"""
    is_made = next(nodes_in(variables), None) is not None
    return is_made or hold_tensor(value_behind(variable) for variable in variables if _is_lazy(_seen(variable)))


def hold_tensor(values: Iterable[Any]) -> bool:
    """Is a tensor among ``values``, or in their lists and dicts?"""
    return any(isinstance(value, torch.Tensor) or hold_tensor(_parts(value)) for value in values)


def form_of(values: Iterable[Any]) -> Hashable:
    """What a call's tensors are, in lists and dicts too, and the modes of this thread that they meet."""
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled()
    return modes, tuple(_forms(values))


def _forms(values: Iterable[Any]) -> Iterator[Hashable]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield str(value.shape), value.dtype, value.device, value.requires_grad
        elif isinstance(value, torch.nn.Module):
            yield value.training
        else:
            yield tuple(_forms(_parts(value)))


def _parts(value: Any) -> Iterable[Any]:
    """What is in a list, tuple or dict."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


_PLAIN = (type(None), bool, int, float, str, torch.Tensor, torch.dtype, torch.device, torch.SymInt, enum.Enum)
