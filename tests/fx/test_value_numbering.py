"""Value numbering: equal numbers, and the reasons for different ones."""

import torch
from torch.utils.checkpoint import checkpoint

from glue_compiler.fx.effects import EffectAnalysis
from glue_compiler.fx.value_numbering import number_values
from tests.captured import compile_with_glue


def numbering_of(fn, *args):
    run = compile_with_glue(fn, eager=True, passes={"hoist_metadata": False})
    run.call(*args)
    return number_values(run.graph, EffectAnalysis.for_graph(run.graph))


def numbers(numbering, target):
    return [number for node, number in numbering.numbers.items() if node.target == target]


def test_equal_calls_have_equal_numbers_and_others_do_not():
    numbering = numbering_of(lambda x: (x.cumsum(0) * 2, x.cumsum(0) * 3, x.cumsum(1) * 4), torch.ones(2, 2))
    first, second, third = numbers(numbering, "cumsum")
    assert first == second != third


def test_keyword_order_does_not_matter():
    numbering = numbering_of(
        lambda x: (
            torch.full_like(x, 1, dtype=x.dtype, device="cpu") * 1,
            torch.full_like(x, 1, device="cpu", dtype=x.dtype) * 2,
        ),
        torch.ones(2),
    )
    assert len(set(numbers(numbering, torch.full_like))) == 1


def test_equality_goes_through_bodies():
    def fn(x):
        y = x.cumsum(0)
        return checkpoint(lambda z: z.cumsum(0) * 2, x, use_reentrant=False) + y

    numbering = numbering_of(fn, torch.arange(3))
    assert len(set(numbers(numbering, "cumsum"))) == 1
    assert {scope.depth for scope in numbering.scopes} == {0, 1}


def test_symbols_of_equal_results_are_equal():
    """Torch itself gives both nonzeros of one fake tensor the same symbol, but not those of equal tensors."""
    numbering = numbering_of(lambda x: (torch.nonzero(x > 0).sum(), torch.nonzero(x > 0).sum()), torch.ones(3))
    assert len(set(numbers(numbering, torch.nonzero))) == 1
    assert len(numbering.equal_symbols) == 1


def test_sizes_computed_from_equal_symbols_are_equal():
    def fn(x):
        a, b = torch.nonzero(x > 0).shape[0], torch.nonzero(x > 0).shape[0]
        return torch.arange(a + 1), torch.arange(b + 1)

    numbering = numbering_of(fn, torch.ones(3))
    assert len(set(numbers(numbering, torch.arange))) == 1


def test_a_write_gives_new_numbers_to_what_reads_it_and_to_nothing_else():
    def fn(x, y):
        first = (x.cumsum(0), y.cumsum(0))
        x.add_(1)
        return first, (x.cumsum(0), y.cumsum(0))

    numbering = numbering_of(fn, torch.arange(3), torch.arange(3))
    of_x, of_y, of_written_x, of_y_again = numbers(numbering, "cumsum")
    assert of_x != of_written_x
    assert of_y == of_y_again


def test_a_body_called_twice_is_not_looked_into():
    @torch.compiler.nested_compile_region
    def region(x):
        return x.cumsum(0) * 2

    numbering = numbering_of(lambda x: region(x) + region(x + 1), torch.ones(3))
    assert {scope.depth for scope in numbering.scopes} == {0}


def test_numbering_changes_nothing():
    run = compile_with_glue(
        lambda x: torch.nonzero(x > 0) + torch.nonzero(x > 0), eager=True, passes={"hoist_metadata": False}
    )
    run.call(torch.ones(3))
    before = [(str(node.format_node()), str(node.meta.get("example_value"))) for node in run.graph.graph.nodes]
    number_values(run.graph, EffectAnalysis.for_graph(run.graph))
    assert [(str(node.format_node()), str(node.meta.get("example_value"))) for node in run.graph.graph.nodes] == before


def contents_behind_a_write(x, *, recorded):
    def fn(x):
        y = x * 2
        with torch.set_grad_enabled(recorded):
            y.mul_(3)
        return y + 1

    numbering = numbering_of(fn, x)
    made, written, read = (
        next(node for node in numbering.nodes if getattr(node.target, "__name__", node.target) == name)
        for name in ("mul", "mul_", "add")
    )
    return numbering.contents(made, read), written


def test_what_is_written_without_autograd_passes_gradients_by():
    """Gradients of the tensor go past the write, to what it was made of."""
    found, _ = contents_behind_a_write(torch.ones(2, requires_grad=True), recorded=False)
    assert found is None
    for given, recorded in ((torch.ones(2, requires_grad=True), True), (torch.ones(2), False)):
        found, written = contents_behind_a_write(given, recorded=recorded)
        assert found is written
