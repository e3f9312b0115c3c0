"""Observers are told what happens to a graph, and none of them can end a compile."""

import pytest
import torch

from glue_compiler.errors import GlueWarning
from glue_compiler.handoff import watchers
from glue_compiler.pipeline.observer import Observer, Observers

EVENTS = ["captured", "pass_finished", "handed_off", "partitioned", "pair_finished", "compiled"]


class Listener(Observer):
    name = "listener"

    def __init__(self, fails_at=None):
        self.heard = []
        self.fails_at = fails_at

    def __getattribute__(self, event):
        if event not in EVENTS:
            return super().__getattribute__(event)

        def hear(*what):
            self.heard.append(event)
            if event == self.fails_at:
                raise OSError("no room")
            return what[0] if event == "compiled" else None

        return hear


def checkpointed(x):
    return torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False) * 2


def train(monkeypatch, *observers):
    monkeypatch.setattr(watchers, "watch", lambda *_: Observers(*observers))
    x = torch.ones(3, requires_grad=True)
    options = {"compiler": "aot_eager", "offload": "checkpoints"}
    torch.compile(checkpointed, backend="glue", options=options)(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(3).cos() * 2)


def test_events_come_in_order(monkeypatch):
    listener = Listener()
    train(monkeypatch, listener)
    assert list(dict.fromkeys(listener.heard)) == EVENTS


@pytest.mark.parametrize("event", EVENTS)
def test_one_that_fails_is_a_warning_and_the_others_hear_on(event, monkeypatch):
    failing, other = Listener(fails_at=event), Listener()
    with pytest.warns(GlueWarning, match="glue's listener of a graph is not complete .OSError: no room") as caught:
        train(monkeypatch, failing, other)
    assert len(caught) == 1
    assert failing.heard[-1] == event
    assert list(dict.fromkeys(other.heard)) == EVENTS
