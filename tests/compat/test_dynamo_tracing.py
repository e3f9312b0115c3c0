"""What Dynamo writes down for exported programs alone."""

from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.output_graph import OutputGraph


@pytest.mark.parametrize(("backend", "are_written"), [("glue", False), ("aot_eager", True)])
def test_names_of_parameters_are_left_out_of_glues_traces_alone(backend, are_written):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2)), torch.randn(3, 4)
    options = {"options": {"compiler": "aot_eager"}} if backend == "glue" else {}
    original = OutputGraph.get_chained_param_buffer_source
    with mock.patch.object(OutputGraph, "get_chained_param_buffer_source", autospec=True, side_effect=original) as made:
        compiled = torch.compile(model, backend=backend, **options)
        torch.testing.assert_close(compiled(x), model(x))
    assert bool(made.call_count) == are_written
