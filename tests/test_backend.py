"""The backend through Inductor: the ways in which people call it."""

import importlib
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
import torch
from torch._inductor.utils import fresh_cache

from tests import versions
from tests.captured import compile_and_keep, result_and_gradients
from tests.passes.hoist_metadata.test_checkpoint_bodies import checkpointed
from tests.passes.hoist_metadata.test_one_graph import layer_inputs, positions_of, two_layers


def close(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


# Plain Inductor of 2.15 leaves a symbol of this function's graph undefined in its code, with glue or without.


@pytest.fixture(scope="module")
def inductor():
    return torch.compile(two_layers, backend="glue", options={"strict": True})


def test_the_entry_point_is_registered():
    (entry,) = entry_points(group="torch_dynamo_backends", name="glue")
    assert entry.value == "glue_compiler.backend:glue"
    assert "glue" in torch._dynamo.list_backends()


@versions.SYMBOLS_IN_INDUCTOR.mark
def test_forward_and_backward(inductor):
    x, *weights = (tensor.requires_grad_() for tensor in layer_inputs())
    positions = positions_of(5, 1, 6)
    got = result_and_gradients(lambda *a: inductor(a[0], positions, *a[1:]), [x, *weights])
    close(got, result_and_gradients(lambda *a: two_layers(a[0], positions, *a[1:]), [x, *weights]))
    assert len(got) == 4


@versions.SIZES_IN_INDUCTOR.mark
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    x, *weights = layer_inputs()
    run = compile_and_keep(two_layers, compiler="inductor", fullgraph=False)
    with mode():
        close([run.call(x, positions_of(12), *weights)], [two_layers(x, positions_of(12), *weights)])
    hoisted = next(p for p in run.report.passes if p.name == "hoist_metadata")
    assert hoisted.counts["syncs_removed"] == 2


@versions.SYMBOLS_IN_INDUCTOR.mark
def test_checkpointing_trains():
    """Under plain Inductor of torch 2.11 the data-dependent metadata of a checkpoint body crashes the backward."""
    model = checkpointed()
    compiled = torch.compile(model, backend="glue", options={"strict": True})
    inputs = [tensor.requires_grad_() for tensor in layer_inputs()]
    positions = positions_of(5, 7)
    got = result_and_gradients(lambda *a: compiled(a[0], positions, *a[1:]), inputs)
    close(got, result_and_gradients(lambda *a: model(a[0], positions, *a[1:]), inputs))


@pytest.mark.parametrize("mode", ["max-autotune-no-cudagraphs", None])
def test_a_mode_reaches_inductor(mode):
    seen = []

    class Look(torch._inductor.custom_graph_pass.CustomGraphPass):
        def __call__(self, graph):
            seen.append(torch._inductor.config.max_autotune)

        def uuid(self):
            return None

    with torch._inductor.config.patch(post_grad_custom_post_pass=Look()):
        fn = torch.compile(lambda x: x.sin() + 1, backend="glue", mode=mode)
        close([fn(torch.ones(3))], [torch.ones(3).sin() + 1])
    assert seen == [mode is not None]


def test_inductors_options_reach_inductor():
    seen = []

    class Look(torch._inductor.custom_graph_pass.CustomGraphPass):
        def __call__(self, graph):
            seen.append(len(graph.nodes))

        def uuid(self):
            return None  # or a run after this one finds the graph in the cache

    options = {"post_grad_custom_pre_pass": Look(), "post_grad_custom_post_pass": Look(), "fallback_random": True}
    fn = torch.compile(lambda x: x.cos() + torch.rand_like(x), backend="glue", options=options)
    torch.manual_seed(3)
    got = fn(torch.ones(3))
    torch.manual_seed(3)
    close([got], [torch.ones(3).cos() + torch.rand(3)])
    assert len(seen) == 2


def test_a_result_that_is_no_tuple_and_a_graph_without_operators():
    close([torch.compile(lambda x: x, backend="glue")(torch.ones(2))], [torch.ones(2)])
    assert torch.compile(lambda x: {"a": x + 1, "b": [x, 3]}, backend="glue")(torch.ones(2))["b"][1] == 3


GRAPHS_OF_INDUCTOR = """
import sys, torch
{first}
texts = []
class Look(torch._inductor.custom_graph_pass.CustomGraphPass):
    def __call__(self, graph): texts.append(str(graph))
    def uuid(self): return None
def fn(x):
    return (x.cumsum(0) * 2, x.cumsum(0) * 3, x * x.sum().item())
options = {{"post_grad_custom_post_pass": Look()}}
torch.compile(fn, backend="inductor", options=options)(torch.arange(4.0, requires_grad=True))
print(texts, [getattr(torch._dynamo.config, n) for n in ("capture_scalar_outputs", "capture_dynamic_output_shape_ops")])
"""


@pytest.mark.slow
def test_inductor_in_the_same_process_gets_the_same_graphs():
    use_glue = 'torch.compile(lambda x: x * x.sum().item(), backend="glue")(torch.ones(3))'
    outputs = [
        subprocess.run(
            [sys.executable, "-c", GRAPHS_OF_INDUCTOR.format(first=first)], capture_output=True, text=True, check=True
        ).stdout
        for first in ("", use_glue)
    ]
    assert outputs[0] == outputs[1]
    assert outputs[0].count("cumsum") >= 2


def test_a_call_of_a_compiled_module_enters_nothing_of_glues():
    """What is set for capture must cost a call nothing: no Python function of ours runs in one."""
    module = torch.nn.Linear(3, 3)
    module.compile(backend="glue", options={"compiler": "aot_eager"})
    x = torch.ones(3)
    module(x)
    seen = []

    def profile(frame, event, arg):
        if event == "call" and "glue_compiler" in frame.f_code.co_filename:
            seen.append(frame.f_code.co_qualname)

    sys.setprofile(profile)
    try:
        module(x)
    finally:
        sys.setprofile(None)
    assert not seen


@pytest.mark.parametrize("backend", ["inductor", "glue"])
def test_bf16_runs_in_eager_where_inductor_refuses_it_for_the_card(monkeypatch, backend):
    """As on a T4: Inductor has Dynamo skip the frame."""

    def refuse(graph):
        raise torch._dynamo.exc.SkipFrame("BF16 is not supported")

    compile_fx = importlib.import_module("torch._inductor.compile_fx")  # a function has the same name
    monkeypatch.setattr(compile_fx, "_check_triton_bf16_support", refuse)
    x, *weights = (tensor.bfloat16().requires_grad_() for tensor in layer_inputs())
    positions = positions_of(5, 1, 6)
    with fresh_cache():  # where it takes none, Inductor of 2.13 makes an error of it
        call = torch.compile(two_layers, backend=backend)
        got = result_and_gradients(lambda *a: call(a[0], positions, *a[1:]), [x, *weights])
    want = result_and_gradients(lambda *a: two_layers(a[0], positions, *a[1:]), [x, *weights])
    assert all(map(torch.equal, got, want))
