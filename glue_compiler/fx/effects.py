"""What a node of a captured graph does besides computing its result.

Captured graphs call torch-level functions and tensor methods, whose names prove nothing. So each distinct call is run
once on fake tensors, in the mode of autocast that its node runs in, under a dispatch mode that records the operators it
is made of; their schemas and tags say whether it writes, draws random numbers, or reads data back to the host. The
operators as the program calls them, before torch takes them apart, are kept as the call's record.
"""

from __future__ import annotations

import builtins
import enum
import logging
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from glue_compiler.compat.operator_calls import call_of, observed_operators, wraps_shard
from glue_compiler.compat.switches import AUTOCAST_SWITCHES, GRAD_SWITCHES, WITHOUT_EFFECT
from glue_compiler.compat.symbols import fake_mode_of, is_functorch_wrapped, speculation, symbols_version
from glue_compiler.fx import bodies
from glue_compiler.fx.call_keys import call_key, own_names
from glue_compiler.fx.call_observer import CallObserver
from glue_compiler.fx.known_calls import KnownCall
from glue_compiler.fx.modes import Mode, modes_of
from glue_compiler.fx.records import CallRecord, Recorder
from glue_compiler.fx.snapshots import Snapshot
from glue_compiler.fx.values import (
    StorageKey,
    Symbolic,
    has_value,
    is_call,
    is_plain,
    leaves,
    storage_of,
    storages_of,
    tensors_in,
    value_of,
    values_of,
)

log = logging.getLogger(__name__)


class Kind(enum.Enum):
    PURE = "pure"
    """The same operands give the same result, and nothing else happens."""
    OPAQUE = "opaque"
    """May give another result each time (random numbers, an operator that we cannot see into), but changes nothing
    other than what ``writes`` says."""
    ASSERT = "assert"
    """Raises if its first operand is false."""
    NOTHING = "nothing"
    """Has no result and no effect on results."""
    GRAD_MODE = "grad mode"
    """Switches autograd on or off from here on."""
    MODE = "mode"
    """Opens or closes a context that changes what later calls compute (autocast and the like)."""
    BARRIER = "barrier"
    """Not understood: anything may have happened, to any memory."""


@dataclass(frozen=True)
class Effects:
    """What a node does.

    Attributes:
        writes: the storages written.
        syncs: waits for the device to hand a value to the host.
        changes_views: gives a tensor another shape, or other memory, in place. The fake value on record of a tensor is
            the one that it has last, so nothing can be said of what was computed from it before.
    """

    kind: Kind
    writes: frozenset[StorageKey] = frozenset()
    syncs: bool = False
    random: bool = False
    changes_views: bool = False


# Operators that check and return nothing. Two with equal operands are one.
_ASSERTS = {torch.ops.aten._assert_scalar.default, torch.ops.aten._assert_async.msg, torch._check}
# Functions on numbers, which dispatch no operator.
_SCALAR_MODULES = {operator.__name__, operator.add.__module__, builtins.__name__, math.__name__}
_PLAIN = (torch.Tensor, *Symbolic, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout)


@dataclass(frozen=True)
class _Outcome:
    """What running a call on fake tensors showed. ``written`` are indices into the call's tensor operands."""

    kind: Kind
    written: tuple[int, ...] = ()
    syncs: bool = False
    random: bool = False
    result: Any = None
    record: CallRecord | None = None
    parts: CallRecord | None = None
    changes_views: bool = False


@dataclass
class _Found:
    """What was found out of a call."""

    call: KnownCall
    effects: Effects | None = None
    is_opaque: bool | None = None
    pure: tuple[_Outcome, dict[Any, Any]] | None = None
    exact: _Outcome | None = None


@dataclass
class EffectAnalysis:
    """Classifies nodes; remembers calls that it has seen, since layers repeat them.

    What it remembers of calls is keyed by metadata, and what it remembers of nodes holds until they change: one object
    serves all passes over one graph.
    """

    fake_mode: Any | None
    numberings: dict[fx.GraphModule, tuple[Snapshot, Any, Any]] = field(default_factory=dict)
    """Of graphs as they were: what :func:`number_values` found, and the version of the symbols at that time."""
    _calls: dict[fx.Node, _Found] = field(default_factory=dict)
    _seen: dict[Any, _Outcome] = field(default_factory=dict)
    _pure: dict[Any, tuple[_Outcome, dict[Any, Any]]] = field(default_factory=dict)
    _modes: dict[fx.Node, Mode] = field(default_factory=dict)

    @classmethod
    def for_graph(cls, gm: fx.GraphModule) -> EffectAnalysis:
        return cls(fake_mode_of(tensors_in(values_of(gm.graph.nodes))))

    @property
    def symbols(self) -> Any:
        """Equal at two times if all expressions read the same at both."""
        return symbols_version(self.shape_env)

    @property
    def shape_env(self) -> Any | None:
        return self.fake_mode.shape_env if self.fake_mode is not None else None

    def read_modes(self, gm: fx.GraphModule) -> None:
        """Read again in which mode each node of ``gm``, a whole graph, and of its bodies runs."""
        self._modes.update(modes_of(gm))

    def mode_of(self, gm: fx.GraphModule | None, node: fx.Node) -> Mode:
        """The mode that ``node`` of ``gm`` runs in; of a body, only known after :meth:`read_modes` of the whole.

        Without ``gm`` the one in which the graph is called.
        """
        if gm is None:
            return Mode()
        if node not in self._modes:
            first = next(iter(gm.graph.nodes))
            self._modes.update(modes_of(gm, self._modes.get(first)))
        return self._modes[node]

    def of(self, gm: fx.GraphModule | None, node: fx.Node) -> Effects:
        """What ``node`` of ``gm`` does. Without ``gm``, as if the graph switched no mode; then no bodies are seen."""
        if node.op in ("placeholder", "get_attr", "output"):
            return Effects(Kind.NOTHING)
        if node.op == "call_module":
            return Effects(Kind.BARRIER)
        if node.op == "call_function":
            if bodies.is_higher_order(node):
                return self._of_bodies(gm, node) if gm is not None else Effects(Kind.BARRIER)
            for targets, kind in (
                (_ASSERTS, Kind.ASSERT),
                (GRAD_SWITCHES, Kind.GRAD_MODE),
                (WITHOUT_EFFECT, Kind.NOTHING),
            ):
                if node.target in targets:
                    return Effects(kind)
            if node.target in AUTOCAST_SWITCHES:
                return Effects(Kind.MODE)
            if wraps_shard(node.target):
                return Effects(Kind.OPAQUE)
        found = self._found_of(gm, node)
        if found.effects is None:
            found.effects = self._of_call(node, found)
        return found.effects

    def _of_call(self, node: fx.Node, found: _Found) -> Effects:
        operands = found.call.operands
        if self._is_scalar_function(node, operands):
            return Effects(Kind.PURE)
        if not self._may_run(node):
            return Effects(Kind.BARRIER)
        if not found.call.mode.is_known:
            return Effects(Kind.BARRIER)
        tensors = tensors_in(operands)
        outcome, _ = self._effects(node, found)
        kind, written = outcome.kind, outcome.written
        writes = frozenset(storage_of(tensors[i]) for i in written if is_plain(tensors[i]))
        if outcome.changes_views:
            return Effects(Kind.BARRIER, changes_views=True)
        if written and not all(is_plain(tensors[i]) for i in written):
            return Effects(Kind.BARRIER)
        if kind is Kind.PURE and not found.call.is_plain:
            kind = Kind.OPAQUE
        return Effects(Kind.OPAQUE if writes else kind, writes, outcome.syncs, outcome.random)

    def may_write_outside(self, gm: fx.GraphModule) -> bool:
        """May a call of ``gm`` write to memory that was there before?"""
        made = _made_inside(gm)
        return any(
            each.kind is Kind.BARRIER or not each.writes <= made for each in (self.of(gm, n) for n in gm.graph.nodes)
        )

    def record_of(self, gm: fx.GraphModule | None, node: fx.Node, *, below: bool = False) -> CallRecord | None:
        """The operators that the node dispatches; None for what is no call of torch's, or cannot be run to see.

        ``below``: those that they are made of, below autograd and autocast.
        """
        found = self._runnable(gm, node)
        if found is None:
            return None
        outcome, names = self._effects(node, found)
        record = outcome.parts if below else outcome.record
        return record.renamed(names) if record is not None else None

    def result_of(self, gm: fx.GraphModule | None, node: fx.Node) -> Any | None:
        """What the node's operator gives for the metadata of its operands; None if it is not safe to ask.

        Without ``gm`` in the mode in which the graph is called.
        """
        found = self._runnable(gm, node)
        return self._outcome(node, found).result if found is not None else None

    def _runnable(self, gm: fx.GraphModule | None, node: fx.Node) -> _Found | None:
        """What is known of the node; None if it is not safe to run its call."""
        if not is_call(node) or bodies.is_higher_order(node):
            return None
        found = self._found_of(gm, node)
        if found.is_opaque is None:
            found.is_opaque = not self._may_run(node) or self._is_scalar_function(node, found.call.operands)
        return found if found.call.mode.is_known and not found.is_opaque else None

    def known(self, gm: fx.GraphModule | None, node: fx.Node) -> KnownCall:
        """The call of ``node`` of ``gm``, with what follows of it alone."""
        return self._found_of(gm, node).call

    def _found_of(self, gm: fx.GraphModule | None, node: fx.Node) -> _Found:
        mode, symbols = self.mode_of(gm, node), self.symbols
        found = self._calls.get(node)
        if found is None or not found.call.is_current(mode, symbols):
            found = self._calls[node] = _Found(KnownCall(node, mode, symbols))
        return found

    def _effects(self, node: fx.Node, found: _Found) -> tuple[_Outcome, dict[Any, Any]]:
        """What the node does, its result aside; and what the symbols of the record are called here.

        A pure call is as pure for operands that differ in the names of unbacked symbols or in where in their storage
        they begin. Which operators a call is made of depends on sizes and strides; those are the same up to names, with
        the same symbols equal and of the same ranges. No operator decides by a storage offset, but to raise, and a
        captured call does not raise. A loop over experts has the same calls for each.
        """
        if found.pure is None:
            found.pure = self._up_to_names(node, found)
        return found.pure

    def _up_to_names(self, node: fx.Node, found: _Found) -> tuple[_Outcome, dict[Any, Any]]:
        key, names = call_key(node, found.call.mode, self.shape_env, up_to_names=True)
        if key not in self._pure:
            outcome = self._outcome(node, found)
            if outcome.kind is not Kind.PURE or outcome.written:
                return outcome, own_names(outcome.record, node)
            self._pure[key] = outcome, names
        outcome, known_names = self._pure[key]
        here = {symbol: names_there for names_there, symbol in names.items()}
        renamed = {old: here[new] for old, new in known_names.items() if here[new] != old}
        return outcome, {**own_names(outcome.record, node), **renamed}

    def _outcome(self, node: fx.Node, found: _Found) -> _Outcome:
        if found.exact is None:
            key, _ = call_key(node, found.call.mode)
            if key not in self._seen:
                self._seen[key] = self._run(node, found.call.mode, tensors_in(found.call.operands))
            found.exact = self._seen[key]
        return found.exact

    def _is_scalar_function(self, node: fx.Node, operands: Sequence[Any]) -> bool:
        if node.op != "call_function":
            return False
        if node.target is operator.getitem and isinstance(operands[0], tuple | list):
            return not any(isinstance(leaf, Symbolic) for value in operands[1:] for leaf in leaves(value))
        if tensors_in(operands) or tensors_in(value_of(node)):
            return False
        name = getattr(node.target, "__name__", "")
        return getattr(node.target, "__module__", "") in _SCALAR_MODULES or name.startswith("sym_")

    def _of_bodies(self, gm: fx.GraphModule, node: fx.Node) -> Effects:
        """A higher-order operator does what its bodies do; one without a body that we can read does anything."""
        inner = bodies.bodies_of(gm, node)
        if not inner:
            return Effects(Kind.BARRIER)
        syncs = random = False
        for body in inner:
            for child in body.graph.nodes:
                effects = self.of(body, child)
                if effects.kind is Kind.BARRIER:
                    return effects
                # Placeholders of a body are not always the caller's own tensors, so a write has no known target. Nobody
                # else sees a write to memory that the body makes.
                if effects.writes and not effects.writes <= _made_inside(body):
                    return Effects(Kind.BARRIER)
                syncs, random = syncs or effects.syncs, random or effects.random
        return Effects(Kind.OPAQUE, syncs=syncs, random=random)

    @staticmethod
    def _may_run(node: fx.Node) -> bool:
        """Run only what is torch's or Python's own: a user's function might do anything."""
        if any(not has_value(arg) for arg in node.all_input_nodes):
            return False
        values = values_of((node, *node.all_input_nodes))
        # A call that takes or gives anything else, such as a context, may switch what later calls do.
        if not all(isinstance(leaf, _PLAIN) for leaf in leaves(values)):
            return False
        if any(is_functorch_wrapped(tensor) for tensor in tensors_in(values)):
            return False  # between vmap and grad levels an operator does not mean what it says
        if isinstance(node.target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
            return True
        module = getattr(node.target, "__module__", None) or ""
        if module == operator.add.__module__:  # setitem has no recorded value
            return True
        # A function of torch's that gives nothing switches something.
        if not has_value(node) or "_functorch" in module:
            return False
        return node.op == "call_method" or is_known_function(node)

    def _run(self, node: fx.Node, mode: Mode, tensors: list[torch.Tensor]) -> _Outcome:
        # Detached aliases: in-place changes of shape must not reach the recorded fake tensors.
        try:
            aliases = {id(tensor): self._alias_of(tensor) for tensor in tensors}
        except Exception as failure:  # whatever a subclass of a user's does
            log.debug("'%s' cannot be run on its operands: %s", node.name, failure)
            return _Outcome(Kind.BARRIER)

        def argument(value: Any) -> Any:
            if isinstance(value, fx.Node):
                return _map_tensors(value_of(value), lambda tensor: aliases[id(tensor)])
            return value

        args, kwargs = fx.map_arg(node.args, argument), fx.map_arg(node.kwargs, argument)
        given = [aliases[id(tensor)] for tensor in tensors]
        operators, parts = Recorder(given), Recorder(given)
        recorder = CallObserver(parts)
        try:
            with (
                mode.entered(),
                torch.no_grad(),
                speculation(self.fake_mode, self.shape_env),
                recorder,
                observed_operators(operators),
            ):
                result = call_of(node, args, kwargs)
        except Exception as failure:  # whatever it is, the node is not understood
            log.debug("'%s' cannot be run on fake tensors: %s", node.name, failure)
            return _Outcome(Kind.BARRIER, changes_views=recorder.changes_views)
        written = tuple(i for i, t in enumerate(tensors) if is_plain(t) and storage_of(t) in recorder.written)
        if recorder.writes_unseen or recorder.written - storages_of(tensors) - recorder.made:
            return _Outcome(Kind.BARRIER, changes_views=recorder.changes_views)
        return _Outcome(
            Kind.OPAQUE if recorder.random or recorder.foreign else Kind.PURE,
            written,
            recorder.syncs,
            recorder.random,
            result,
            operators.record(result),
            parts.record(result),
            recorder.changes_views,
        )

    def _alias_of(self, tensor: torch.Tensor) -> torch.Tensor:
        if is_plain(tensor):
            return tensor.detach()
        # DTensor keeps a table by sizes, which symbols do not fit in, where it does not see that it is traced.
        with speculation(self.fake_mode, self.shape_env):
            return tensor.detach()


def is_known_function(node: fx.Node) -> bool:
    """Does the node call a function of torch's or Python's own? One of a user's might do anything."""
    module = getattr(node.target, "__module__", None) or ""
    # torch.add and its like are builtins without a module.
    own = not module or module in _SCALAR_MODULES or f"{module}.".startswith("torch.")
    return node.op == "call_function" and own


def _made_inside(body: fx.GraphModule) -> set[StorageKey]:
    outside = storages_of([value_of(node) for node in body.graph.nodes if node.op in ("placeholder", "get_attr")])
    return storages_of(values_of(body.graph.nodes)) - outside


def _map_tensors(value: Any, convert: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return convert(value)
    if isinstance(value, tuple | list):
        return type(value)(_map_tensors(item, convert) for item in value) if type(value) in (tuple, list) else value
    if isinstance(value, dict):
        return {key: _map_tensors(item, convert) for key, item in value.items()}
    return value
