"""What tiles are for: less is allocated at a time."""

from __future__ import annotations

import pytest
import torch

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
