"""States of random generators that are kept around attention which draws no numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from glue_compiler.compat import rng_states, symbols
from glue_compiler.fx.training_pair import TrainingPair
from glue_compiler.fx.values import has_value, tensors_in, value_of
from glue_compiler.passes.share_layers.steps import draws_numbers


@dataclass(frozen=True)
class KeptState:
    """Calls in ``calls``, of forward and of backward, run with a state that none of them reads.

    Attributes:
        saved: what forward saves; None where the states are generators that both graphs are given.
        taken: inputs of the graphs that are nothing else than the state.
    """

    calls: tuple[fx.Node, ...]
    saved: fx.Node | None
    taken: tuple[fx.Node, ...]


def find_unread_states(pair: TrainingPair) -> list[KeptState]:
    """Under a checkpoint torch keeps a state for each operator that is tagged as random, and so for all attention."""
    found = []
    inputs = {node.name: node for node in pair.backward.graph.find_nodes(op="placeholder")}
    saved = [node for node in pair.returned if isinstance(node, fx.Node) and rng_states.is_rng_state(node)]
    for number, state in enumerate(saved):
        taken = inputs.get(f"rng_state_output_{number}")
        calls = (*state.all_input_nodes, *(taken.users if taken is not None else ()))
        if taken is not None and len(state.users) == 1 and all(map(_draws_nothing, calls)):
            found.append(KeptState(calls, state, (taken,)))
    ahead, back = (rng_states.generators(gm.graph) for gm in (pair.forward, pair.backward))
    for both in ((ahead[name], back[name]) for name in ahead if name in back):
        calls = tuple(user for generator in both for user in generator.users)
        if all(map(_draws_nothing, calls)):
            found.append(KeptState(calls, None, both))
    return found


def _draws_nothing(node: fx.Node) -> bool:
    call = rng_states.run_with_a_state(node)
    return call is not None and isinstance(call[0], torch._ops.OpOverload) and not draws_numbers(*call)


def drop_states(pair: TrainingPair, states: tuple[KeptState, ...]) -> None:
    """Run their calls without them."""
    for state in states:
        for node in state.calls:
            _run_plainly(node)
        if state.saved is not None:
            pair.forward.graph.output_node().args = (tuple(each for each in pair.returned if each is not state.saved),)
            source = state.saved.all_input_nodes[0]
            pair.forward.graph.erase_node(state.saved)
            pair.forward.graph.erase_node(source)
        for node in state.taken:  # Inductor of torch 2.11 fails on a generator without a use
            node.graph.erase_node(node)
    for gm in (pair.forward, pair.backward) if states else ():
        gm.recompile()


def _run_plainly(node: fx.Node) -> None:
    call = rng_states.run_with_a_state(node)
    assert call is not None
    target, args, kwargs = call
    with node.graph.inserting_before(node):
        plain = node.graph.call_function(target, args, kwargs)
    plain.meta = dict(node.meta)
    results = list(rng_states.results_of(node))
    for result in results:
        plain.meta |= result.meta
        result.replace_all_uses_with(plain)
        node.graph.erase_node(result)
    if not has_value(plain):
        _record_value(plain)


def _record_value(node: fx.Node) -> None:
    args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
    mode = symbols.fake_mode_of(tensors_in((args, kwargs)))
    with symbols.speculation(mode, getattr(mode, "shape_env", None)):
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]
