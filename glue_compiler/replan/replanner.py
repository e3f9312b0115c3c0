"""Follows the first steps of planned graphs, and has Dynamo compile those again whose plans do not serve."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import logging
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable
from types import CodeType
from typing import Any

import torch
from torch import fx
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import tree_leaves

from glue_compiler.compat import recompile, runtime, saved_tensor_hooks, storages, tracing
from glue_compiler.errors import GlueWarning
from glue_compiler.fx import bodies
from glue_compiler.fx.device_bytes import device_of
from glue_compiler.fx.structure import structure_of
from glue_compiler.fx.values import is_plain, tensors_in, value_of
from glue_compiler.options import Correction, GlueOptions
from glue_compiler.pipeline.observer import Call, Observer
from glue_compiler.pipeline.results import PassReport
from glue_compiler.replan.correction import guess
from glue_compiler.replan.decision import Asked, Predicted, correction_for, error_of
from glue_compiler.replan.device_steps import DeviceSteps, DoneStep, Held
from glue_compiler.replan.input_sizes import is_in_the_middle, sizes_of
from glue_compiler.report.graph_report import GraphReport
from glue_compiler.report.session import Session

log = logging.getLogger(__name__)

FIRST, LAST = 2, 3
"""Steps from whose facts a plan may be made again. In the first one optimisers have no state yet."""
MOST_CALLS = 1000
"""Of a graph: it is followed no longer."""
UNSEEN = "its plan was not compared with what steps take: some call always waits for its backward"
MOST_IDLE = 8
"""Steps without a call of a graph: it is not followed until its next one."""
RANKS = "this is one of several ranks, and plans would differ between them"
HOOKS = "it is called under hooks on saved tensors: what a checkpoint calls again must save what the first call saved"


class Replanner:
    """Of one backend. Threads may call its graphs at once; their calls are then counted together.

    Args:
        codes: the code objects that the backend compiles.
        mark: what a device holds now. kinds: of the devices that can tell.
    """

    def __init__(
        self,
        codes: Iterable[CodeType],
        mark: Callable[[torch.device], Held] = Held.now,
        kinds: Collection[str] = ("cuda",),
    ) -> None:
        self._codes, self._mark, self._kinds = codes, mark, kinds
        self._lock = threading.RLock()
        self._corrections: dict[str, Correction] = {}
        self._devices: dict[torch.device, DeviceSteps] = {}
        self._followed: weakref.WeakSet[PlannedGraph] = weakref.WeakSet()
        self._compiles = 0
        self._is_off = False
        # Calls whose results are collected: that may happen in any thread, whatever lock it has, and waits for none.
        self._collected: collections.deque[tuple[torch.device, int]] = collections.deque()

    def reset(self) -> None:
        with self._lock:
            for graph in list(self._followed):
                self._settle(graph)
            self._corrections.clear()
            self._devices.clear()

    def graph(self, gm: fx.GraphModule, options: GlueOptions, asked: object) -> tuple[GlueOptions, PlannedGraph | None]:
        """The options to compile ``gm`` with, and its follower, if there is something to follow.

        Args:
            options: with a budget in bytes. asked: the budget as the user wrote it.
        """
        with self._lock:
            self._compiles += 1
        placeholders = gm.graph.find_nodes(op="placeholder")
        device = device_of(placeholders)
        compile_id = tracing.current_compile_id()
        if not options.budget or device is None or device.type not in self._kinds or not torch.is_grad_enabled():
            return options, None
        # A checkpoint that calls again in backward takes at once what is kept. And a backward that is compiled as a
        # whole would be compiled for each call's hook.
        if runtime.backward_id() is not None or runtime.backward_is_compiled():
            return options, None
        # What compares runs, or counts rewrites, wants one compile.
        is_alone = options.verify or options.fuel is not None
        if compile_id is None or is_alone or not options.is_enabled("plan_memory", default=True):
            return options, None
        key = _key_of(gm, options, asked)
        with self._lock:
            correction = self._corrections.get(key)
            if correction is not None and correction.is_measured:
                return dataclasses.replace(options, correction=correction), None
            held, is_auto = max(0, self._mark(device).allocated), asked == "auto"
            first = None
            # A guess lasts where no plan is made again.
            may_guess = _why_not() is None and not saved_tensor_hooks.are_active()
            if may_guess and is_in_the_middle(placeholders):
                sizes = sizes_of(placeholders, device)
                first = correction or guess(options.budget, held, *sizes, is_auto=is_auto)
                options = dataclasses.replace(options, correction=first)
            graph = PlannedGraph(self, key, compile_id, options, first, is_auto, held)
            self._followed.add(graph)
        return options, graph

    def begin(self, graph: PlannedGraph, args: tuple[Any, ...]) -> tuple[torch.device, int] | None:
        """A call of ``graph`` begins: what :meth:`ended` is to be told, or None if it does not count."""
        if not torch.is_grad_enabled():
            return None
        graph.calls += 1
        if graph.is_settled and not self._followed and not graph.is_to_be_followed_again:
            return None
        try:
            return self._begin(graph, args)
        except Exception as error:  # no step ends because its memory could not be looked at
            self._is_off = True
            self._followed.clear()
            warnings.warn(
                f"glue follows the memory of steps no longer ({type(error).__name__}: {error}); plans stay as they are",
                GlueWarning,
                stacklevel=3,
            )
            return None

    def _begin(self, graph: PlannedGraph, args: tuple[Any, ...]) -> tuple[torch.device, int] | None:
        graph.is_hooked |= saved_tensor_hooks.are_active()
        if self._is_off or runtime.in_dispatch_mode():
            return None
        tensors = [value for value in args if isinstance(value, torch.Tensor) and is_plain(value)]
        device = next((tensor.device for tensor in tensors if tensor.device.type in self._kinds), None)
        if device is None:
            return None
        with self._lock:
            self._drop_collected()
            if graph.is_to_be_followed_again:
                # This call may stand in the middle of a step, whose facts decide nothing then.
                graph.is_settled, graph.steps = False, 0
            if device not in self._devices:
                self._devices[device] = DeviceSteps(lambda: self._mark(device))
            steps = self._devices[device]
            if runtime.backward_id() is None and steps.is_quiet:
                # This call goes on with the plan that it has.
                self._judge_all(steps.done(self._compiles))
                steps.start(self._compiles)
            graph.idle = 0
            if not graph.is_settled:
                self._followed.add(graph)
                if graph.calls > MOST_CALLS:
                    if not graph.steps and not graph.next_look:
                        graph.tell(UNSEEN)
                    self._settle(graph)
            holds = not saved_tensor_hooks.are_active()
            inputs = _bytes_of(tensors, device)
            number = steps.called(graph, inputs, graph.kept, holds=holds)
        return None if number is None else (device, number)

    def wait(self, call: tuple[torch.device, int], results: Any) -> None:
        """The call has returned ``results``: it waits for their backward, if there is to be one."""
        nodes: list[Any] = [r.grad_fn for r in tree_leaves(results) if isinstance(r, torch.Tensor) and r.grad_fn]
        if not nodes:
            self.ended(call, has_run=False)
            return
        # A result that is a view has a node of its own in front of the call's.
        node = next((node for node in nodes if isinstance(node, BackwardCFunction)), nodes[0])
        waits = _Waits(self, call)
        weakref.finalize(waits, self._collected.append, call).atexit = False
        node.register_hook(waits.finish)

    def ended(self, call: tuple[torch.device, int], *, has_run: bool) -> None:
        """A call waits no more: its backward ``has_run``, or there will be none."""
        with self._lock:
            self._drop_collected()
            self._end(*call, has_run=has_run)

    def _drop_collected(self) -> None:
        while self._collected:
            self._end(*self._collected.popleft(), has_run=False)

    def _end(self, device: torch.device, number: int, *, has_run: bool) -> None:
        if device in self._devices:
            self._devices[device].ended(number, has_run=has_run)

    def _judge_all(self, step: DoneStep | None) -> None:
        if step is not None:
            for graph in list(self._followed):
                if graph in step.inputs:
                    self._judge(graph, step)
                    continue
                graph.idle += 1
                if graph.idle > MOST_IDLE:
                    self._followed.discard(graph)

    def _settle(self, graph: PlannedGraph, next_look: int = 0) -> None:
        """Follow ``graph`` no longer, or not until its call number ``next_look``."""
        graph.is_settled, graph.next_look = True, next_look
        self._followed.discard(graph)

    def _judge(self, graph: PlannedGraph, step: DoneStep) -> None:
        asked = graph.asked(step.inputs[graph])
        graph.steps += 1
        if not step.is_whole:
            return
        graph.error = max(graph.error, error_of(step.facts, asked))
        if graph.steps < FIRST:
            return
        correction = correction_for(step.facts, asked, graph.error)
        if correction is not None:
            self._plan_again(graph, correction)
        elif graph.steps >= LAST:
            # Of accumulated gradients an optimiser makes its state later.
            self._settle(graph, next_look=2 * graph.calls)

    def _plan_again(self, graph: PlannedGraph, correction: Correction) -> None:
        """Have the frame compiled again at its next call, unless there is a reason not to; tell."""
        self._settle(graph)
        reason = HOOKS if graph.is_hooked else _why_not()
        if reason is None:
            text = "glue plans its memory again"
            reason = recompile.forget_compiled_graph(list(self._codes), graph.compile_id, text)
        if reason is None:
            self._corrections[graph.key] = correction
            graph.tell(f"{correction.told}; it is planned again at its next call")
        else:
            graph.tell(f"{correction.told}; it is not planned again: {reason}")


class _Waits:
    """Held by the autograd node of a call: as long as it lives, there may be a backward."""

    def __init__(self, replanner: Replanner, call: tuple[torch.device, int]) -> None:
        self.replanner, self.call = replanner, call

    def finish(self, *_: Any) -> None:
        self.replanner.ended(self.call, has_run=True)


class PlannedGraph(Observer):
    """One compiled graph, until it is known whether its plan serves."""

    name = "replanner"

    def __init__(
        self,
        replanner: Replanner,
        key: str,
        compile_id: str,
        options: GlueOptions,
        guess: Correction | None,
        is_auto: bool,
        held: int,
    ) -> None:
        self.key, self.compile_id, self.guess = key, compile_id, guess
        self.steps, self.calls, self.idle, self.error = 0, 0, 0, 0
        self.is_settled, self.next_look = False, 0
        self.is_hooked = False  # has a call been made under hooks on saved tensors?
        self._replanner, self._options, self._is_auto = replanner, options, is_auto
        self._held = held  # on the device when it was compiled
        self._predicted: Predicted | None = None
        self._report: GraphReport | None = None
        self._session: Session | None = None

    @property
    def is_to_be_followed_again(self) -> bool:
        return self.is_settled and 0 < self.next_look <= self.calls

    def report_to(self, report: GraphReport, session: Session) -> None:
        self._report, self._session = report, session

    @property
    def kept(self) -> int:
        return self._predicted.kept if self._predicted is not None else 0

    def asked(self, inputs: int) -> Asked:
        budget = self._options.memory_budget  # with what a guess has taken off, which lies on the device
        assert isinstance(budget, int)
        return Asked(
            budget,
            inputs,
            is_auto=self._is_auto,
            besides=max(0, self._held - inputs) if self._is_auto else 0,
            guess=self.guess,
            predicted=self._predicted,
        )

    def joint_pass_finished(self, report: PassReport) -> None:
        if report.changed and "least_microseconds" in report.counts:
            counts = report.counts
            self._predicted = Predicted(
                counts["peak"],
                counts["saved_bytes"] - counts["moved_bytes"],
                counts["microseconds"] <= counts["least_microseconds"],
                counts["peak"] <= counts["least_peak"],
            )

    def compiled(self, call: Call) -> Call:
        return _Followed(call, self, self._replanner)

    def tell(self, text: str) -> None:
        log.info("%s", text)
        if self._report is not None and self._session is not None:
            self._session.show_plan(self._report, text)


class _Followed:
    """A compiled graph whose first steps are followed."""

    def __init__(self, call: Call, graph: PlannedGraph, replanner: Replanner) -> None:
        self.call, self.graph, self.replanner = call, graph, replanner

    def __call__(self, *args: Any) -> Any:
        waiting = self.replanner.begin(self.graph, args)
        if waiting is None:
            return self.call(*args)
        try:
            results = self.call(*args)
        except BaseException:
            self.replanner.ended(waiting, has_run=False)
            raise
        self.replanner.wait(waiting, results)
        return results


def _why_not() -> str | None:
    """Why no graph is planned again."""
    if recompile.several_ranks():
        return RANKS
    return None if recompile.RECOMPILE.is_available() else "this torch is not known well enough"


def _key_of(gm: fx.GraphModule, options: GlueOptions, budget: object) -> str:
    """What the graph computes and how it is compiled: no names, for a second compile may give others.

    ``budget``: as the user wrote it; in bytes ``"auto"`` is another one each time.
    """
    graphs = [structure_of(module.graph, attributes=lambda _: "attribute") for module in bodies.graph_modules(gm)]
    inputs = [tensor for node in gm.graph.find_nodes(op="placeholder") for tensor in tensors_in(value_of(node))]
    gradients = [tensor.requires_grad for tensor in inputs]
    asked = budget, options.compiler, sorted(options.passes.items()), sorted(options.inductor.items())
    return hashlib.sha256(repr((graphs, gradients, asked)).encode()).hexdigest()


def _bytes_of(tensors: Collection[torch.Tensor], device: torch.device) -> int:
    """Of memory on ``device``, each piece once."""
    found = {storages.identity(t): t.untyped_storage().nbytes() for t in tensors if t.device == device}
    return sum(found.values())
