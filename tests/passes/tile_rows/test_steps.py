"""Training steps whose MLPs run in tiles, against eager in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import silu

from glue_compiler import registry
from tests.captured import compile_with_glue
from tests.passes.tile_rows.models import ROWS, WIDTH, Adapted, Gated, Plain, Stack, frozen, run_both


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", [Gated, Plain, Adapted])
@pytest.mark.parametrize("trained", [False, True])
def test_checkpointed_layers(kind, bias, trained):
    layers = [kind(bias) if trained or kind is Adapted else frozen(kind(bias)) for _ in range(2)]
    report = run_both(Stack(layers))
    assert report.counts["regions"] == 4, report.skips  # forward and backward of each layer
    assert report.counts["tiles"] == 8


def test_without_checkpoints_backward_is_tiled_alone():
    report = run_both(Stack([frozen(Gated()), frozen(Gated())], checkpointed=False))
    assert report.counts["regions"] == 2
    assert any("in forward" in skip.reason for skip in report.skips)  # what is saved is read whole


@pytest.mark.parametrize("shape", [(1, ROWS), (4, ROWS // 2), (2, 2, ROWS)])
def test_rows_in_several_dimensions(shape):
    report = run_both(Stack([frozen(Gated()), Adapted()]), torch.randn(*shape, WIDTH))
    assert report.counts["regions"] == 4


@pytest.mark.parametrize("lengths", [(2 * ROWS, 3000, 513, 7, 1, 0), (3 * ROWS, 256)])
@pytest.mark.parametrize("batch", [None, 2])
def test_lengths_that_vary(lengths, batch):
    inputs = [torch.randn(*(() if batch is None else (batch,)), length, WIDTH) for length in lengths]
    report = run_both(Stack([frozen(Gated()), Adapted()]), *inputs, dynamic=True)
    assert report.counts["regions"] == 4


def test_rows_that_are_not_a_multiple_of_anything():
    for rows in (2 * ROWS + 1, 9 * ROWS - 1):
        report = run_both(Stack([frozen(Gated())]), torch.randn(rows, WIDTH))
        assert report.counts["regions"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Gated, Adapted])
@pytest.mark.parametrize("dynamic", [False, True])
def test_under_inductor(kind, dynamic):
    inputs = [torch.randn(length, WIDTH) for length in ((2 * ROWS, 3000, 7) if dynamic else (ROWS,))]
    report = run_both(Stack([kind(), kind()]), *inputs, compiler="inductor", dynamic=dynamic)
    assert report.counts["regions"] == 4


def test_with_offload():
    model = Stack([frozen(Gated()) for _ in range(4)])
    report = run_both(model, torch.randn(ROWS, WIDTH), offload="checkpoints")
    assert report.counts["regions"] == 8


@pytest.mark.slow
def test_layers_in_tiles_are_shared():
    model = Stack([frozen(Gated()) for _ in range(12)])
    assert run_both(model, report_of="share_layers").counts["calls"] >= 10


class Square(nn.Module):
    """Of as many rows as inner values: each is a product's rows, and the weight of another."""

    def __init__(self, last) -> None:
        super().__init__()
        self.first, self.last = nn.Parameter(torch.randn(ROWS, WIDTH)), last

    def forward(self, x):
        return self.last((x @ self.first.t()).tanh(), x)


@pytest.mark.parametrize("last", [lambda wide, x: wide @ x, lambda wide, x: (wide * x[:, :1]) @ x])
def test_what_is_read_by_rows_and_as_a_whole(last):
    assert run_both(Stack([frozen(Square(last))])).counts["regions"] >= 1


# -- near misses: each has a region around it, or would be one


class MixedRows(Gated):
    """What is wide goes through ``mix`` on its way."""

    def __init__(self, mix) -> None:
        super().__init__()
        self.mix = mix

    def wide(self, x):
        return silu(self.mix(self.gate(x)))


@pytest.mark.parametrize(
    "mix",
    [
        lambda h: h.softmax(0),
        lambda h: h.cumsum(0),
        lambda h: h - h.mean(0, keepdim=True),
        lambda h: h.flip(0),
        lambda h: h.roll(1, 0),
        lambda h: h * h.amax(),
        lambda h: h.view(h.shape[1], h.shape[0]).t().contiguous(),
        lambda h: nn.functional.dropout(h, 0.5),
        lambda h: h + torch.rand_like(h),
    ],
)
def test_rows_that_are_mixed_inside(mix):
    run_both(Stack([frozen(MixedRows(mix))]))  # next to what mixes rows there may be tiles, but not across it


@pytest.mark.parametrize("shape", [(1, ROWS), (3, ROWS)])
def test_a_table_by_position(shape):
    """Each row has a line of its own in one sequence; in a batch several share one, and tiles end at the table."""
    mix = MixedRows(lambda h: h * torch.arange(h.shape[1]).to(h.dtype)[:, None].cos())
    report = run_both(Stack([frozen(mix)]), torch.randn(*shape, WIDTH))
    assert report.counts["regions"] == 2


def test_a_mean_over_each_row_is_no_mix():
    report = run_both(Stack([frozen(MixedRows(lambda h: h - h.mean(-1, keepdim=True)))]))
    assert report.counts["regions"] == 2


class RandomInBetween(Gated):
    """A result goes through ``early`` before random numbers are drawn that an operand is made of."""

    def __init__(self, early) -> None:
        super().__init__()
        self.early, self.last = early, nn.Linear(8 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        wide = silu(self.gate(x))
        early = self.early(self.down(wide))
        return early + self.last(wide * torch.rand(x.shape[0], 1, dtype=x.dtype))


@pytest.mark.parametrize("early", [nn.Dropout(0.5), nn.Tanh()])
def test_random_numbers_are_drawn_in_order(early):
    report = run_both(Stack([frozen(RandomInBetween(early))]))
    may_wait = isinstance(early, nn.Tanh)
    assert any("reads a result before" in skip.reason for skip in report.skips) is not may_wait
    assert (report.counts["regions"] > 0) is may_wait


class ReturnsWide(Gated):
    def forward(self, x):
        wide = self.wide(x)
        return x + self.down(wide) + wide.flip(0).sum(-1, keepdim=True)


def test_a_wide_value_that_is_read_whole():
    report = run_both(Stack([frozen(ReturnsWide())], checkpointed=False))
    assert any("reads all rows at once" in skip.reason for skip in report.skips)


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_range_that_one_graph_has_to_serve(compiler):
    model = Stack([frozen(Gated()), frozen(Gated())])
    tiled = run_both(model, torch.randn(ROWS, WIDTH), compiler=compiler, dynamic=True)
    assert tiled.changed
    torch._dynamo.reset()
    lengths = [torch.randn(length, WIDTH, dtype=torch.float64) for length in (ROWS, 3, 3000)]
    for each in lengths:
        torch._dynamo.mark_dynamic(each, 0, min=2, max=2**20)
    run = compile_with_glue(model, compiler=compiler, passes={"tile_rows": True})
    for each in lengths:
        run.call(each).sum().backward()
    (graph,) = run.session.graphs
    report = next(p for p in graph.passes if p.name == "tile_rows")
    assert not report.changed
    assert any("mark_dynamic" in skip.reason for skip in report.skips)


def test_few_rows_stay_whole():
    assert run_both(Stack([frozen(Gated())]), torch.randn(ROWS - 1, WIDTH)).counts["regions"] == 0


def test_products_of_one_width_stay_whole():
    assert run_both(Stack([frozen(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH)])).counts["regions"] == 0


def test_sums_over_rows_in_a_narrow_dtype_stay_whole():
    """Of weights whose gradients would be rounded once for each tile."""
    model, x = Stack([Gated()]).bfloat16(), torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)
    run = compile_with_glue(model, compiler="aot_eager", passes={"tile_rows": True})
    run.call(x).sum().backward()
    report = next(p for p in run.session.graphs[-1].passes if p.name == "tile_rows")
    assert report.counts["regions"] == 1  # the forward
    assert any("in backward" in skip.reason for skip in report.skips)


def test_it_is_off_until_it_is_asked_for():
    assert not next(each for each in registry.all_passes() if each.name == "tile_rows").default
