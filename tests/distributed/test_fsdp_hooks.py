"""FSDP2's hooks run as in eager mode: each step gathers, frees and reduces the same modules in one order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from tests.distributed.engines import fsdp
from tests.distributed.training import Compiles, batches_of
from tests.models.training import tiny

pytestmark = pytest.mark.slow

Step = list[tuple[str, str]]
LAYERS = 5
STEPS = 3
CASES = [("before", "whole"), ("after", "whole"), ("before", "auto"), ("after", "auto")]
CASES += [("layers", "whole"), ("layers after", "whole")]


@contextlib.contextmanager
def events() -> Iterator[Step]:
    """What happens to the weights of a module, in order: of a hook, of a collective that it starts, of memory."""
    found: Step = []

    def told(name: str, event: str) -> Any:
        method = getattr(groups.FSDPParamGroup, name)

        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            # Each result of a module has this hook, and the first does all; logits of a loss in chunks get no gradient.
            if event != "pre_backward" or group._training_state != TrainingState.PRE_BACKWARD:
                found.append((group._module_fqn or "root", event))
            return method(group, *args, **kwargs)

        return mock.patch.object(groups.FSDPParamGroup, name, call)

    def sent(name: str, event: str) -> Any:
        function = getattr(groups, name)

        def call(params: Any, *args: Any, **kwargs: Any) -> Any:
            found.append((params[0]._param_fqn, event))
            return function(params, *args, **kwargs)

        return mock.patch.object(groups, name, call)

    with contextlib.ExitStack() as stack:
        for hook in ("pre_forward", "post_forward", "pre_backward", "post_backward"):
            stack.enter_context(told(hook, hook))
        for change in ("_to_sharded", "_to_sharded_post_forward", "_to_unsharded"):
            stack.enter_context(told(change, change))
        stack.enter_context(sent("foreach_all_gather", "all-gather"))
        stack.enter_context(sent("foreach_reduce", "reduce-scatter"))
        yield found


def steps_of(how: dict[str, Any], compiles: Any) -> list[Step]:
    torch.manual_seed(0)
    model = tiny("qwen3", num_hidden_layers=LAYERS)
    call = fsdp(**how).prepare(model, compiles)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    steps: list[Step] = []
    for number in range(STEPS):
        with events() as found:
            call(**batches_of(dist.get_rank(), number, 1)[0]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append(found)
    return steps


class Eager:
    def __call__(self, module: Any) -> Any:
        return module

    in_place = __call__


def beside_eager(how: dict[str, Any], regions: str) -> tuple[list[Step], list[Step], int]:
    compiles = Compiles({"compiler": "aot_eager", "regions": regions}, None)
    found = steps_of(how, compiles)
    return steps_of(how, Eager()), found, len(compiles.session.graphs)


@pytest.mark.parametrize("checkpoints", [False, True], ids=["saved", "checkpointed"])
@pytest.mark.parametrize(("compiled", "regions"), CASES)
def test_a_step_gathers_frees_and_reduces_as_in_eager(two_ranks, compiled, regions, checkpoints):
    how = {"compiled": compiled, "checkpoints": checkpoints}
    for eager, found, graphs in two_ranks.run(beside_eager, how, regions):
        assert graphs > 0
        for step in eager:  # each layer for forward and for backward; what is around them is kept
            assert sum(event == "all-gather" for _, event in step) == 2 * LAYERS + 1
            assert sum(event == "reduce-scatter" for _, event in step) == LAYERS + 1
            assert sum(event == "_to_sharded" for _, event in step) == 2 * LAYERS + 1
        assert found == eager
