"""Layers that are alike become regions: Python runs their loop, and each kind of layer is compiled once.

Where the frame that Dynamo converts comes to such a layer, the graph ends. Python makes the call, and Dynamo converts
the layer's own function, with the checkpoint inside; as weights are inputs of a graph, one serves all layers of a kind.

What makes a layer is structure: four or more modules of one class and of equal parameter shapes lie beside each other
in a module; one instruction calls them over and over, and each call takes what the one before has made. Experts, the
products of an attention and branches that run side by side are no regions, and a layer is not divided again.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from glue_compiler.capture import bytecode
from glue_compiler.compat import (
    branch_guards,
    dynamo_tracing,
    frame_places,
    layer_calls,
    loop_tails,
    python_checkpoints,
    runtime,
    saved_tensor_hooks,
)
from glue_compiler.compat.layer_calls import ModuleCall
from glue_compiler.compat.loop_tails import Tail

LEAST_LAYERS = 4
LEAST_OPERATORS = 12
"""Of one call. Less is not worth the call of a graph of its own."""
MOST_COMPILES = 16
"""Of one kind: for fixed and for varying sizes, training, evaluation, frozen inputs. More shows that none is shared."""
MOST_OF_ONE_CALL = 3
"""Of one kind, for calls that differ in no tensor: their masks may be of several kinds, and their numbers."""


_Shape = tuple[type[nn.Module], tuple[tuple[str, torch.Size], ...]]


class _Kind(NamedTuple):
    """Modules of one class and of equal parameter shapes beside each other in a module, whose id is ``parent``."""

    parent: int
    shape: _Shape


@dataclass(eq=False)
class Sharing:
    """Of all kinds of layers that were found together.

    ``ended``: why they do not share compiled code any more; None: they do. ``is_over``: and are part of a graph.
    """

    ended: str | None = None
    is_over: bool = False


@dataclass(eq=False)
class LayerKind:
    """Layers that share compiled code.

    ``name``: of their class. ``layers``: how many there are in their model. ``reasons``: why calls were not compiled.
    ``compiles``: how many there were for calls of each form.
    """

    name: str
    layers: int
    sharing: Sharing
    compiles: Counter[Hashable] = field(default_factory=Counter)
    reasons: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        return f"{self.name} x{self.layers}"


class KnownLayers:
    """Of one backend: the modules that are regions, and the functions of modules around them."""

    def __init__(self) -> None:
        self._members: weakref.WeakKeyDictionary[nn.Module, LayerKind] = weakref.WeakKeyDictionary()
        self._kinds: dict[_Shape, LayerKind] = {}
        self._around: weakref.WeakKeyDictionary[nn.Module, set[CodeType]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._converting = threading.local()

    def kind_of(self, module: nn.Module) -> LayerKind | None:
        return self._members.get(module)

    def kind_of_frame(self, frame: Any) -> LayerKind | None:
        """The kind of the layer whose function Dynamo is about to convert; also of one that took another's place."""
        module = frame_places.first_of_frame(frame) if self._kinds else None
        if not isinstance(module, nn.Module) or not layer_calls.hold_tensor(frame.f_locals.values()):
            return None
        found = self._members.get(module)
        if found is None and any(isinstance(module, kind) for kind, _ in self._kinds):
            found = self._kinds.get(_shape(module))
        return None if found is None or found.sharing.is_over else found

    def have_hooks(self, kind: LayerKind) -> bool:
        """Has a layer of this kind, or a module in one, hooks that others may not have?"""
        layers = [layer for layer, its in self._members.items() if its is kind]
        return any(layer_calls.has_hooks(module) for layer in layers for module in layer.modules())

    def runs_in_python(self, kind: LayerKind, frame: Any, record: Callable[[str], None]) -> bool:
        """Is a call of a layer left as it is? ``record`` is called with the reason, once for each.

        Calls that no compiled code fits, one after the other, end all sharing: the next step finds a graph that ends at
        these layers out of date.
        """
        own = layer_calls.object_among(frame.f_locals.values())
        form = layer_calls.form_of(frame.f_locals.values())
        reason = kind.sharing.ended
        # What a checkpoint in Python computes again has to meet the code that its forward met.
        may_end = not saved_tensor_hooks.are_active() and runtime.backward_id() is None
        if own is not None:
            reason = _own_part(own)
        elif kind.compiles.total() == MOST_COMPILES or (may_end and kind.compiles[form] == MOST_OF_ONE_CALL):
            reason = f"{kind} was compiled {kind.compiles.total()} times, and this call fits none"
            if may_end:
                kind.sharing.ended = reason = f"{reason}: each layer may have a number of its own"
                with self._lock:
                    self._around.clear()
        if reason is None:
            kind.compiles[form] += 1
        elif reason not in kind.reasons:
            kind.reasons.add(reason)
            record(reason)
        return reason is not None

    def add(self, layer: nn.Module, kinds: Mapping[nn.Module, _Kind]) -> LayerKind:
        """``layer``, and those of its kind, are regions.

        Those of other kinds may be called by the same loop, which is Python's now: each is known when its turn comes.
        """
        with self._lock:
            sharing = Sharing()
            for kind, count in Counter(kinds.values()).items():
                self._kinds.setdefault(kind.shape, LayerKind(kind.shape[0].__name__, count, sharing))
            found = self._kinds[kinds[layer].shape]
            self._members.update({module: found for module, kind in kinds.items() if kind == kinds[layer]})
            return found

    def lie_in(self, module: nn.Module, function: CodeType) -> bool:
        """Does this function of ``module`` call layers, itself or through others?"""
        return function in self._around.get(module, ())

    def add_around(self, module: nn.Module, function: CodeType) -> None:
        with self._lock:
            self._around.setdefault(module, set()).add(function)

    def guard(self) -> None:
        """The code that is being traced ends at layers for as long as all of them share compiled code."""
        kinds = list(self._kinds.values())

        def holds() -> bool:
            return runtime.backward_id() is not None or all(kind.sharing.ended is None for kind in kinds)

        branch_guards.install_guard_of_several([], holds, "glue: layers share compiled code")

    @property
    def are_found(self) -> bool:
        return bool(self._kinds)

    @property
    def converting(self) -> LayerKind | None:
        """The kind of layer that this thread's Dynamo converts now."""
        return getattr(self._converting, "kind", None)

    @contextlib.contextmanager
    def conversion(self, kind: LayerKind | None) -> Iterator[None]:
        before, self._converting.kind = self.converting, kind
        try:
            yield
        finally:
            self._converting.kind = before

    def clear(self) -> None:
        self._members.clear()
        self._kinds.clear()
        self._around.clear()


@dataclass
class _Seen:
    """The latest call of a kind: the loop it is made in, and the last nodes of the graph before and behind it.

    Inputs that a call adds lie in front of both.
    """

    call: ModuleCall
    at: int | None
    graph: fx.Graph
    before: fx.Node | None
    operators: int = 0
    behind: fx.Node | None = None

    def is_followed_by(self, call: ModuleCall) -> bool:
        """Is ``call`` of the same loop, and takes what this call has made?"""
        if call.frame is not self.call.frame or call.at != self.at or self.operators < LEAST_OPERATORS:
            return False
        if call.graph is not self.graph:  # each in the body of an operator of its own
            return True
        return layer_calls.depends_on(call.arguments, self._made())

    def _made(self) -> Iterator[fx.Node]:
        is_behind = True
        for node in reversed(self.graph.nodes):
            if node is self.before:
                return
            is_behind &= node is not self.behind
            if not is_behind:
                yield node


@dataclass
class LayerRegions(dynamo_tracing.TracingObserver):
    """Ends the graph that is being traced where layers begin."""

    known: KnownLayers
    refused: dict[str, None] = field(default_factory=dict)
    """Why layers that were found are no regions, in order."""
    _kinds: dict[nn.Module, _Kind] = field(default_factory=dict)
    _walked: set[tuple[nn.Module, type[nn.Module]]] = field(default_factory=set)
    """Modules in which those of a class were looked for."""
    _roots: dict[nn.Module, None] = field(default_factory=dict)
    """The outermost of these, in order."""
    _seen: dict[_Kind, _Seen] = field(default_factory=dict)
    _inside: ModuleCall | None = None
    """The call of a layer that is being traced: what it calls is its own."""
    _in_checkpoint: bool = False
    """Does the call that is being traced run the layer in a checkpoint?"""
    _left_at: int | None = None
    """The instruction of the converted function in which Python calls layers."""

    def begins(self) -> None:
        self.learns()
        self._seen = {}

    def learns(self) -> bool:
        """Has tracing stopped in the first layer, in its checkpoint or with a hook? Python calls all layers then."""
        stopped, in_checkpoint = self._inside, self._in_checkpoint
        self._inside, self._in_checkpoint = None, False
        if stopped is None or not (in_checkpoint or layer_calls.has_hooks(stopped.module)):
            return False
        if self.known.kind_of(stopped.module) is not None or not python_checkpoints.CHECKPOINTS.is_available():
            return False
        self._add(stopped)
        return True

    def calls(self, call: ModuleCall) -> str | None:
        if self._inside is not None:
            if call.module is self._inside.module and dynamo_tracing.bodies_around(call.frame):
                self._in_checkpoint = True
            return None
        # What takes no tensor, as a wrapper's ``__getattr__``, is no call of a layer.
        if call.may_not_break or not layer_calls.take_tensor(call.arguments):
            return None
        kind = self.known.kind_of(call.module)
        if kind is None and self.known.lie_in(call.module, call.code):
            if _refusal(call.frame, ()) is not None:
                return None
            self._left_at = call.at_in_function
            return "layers that are compiled by themselves"
        if kind is None and not self._is_layer(call):
            return None
        refusal = _refusal(call.frame, call.arguments)
        if kind is not None and kind.sharing.ended is not None:
            refusal, kind.sharing.is_over = kind.sharing.ended, True
        if refusal is None and layer_calls.is_never_converted(call.module):
            refusal = f"Dynamo converts no function of {type(call.module).__name__} by itself"
        if refusal is not None:
            self.refused[refusal] = None
            self._inside = call
            return None
        kind = kind or self._add(call)
        for module, code in _around(call.frame):
            self.known.add_around(module, code)
        self._left_at = call.at_in_function
        return f"{kind} is compiled by itself"

    def called(self, call: ModuleCall) -> None:
        if self._inside is call:
            self._inside, self._in_checkpoint = None, False
            kind = self._kinds.get(call.module)
            seen = None if kind is None else self._seen.get(kind)
            if seen is not None and seen.call is call:
                seen.operators, seen.behind = dynamo_tracing.nodes_made() - call.nodes, _last(seen.graph)

    def leaves(self, frame: Any) -> Tail | None:
        """Python runs the loop over layers; what comes behind it in the same function is compiled again."""
        if self._left_at is None:
            return None
        self.known.guard()
        if not loop_tails.is_separable(frame):
            return None
        instructions = frame.instructions
        loop = bytecode.outermost_loop(instructions, self._left_at)
        start = None if loop is None else bytecode.statement_behind(instructions, loop)
        if loop is None or start is None or not bytecode.computes(instructions, start):
            return None
        names = bytecode.read_behind(instructions, loop)
        # A name that is first stored in the loop has no value if the loop does not run.
        if names is None or not all(name in frame.symbolic_locals for name in names):
            return None
        return Tail(loop.head, start, names)

    def _is_layer(self, call: ModuleCall) -> bool:
        """Does ``call`` show that its module is one of several layers? The first call of a kind shows nothing."""
        kind = self._kind(call)
        if kind is None:
            return False
        seen = self._seen.get(kind)
        if seen is not None and seen.is_followed_by(call):
            return True
        self._seen[kind] = _Seen(call, call.at, call.graph, _last(call.graph))
        self._inside = call
        return False

    def _kind(self, call: ModuleCall) -> _Kind | None:
        """What the module has in common with three others or more beside it; None if there are none."""
        called = type(call.module)
        if call.module not in self._kinds:
            for module in _holders(call.frame):
                if (module, called) not in self._walked:
                    self._roots[module] = None
                    self._walked.update((each, called) for each in module.modules())
                    self._kinds.update(_kinds_in(module, called))
        return self._kinds.get(call.module)

    def _add(self, call: ModuleCall) -> LayerKind:
        """The module is a layer, as are others of its kind, and those of other kinds that the same loop may call."""
        for module in self._roots:
            self._kinds.update(_kinds_in(module))
        return self.known.add(call.module, self._kinds)


def _refusal(frame: Any, arguments: Iterable[Any]) -> str | None:
    """Why a call of a layer, found in ``frame``, is part of the graph."""
    if dynamo_tracing.bodies_around(frame):
        return "layers are called in the body of a checkpoint or of another operator, which is one graph"
    own = layer_calls.object_in(arguments)
    return None if own is None else _own_part(own)


def _last(graph: fx.Graph) -> fx.Node | None:
    return next(iter(reversed(graph.nodes)), None)


def _own_part(own: type) -> str:
    return f"layers are handed a {own.__name__}, of which each may have a part of its own"


def _holders(frame: Any) -> Iterator[nn.Module]:
    """Modules in local names of the functions being traced, the innermost function's first."""
    while frame is not None:
        for variable in layer_calls.local_variables(frame).values():
            module = layer_calls.module_behind(variable)
            if module is not None:
                yield module
        frame = getattr(frame, "parent", None)


def _around(frame: Any) -> Iterator[tuple[nn.Module, CodeType]]:
    """The functions of modules that are being traced, but for the one that Dynamo converts."""
    while getattr(frame, "parent", None) is not None:
        module = frame_places.first_argument(frame)
        if isinstance(module, nn.Module):
            yield module, frame.f_code
        frame = frame.parent


def _kinds_in(root: nn.Module, of: type[nn.Module] = nn.Module) -> dict[nn.Module, _Kind]:
    """Modules of a class that have three others or more of their kind beside them → their kind."""
    found: dict[nn.Module, _Kind] = {}
    for parent in root.modules():
        children = [
            each for each in parent.children() if isinstance(each, of) and next(each.children(), None) is not None
        ]
        if len(children) >= LEAST_LAYERS:
            kinds = {child: _Kind(id(parent), _shape(child)) for child in children}
            counts = Counter(kinds.values())
            found.update({child: kind for child, kind in kinds.items() if counts[kind] >= LEAST_LAYERS})
    return found


def _shape(module: nn.Module) -> _Shape:
    return type(module), tuple((name, parameter.shape) for name, parameter in module.named_parameters())
