"""Dynamo: one hook into its tracing, that tells observers what traced code does, and asks them where it branches."""

from __future__ import annotations

import contextlib
import dis
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from glue_compiler.compat import layer_calls, loop_tails
from glue_compiler.compat.harmless_values import touched
from glue_compiler.compat.known_index import hit_variable, read_as_number, replace_known_index
from glue_compiler.compat.parts import ANY, Feature, Uses
from glue_compiler.compat.tracing_observer import TracedInstruction as TracedInstruction
from glue_compiler.compat.tracing_observer import TracingObserver as TracingObserver

Function = Callable[..., Any]

TRACING = Feature(
    "tracing of loops over experts and of branches on integer inputs",
    {
        "torch._dynamo.bytecode_transformation:Instruction.__annotations__": Uses(texts=("exn_tab_entry",)),
        "torch._dynamo.bytecode_transformation:InstructionExnTabEntry.__annotations__": Uses(texts=("target",)),
        "torch._dynamo.exc:unimplemented": Uses(("gb_type", "context", "explanation", "hints")),
        "torch._dynamo.output_graph:SubgraphTracer.__init__": Uses(("self",), ("parent", "source_target")),
        "torch._dynamo.output_graph:SubgraphTracer.create_proxy": Uses(("self", "kind", "target")),
        "torch._dynamo.symbolic_convert:InliningInstructionTranslator.__init__": Uses(names=("parent",)),
        "torch._dynamo.symbolic_convert:InstructionTranslatorBase.__init__": Uses(
            names=("active_generic_context_managers", "block_stack", "f_globals", "indexof")
        ),
        "torch._dynamo.symbolic_convert:InstructionTranslatorBase.run": Uses(names=("step",)),
        "torch._dynamo.output_graph:OutputGraph.compile_subgraph": Uses(("self", "tx", "reason")),
        "torch._dynamo.symbolic_convert:InstructionTranslatorBase.step": Uses(
            ("self",), ("instruction_pointer", "instructions", "stack", "output", "dispatch_table")
        ),
        "torch._dynamo.utils:numpy_method_wrapper.__init__": Uses(("self", "method")),
        "torch._dynamo.utils:numpy_operator_wrapper.__init__": Uses(("self", "op")),
        "torch._dynamo.utils:numpy_to_tensor_wrapper.__init__": Uses(("self", "f")),
        "torch._dynamo.variables.base:AttributeMutationNew.__init__": Uses(("self",)),
        "torch._dynamo.variables.base:ValueMutationNew.__init__": Uses(("self",)),
        "torch._dynamo.variables.base:VariableTracker.as_proxy": Uses(("self",)),
        "torch._dynamo.variables.base:VariableTracker.as_python_constant": Uses(("self",)),
        "torch._dynamo.variables.base:VariableTracker.call_method": Uses(("self", "tx", "name", "args", "kwargs")),
        "torch._dynamo.variables.base:VariableTracker.is_python_constant": Uses(("self",)),
        "torch._dynamo.variables.constant:ConstantVariable.create": Uses(("value",)),
        "torch._dynamo.variables.ctx_manager:GenericContextWrappingVariable.__init__": Uses(names=("cm_obj",)),
        "torch._dynamo.variables.ctx_manager:InferenceModeVariable.enter": Uses(("self", "tx")),
        "torch._dynamo.variables.dicts:ConstDictVariable.__init__": Uses(names=("items",)),
        "torch._dynamo.variables.lazy:LazyVariableTracker.realize": Uses(("self",)),
        "torch._dynamo.variables.lists:BaseListVariable.__init__": Uses(names=("items",)),
        "torch._dynamo.variables.lists:ListVariable": ANY,
        "torch._dynamo.variables.tensor:SymNodeVariable.evaluate_expr": Uses(("self", "output_graph")),
        "torch._dynamo.variables.tensor:TensorVariable.call_method": Uses(("self", "tx", "name", "args", "kwargs")),
        "torch._dynamo.variables.tensor:TensorVariable.method_requires_grad_": Uses(
            ("self", "tx", "requires_grad"), ("as_proxy", "requires_grad")
        ),
        "torch._dynamo.variables.tensor:TensorVariable.unpack_var_sequence": Uses(("self", "tx")),
        "torch._subclasses.fake_tensor:FakeTensor.__annotations__": Uses(texts=("nonzero_memo",)),
        "torch.fx.experimental.symbolic_shapes:ShapeEnv.guard_or_defer_runtime_assert": Uses(
            ("self", "orig_expr", "msg")
        ),
    },
)
"""Also for what ``dynamo_frames.py``, ``harmless_values.py``, ``known_index.py``, ``numpy_capture.py`` and
``size_assertions.py`` use."""


class _Observers(threading.local):
    now: tuple[TracingObserver, ...] = ()
    watching: tuple[TracingObserver, ...] = ()
    hearing: tuple[TracingObserver, ...] = ()
    """Those that ask for some instructions, and those that hear of all."""
    output: Any = None
    """What Dynamo traces into: another object when it starts again."""
    called: tuple[TracingObserver, ...] = ()
    """Those that want to hear of calls."""
    nodes: int = 0
    """How many were made while anybody observed."""


_observers = _Observers()
_lock = threading.Lock()
_hooks = 0
_saved: list[tuple[Any, str, Any]] = []


@contextlib.contextmanager
def traced(observer: TracingObserver) -> Iterator[None]:
    """What this thread's Dynamo traces meanwhile, ``observer`` hears of, after the observers around it."""
    if not TRACING.is_available():
        yield
        return
    with _hooked(), _listening((*_observers.now, observer)):
        yield


def nodes_made() -> int:
    """How many nodes Dynamo has made in this thread while anybody observed."""
    return _observers.nodes


def unobserved() -> contextlib.AbstractContextManager[None]:
    """A frame that is converted while another one is compiled is no part of that one."""
    return _listening(())


@contextlib.contextmanager
def _listening(observers: tuple[TracingObserver, ...]) -> Iterator[None]:
    before = _observers.now, _observers.watching, _observers.hearing, _observers.called, _observers.output
    _observers.now, _observers.output = observers, None
    _observers.watching = tuple(each for each in observers if type(each).is_watching is not TracingObserver.is_watching)
    _observers.hearing = tuple(each for each in observers if type(each).traced is not TracingObserver.traced)
    _observers.called = tuple(each for each in observers if type(each).calls is not TracingObserver.calls)
    try:
        yield
    finally:
        _observers.now, _observers.watching, _observers.hearing, _observers.called, _observers.output = before


@contextlib.contextmanager
def _hooked() -> Iterator[None]:
    """Dynamo is as it was when no thread traces for an observer."""
    global _hooks
    with _lock:
        if not _hooks:
            _install()
        _hooks += 1
    try:
        yield
    finally:
        with _lock:
            _hooks -= 1
            if not _hooks:
                _uninstall()


def _install() -> None:
    from torch._dynamo.output_graph import OutputGraph, SubgraphTracer
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew
    from torch._dynamo.variables.builtin import BuiltinVariable
    from torch._dynamo.variables.ctx_manager import InferenceModeVariable
    from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable

    parts = [
        (TensorVariable, "unpack_var_sequence", _unpack),
        (TensorVariable, "call_method", _ask),
        (InstructionTranslatorBase, "step", _step),
        (SymNodeVariable, "evaluate_expr", _evaluate),
        (SubgraphTracer, "create_proxy", _create),
        (OutputGraph, "compile_subgraph", _compile),
        (InferenceModeVariable, "enter", _enter),
        # Those of objects that existed before are made, too, when code first touches one.
        (AttributeMutationNew, "__init__", _born),
        (ValueMutationNew, "__init__", _born),
    ]
    optional = (
        (BuiltinVariable, "call_function", _range),  # without it, loops over ranges are left to Dynamo
        (InstructionTranslatorBase, "inline_user_function_return", _inline),  # of regions, which ask for both
        (InstructionTranslatorBase, "step_graph_break", _leave),
        (OutputGraph, "add_fqn_info_for_inlined_modules", _name),  # without it, large models are traced more slowly
    )
    parts += [each for each in optional if hasattr(each[0], each[1])]
    # All or none: what may fail comes before the first is replaced.
    replaced = [(owner, name, getattr(owner, name), replacement) for owner, name, replacement in parts]
    wrapped = [functools.wraps(original)(replacement(original)) for _, _, original, replacement in replaced]
    for (owner, name, original, _), replacement in zip(replaced, wrapped, strict=True):
        _saved.append((owner, name, original))
        setattr(owner, name, replacement)


def _uninstall() -> None:
    while _saved:
        owner, name, original = _saved.pop()
        setattr(owner, name, original)


def _unpack(original: Function) -> Function:
    def unpack_var_sequence(self: Any, tx: Any, idxes: Any = None) -> Any:
        if idxes is None:
            for observer in _observers.now:
                length = observer.length_of(tx, self.as_proxy().node)
                if length is not None:
                    return [hit_variable()(i) for i in range(length)]
        return original(self, tx, idxes)

    return unpack_var_sequence


def _range(original: Function) -> Function:
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.tensor import SymNodeVariable

    # Not ``call_range``: Dynamo keeps what it found there when it first traced a range, for whichever backend.
    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.fn is not range or len(args) != 1 or kwargs:
            return original(self, tx, args, kwargs)
        count = touched(args[0])
        number = count.sym_num if isinstance(count, SymNodeVariable) else getattr(count, "value", None)
        if isinstance(number, torch.SymInt) or type(number) is int:
            for observer in _observers.now:
                steps = observer.steps_of(tx, number)
                if steps is not None:
                    return original(self, tx, [ConstantVariable.create(steps)], kwargs)
        return original(self, tx, args, kwargs)

    return call_function


def _ask(original: Function) -> Function:
    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name != "requires_grad_":
            return original(self, tx, name, args, kwargs)
        given = [*args, *kwargs.values()]
        asked = all(each.is_python_constant() and each.as_python_constant() is True for each in given)
        is_made_here = self.source is None and tx.output.current_tracer is tx.output.root_tracer
        node = self.as_proxy().node
        if asked and is_made_here and any(each.asks_for_gradient(node) for each in _observers.now):
            node.meta["example_value"].requires_grad_()
            self.requires_grad = True
            return self
        return original(self, tx, name, args, kwargs)

    return call_method


def _step(original: Function) -> Function:
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable

    def step(self: Any) -> Any:
        at, observers = self.instruction_pointer, _observers.now
        if not observers or at is None:
            return original(self)
        if self.output is not _observers.output:
            _observers.output = self.output
            for observer in observers:
                observer.begins()
            if _observers.called:  # a graph of one call, an embedding's, may end before a loop, too
                self.is_non_empty_graph = lambda: self.output.count_calls() > 0
        for observer in _observers.hearing:
            observer.traced(self)
        opname = self.instructions[at].opname
        if opname in _BRANCHES and isinstance(self.stack[-1], TensorVariable | SymNodeVariable):
            value = _decided(self, at, self.stack[-1])
            if value is not None:
                self.stack[-1] = ConstantVariable.create(value)
        elif opname == "CONTAINS_OP":
            for observer in observers:
                observer.looks_into_container(self)
        nodes = _observers.nodes
        watching = [observer for observer in _observers.watching if observer.is_watching(self, at)]
        if watching:
            read_as_number(self, at)
            before = list(self.stack)
        goes_on = original(self)
        if watching:
            done = TracedInstruction(self, at, before, list(self.stack), _observers.nodes - nodes, goes_on)
            for observer in watching:
                observer.stepped(done)
        return goes_on

    return step


# JUMP_IF_..._OR_POP is left out: it may leave the condition itself behind, as a result.
_BRANCHES = {name for name in dis.opmap if name.startswith("POP_JUMP") and name.endswith(("_TRUE", "_FALSE"))}


def _evaluate(original: Function) -> Function:
    def evaluate_expr(self: Any, output_graph: Any = None) -> Any:
        if _observers.now and output_graph is not None and isinstance(self.sym_num, torch.SymBool):
            value = _decided(output_graph.current_tx, None, self)
            if value is not None:
                return value
        return original(self, output_graph)

    return evaluate_expr


def _decided(frame: Any, at: int | None, condition: Any) -> bool | None:
    node = getattr(condition.as_proxy(), "node", None)
    if not isinstance(node, fx.Node):
        return None
    expression = getattr(getattr(getattr(condition, "sym_num", None), "node", None), "expr", None)
    for observer in _observers.now:
        value = observer.decide(frame, at, node, expression)
        if value is not None:
            return value
    return None


def _born(original: Function) -> Function:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for observer in _observers.now:
            observer.created(self)

    return __init__


def _create(original: Function) -> Function:
    def create_proxy(self: Any, *args: Any, **kwargs: Any) -> Any:
        proxy = original(self, *args, **kwargs)
        if _observers.now:
            _observers.nodes += 1
            misuses_index = replace_known_index(proxy.node)
            frame, bodies_of = self.output_graph.current_tx, _bodies_of(self)
            for observer in _observers.now:
                observer.made(proxy.node, frame, bodies_of, misuses_index)
        return proxy

    return create_proxy


def _compile(original: Function) -> Function:
    def compile_subgraph(self: Any, tx: Any, reason: Any, *args: Any, **kwargs: Any) -> Any:
        if reason.graph_break:
            for observer in _observers.now:
                observer.breaks(tx)
        return original(self, tx, reason, *args, **kwargs)

    return compile_subgraph


def _name(original: Function) -> Function:
    # Names that exported programs have, for which all modules below each that a frame touches are walked over.
    def add_fqn_info_for_inlined_modules(self: Any, *args: Any, **kwargs: Any) -> None:
        if not _observers.now:
            original(self, *args, **kwargs)

    return add_fqn_info_for_inlined_modules


def bodies_around(frame: Any) -> list[Any]:
    """The higher-order operators in whose bodies a frame's code runs, the innermost first."""
    return _bodies_of(frame.output.current_tracer)


def _bodies_of(tracer: Any) -> list[Any]:
    bodies_of = []
    while tracer.parent is not None:
        bodies_of.append(tracer.source_target)
        tracer = tracer.parent
    return bodies_of


def _enter(original: Function) -> Function:
    from torch._dynamo.exc import unimplemented

    def enter(self: Any, tx: Any) -> Any:
        bodies_of = _bodies_of(tx.output.current_tracer)
        for observer in _observers.now:
            reason = observer.enters_inference_mode(bodies_of)
            if reason is not None:
                unimplemented(gb_type="glue: inference mode", context="", explanation=reason, hints=[])
        return original(self, tx)

    return enter


def _inline(original: Function) -> Function:
    def inline_user_function_return(self: Any, *given: Any, **named: Any) -> Any:
        return (told if _observers.called else original)(self, *given, **named)

    def told(self: Any, fn: Any, args: Any, kwargs: Any, *more: Any, **named: Any) -> Any:
        module = layer_calls.module_behind(args[0]) if args else None
        if module is None:
            return original(self, fn, args, kwargs, *more, **named)
        call = layer_calls.ModuleCall(self, fn.get_code(), module, [*args[1:], *kwargs.values()], _observers.nodes)
        observers = _observers.called
        for observer in observers:
            reason = observer.calls(call)
            if reason is not None:
                layer_calls.leave_to_python(self, reason)
        result = original(self, fn, args, kwargs, *more, **named)
        for observer in observers:
            observer.called(call)
        return result

    return inline_user_function_return


def _leave(original: Function) -> Function:
    def step_graph_break(self: Any, *given: Any, **named: Any) -> Any:
        tails = [observer.leaves(self) for observer in _observers.called]
        result = original(self, *given, **named)
        for tail in tails:
            if tail is not None:
                loop_tails.call_behind_loop(self, tail)
        return result

    return step_graph_break
