"""In which mode of autograd and autocast each node of a captured graph runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from glue_compiler.compat.switches import AUTOCAST_SWITCHES, GRAD_SWITCHES
from glue_compiler.fx import bodies


@dataclass(frozen=True)
class Mode:
    """What was switched inside of the graph; the rest is as it is where the graph is called.

    Attributes:
        grad: None: as it is where the graph is called.
        autocast: the arguments of the open autocast regions, outermost first.
        is_known: false in a body that is called in several modes.
        opened: the nodes that opened the autocast regions; no part of what makes two modes equal.
    """

    grad: bool | None = None
    autocast: tuple[tuple[Any, ...], ...] = ()
    is_known: bool = True
    opened: tuple[fx.Node, ...] = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mode) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[Any, ...]:
        return (self.grad, self.autocast, self.is_known)

    @property
    def is_grad_on(self) -> bool:
        """Are gradients recorded? Passes run in the mode around the graph."""
        return torch.is_grad_enabled() if self.grad is None else self.grad

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Run operators as they are run in this mode."""
        with contextlib.ExitStack() as stack:
            if self.grad is not None:
                stack.enter_context(torch.set_grad_enabled(self.grad))
            for arguments in self.autocast:
                stack.enter_context(torch.autocast(*arguments))
            yield


def modes_of(gm: fx.GraphModule, around: Mode | None = None) -> dict[fx.Node, Mode]:
    """The mode of each node of ``gm`` and of the bodies in it. ``around``: the mode where ``gm`` is called."""
    found: dict[fx.Node, Mode] = {}
    _read(gm, around or Mode(), found)
    return found


def _read(gm: fx.GraphModule, mode: Mode, found: dict[fx.Node, Mode]) -> None:
    for node in gm.graph.nodes:
        if node in found and found[node] != mode:
            found[node] = Mode(is_known=False)
        else:
            found[node] = mode
        for body in bodies.bodies_of(gm, node) if bodies.is_higher_order(node) else ():
            _read(body, found[node], found)
        mode = _after(node, mode)


def _after(node: fx.Node, mode: Mode) -> Mode:
    if node.op != "call_function" or node.target not in GRAD_SWITCHES | AUTOCAST_SWITCHES:
        return mode
    if node.target in GRAD_SWITCHES:
        return replace(mode, grad=bool(node.args[0]))
    closed = [mode.opened.index(arg) for arg in node.all_input_nodes if arg in mode.opened]
    if closed:  # and those inside of it
        left = min(closed)
        return replace(mode, autocast=mode.autocast[:left], opened=mode.opened[:left])
    return replace(mode, autocast=(*mode.autocast, tuple(node.args)), opened=(*mode.opened, node))
