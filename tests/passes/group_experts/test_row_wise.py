"""Which calls keep rows apart, by operators and sizes."""

import pytest
import torch

from glue_compiler.fx.effects import EffectAnalysis
from glue_compiler.fx.operators import Operators
from glue_compiler.fx.value_numbering import number_values
from glue_compiler.passes.group_experts.row_wise import Rows, mixes_rows
from tests.captured import compile_with_glue

ROWS = 4


@pytest.mark.parametrize(
    ("call", "shape", "keeps"),
    [
        (lambda x: x.expand(ROWS, ROWS), (ROWS, 1), True),
        (lambda x: x.expand(ROWS, ROWS), (ROWS,), False),
        (lambda x: x.view(ROWS, 2, 2), (ROWS, ROWS), True),
        (lambda x: x.transpose(0, 1), (ROWS, ROWS), False),
    ],
    ids=["repeated in each row", "repeated for as many rows", "viewed", "transposed"],
)
def test_rows_are_no_other_dimension_of_their_size(call, shape, keeps):
    run = compile_with_glue(call, eager=True, passes={"hoist_metadata": False, "group_experts": False})
    run.call(torch.randn(shape))
    analysis = EffectAnalysis.for_graph(run.graph)
    operators = Operators(number_values(run.graph, analysis), analysis)
    (node,) = (each for each in run.graph.graph.nodes if each.op.startswith("call_"))
    reason = mixes_rows(operators, run.graph, node, lambda operand: Rows.ROWS, ROWS)
    assert (reason is None) == keeps
