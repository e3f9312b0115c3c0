"""What tiles are for: less is allocated at a time."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.captured import compile_with_glue
from tests.passes.plan_memory.test_peak import most_allocated
from tests.passes.tile_rows.models import ROWS, WIDTH, Adapted, Gated, Stack, frozen

TILES = 8


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("kind", [Gated, Adapted])
def test_less_is_allocated(compiler, kind, tmp_path):
    peaks = []
    for tiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, x = (
            Stack([frozen(Gated()) if kind is Gated else Adapted() for _ in range(3)]),
            torch.randn(TILES * ROWS, WIDTH),
        )
        run = compile_with_glue(model, compiler=compiler, passes={"tile_rows": tiled})

        def one_step(run=run, model=model, x=x):
            model.zero_grad(set_to_none=True)
            run.call(x).sum().backward()

        one_step()
        peaks.append(most_allocated(one_step, tmp_path / "trace.json"))
    # A value inside of the MLP is 8 times as wide as one outside. Backward holds several of them at a time.
    assert peaks[1] < 0.6 * peaks[0]


def test_tiles_run_where_their_steps_ran(tmp_path):
    """Not as late as their results are read: what else they read would stay until then."""
    weight = torch.randn(32 * WIDTH, WIDTH, dtype=torch.float64, requires_grad=True)
    x = torch.randn(2 * ROWS, WIDTH, dtype=torch.float64, requires_grad=True)

    def layer(x):
        wide = torch.nn.functional.linear(x, weight).softmax(-1)
        return x + (wide + wide.roll(1, 0)) @ weight

    def loss(x):
        return checkpoint(layer, x, use_reentrant=False).sum()

    peaks = []
    for tiled in (False, True):
        torch._dynamo.reset()
        run = compile_with_glue(loss, compiler="aot_eager", passes={"tile_rows": tiled})
        run.call(x).backward()
        peaks.append(most_allocated(lambda run=run: run.call(x).backward(), tmp_path / "trace.json"))
    assert peaks[1] <= peaks[0]
