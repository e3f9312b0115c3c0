"""What glue does in a compile grows with the number of layers, and not faster."""

import cProfile
import pstats

import pytest

from glue_compiler.options import GlueOptions
from glue_compiler.pipeline import registry
from glue_compiler.pipeline.graph_pass import PairPass
from glue_compiler.pipeline.results import Stage
from glue_compiler.pipeline.run import Pipeline
from glue_compiler.testing import capture
from tests.passes.share_layers.models import Layers, ids, layers
from tests.slow import slow_but


def calls_of(run):
    """How many functions are called: the same on a busy machine."""
    profile = cProfile.Profile()
    profile.runcall(run)
    return pstats.Stats(profile).total_calls


def passes_of(count, stage):
    """What all passes of ``stage`` cost for a training step of ``count`` layers, the copies and the checks included."""
    pipeline = Pipeline(registry.all_passes(), GlueOptions(strict=True))
    (graph,) = capture(Layers(layers(count)), ids(), stage=stage)
    if stage is Stage.CAPTURED:
        return calls_of(lambda: pipeline.run(graph, stage))
    on_pairs = [each for each in pipeline.step_passes(graph.forward) if isinstance(each, PairPass)]
    return calls_of(lambda: pipeline.run_pair(graph, on_pairs))


@pytest.mark.parametrize("stage", slow_but((Stage.CAPTURED,), [Stage.CAPTURED, Stage.PARTITIONED]))
@pytest.mark.parametrize("count", [8, pytest.param(16, marks=pytest.mark.slow)])
def test_four_times_the_layers_take_four_times_as_long(stage, count):
    passes_of(4, stage)  # what is done once in a process
    assert passes_of(4 * count, stage) < 4.4 * passes_of(count, stage)
