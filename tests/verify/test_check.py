"""Verified compiles: right ones pass, wrong ones are named, at each stage."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from glue_compiler.errors import GlueVerifyError, GlueWarning
from glue_compiler.pipeline.graph_pass import GraphPass, PassResult
from glue_compiler.pipeline.results import Numerics
from glue_compiler.testing import find
from glue_compiler.verify import check
from tests import versions
from tests.passes.hoist_metadata.test_one_graph import layer_inputs, positions_of, two_layers
from tests.slow import one_in
from tests.verify.wrong_passes import DropNegations, RenameFunctions, cosine, inputs, model

OPTIONS = {"compiler": "aot_eager", "strict": True, "verify": True}


def compiled(fn, **options):
    return torch.compile(fn, backend="glue", options={**OPTIONS, **options})


@pytest.fixture
def checks(monkeypatch):
    """How many checks ran, and that none of them was given up."""
    seen = []
    original = check._Check.compare

    def compare(self, inputs, outputs):
        seen.append(self.reference.numerics())
        return original(self, inputs, outputs)

    monkeypatch.setattr(check._Check, "compare", compare)
    return seen


# -- what is right passes


def checkpointed(x, positions, first, second):
    for weight in (first, second):
        x = checkpoint(two_layers, x, positions, weight, weight, use_reentrant=False)
    return x


@pytest.mark.parametrize("fn", one_in(2, [two_layers, checkpointed]))
def test_rewritten_metadata_is_verified_bit_by_bit(fn, checks):
    x, first, second = (t.requires_grad_() for t in layer_inputs())
    call = compiled(fn)
    for lengths in ((5, 7), (12,), (1, 11)):
        call(x, positions_of(*lengths), first, second).sum().backward()
    assert checks == [Numerics.BITWISE] * 3
    with torch.no_grad():
        call(x, positions_of(3, 9), first, second)
    assert len(checks) == 4


def test_the_batch_memo_still_knows_its_batch(checks):
    """Copies of a batch must not push it out: the second layer's call finds what the first one's computed."""
    from torch.profiler import profile

    x, first, second = (t.requires_grad_() for t in layer_inputs())
    layers = [compiled(lambda x, p, w=w: two_layers(x, p, w, w)) for w in (first, second)]
    positions = positions_of(5, 7)
    layers[0](layers[1](x, positions), positions).sum().backward()
    batch = positions_of(4, 8)
    with profile() as profiler:
        layers[0](layers[1](x, batch), batch)
    nonzeros = sum(event.count for event in profiler.key_averages() if event.key == "aten::nonzero")
    references = 4 + 4  # two layers of two, forward and the recomputation of none: eager references alone
    assert nonzeros <= references + 1
    assert len(checks) == 4


def with_a_constant(x, w):
    with torch.no_grad():
        scale = w.cumsum(0)
    return x * scale + w


CASES = {
    "in place": lambda x, w: x.mul_(2) + w,
    "in place on a view": lambda x, w: x[1:].add_(w[1:]) * 2,
    "returns its input": lambda x, w: (x, x * w, w),
    "returns views": lambda x, w: (x.t(), x[0], (x + w).view(-1)),
    "dropout": lambda x, w: torch.nn.functional.dropout(x, 0.5) * torch.rand_like(x) @ w,
    "dropout in a checkpoint": lambda x, w: checkpoint(
        lambda a: torch.nn.functional.dropout(a @ w, 0.5).sin(), x, use_reentrant=False
    ),
    "no result": lambda x, w: None,
    "numbers": lambda x, w: (x.shape[0], x.sum().item(), x * 2),
    "no_grad inside": with_a_constant,
    "detached output": lambda x, w: (x.detach() * 2, x * w),
}


@pytest.mark.parametrize("fn", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("gradients", [True, False])
def test_calls_of_every_kind_pass_and_are_not_changed(fn, gradients, request):
    if not gradients and "checkpoint" in request.node.name:
        versions.RANDOM_IN_CHECKPOINTS.skip()
    results = []
    for call in (fn, compiled(fn)):
        generator = torch.Generator().manual_seed(0)
        leaves = [torch.randn(4, 4, generator=generator, dtype=torch.float64) for _ in range(2)]
        leaves = [leaf.requires_grad_(gradients) for leaf in leaves]
        arguments = [leaf * 1 for leaf in leaves]
        torch.manual_seed(3)
        outputs = call(*arguments)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        ends = [o for o in (*outputs, *arguments) if isinstance(o, torch.Tensor) and o.requires_grad]
        if ends:
            sum(o.square().sum() for o in ends).backward()
        results.append([*outputs, *arguments, *(leaf.grad for leaf in leaves), torch.rand(2)])
    for want, got in zip(*results, strict=True):
        if isinstance(want, torch.Tensor):
            # AOTAutograd may add gradients up in another order.
            torch.testing.assert_close(got, want, rtol=1e-14, atol=1e-14)
        else:
            assert got == want


def test_under_the_users_checkpoint_autocast_and_inference_mode(checks):
    x, weight = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    call = compiled(lambda x, w: (x @ w).sin())
    out = checkpoint(call, x, weight, use_reentrant=False)
    out.sum().backward()
    expected = torch.autograd.grad((x @ weight).sin().sum(), [x, weight])
    for want, leaf in zip(expected, (x, weight), strict=True):
        torch.testing.assert_close(leaf.grad, want, rtol=0, atol=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        call(x, weight).sum().backward()
    with torch.inference_mode():
        call(x, weight)
    assert len(checks) == 3  # the recomputation in backward stops early, before a check


def test_a_call_that_cannot_be_copied_runs_unverified_and_says_so(checks):
    call = compiled(lambda x: x * 2)
    with pytest.warns(GlueWarning, match="not verified.*not plain memory"):
        call(torch.ones(2, dtype=torch.complex64).conj())
    assert not checks


class MoreExact(GraphPass):
    """Sums in fp32, where the graph sums in bf16 one by one."""

    name, numerics = "sum_in_fp32", Numerics.CLOSE

    def run(self, graph, context):
        *_, output = graph.graph.nodes
        (x,) = graph.graph.find_nodes(op="placeholder")
        with graph.graph.inserting_before(output):
            wide = graph.graph.call_method("float", (x,))
            total = graph.graph.call_method("bfloat16", (graph.graph.call_method("sum", (wide, 1)),))
        total.meta["example_value"] = output.args[0][0].meta["example_value"]
        output.args = ((total,),)
        graph.graph.eliminate_dead_code()
        graph.recompile()
        return PassResult(changed=True)


@pytest.mark.slow
def test_a_more_exact_rewrite_is_not_called_wrong(checks):
    def fn(x):
        total = x[:, 0]
        for column in range(1, x.shape[1]):
            total = total + x[:, column]
        return total

    x = torch.randn(64, 200, generator=torch.Generator().manual_seed(1)).bfloat16()
    compiled(fn, extra_passes=[MoreExact])(x)
    assert checks == [Numerics.CLOSE]


# -- what is wrong is named


def failure(fn, *passes, **options):
    torch._dynamo.reset()
    with pytest.raises(GlueVerifyError) as error:
        compiled(fn, extra_passes=list(passes), **options)(*inputs())
    return str(error.value)


def replayed(folder):
    return subprocess.run(
        [sys.executable, folder / "replay.py"], capture_output=True, text=True, timeout=120, cwd=folder
    )


def test_a_wrong_rewrite_of_the_captured_graph(tmp_path):
    message = failure(model, RenameFunctions, dump=str(tmp_path))
    assert "graph 0: output 0 differs by up to" in message
    assert "Passes that changed the graph: rename_functions" in message
    folder = tmp_path / "graph_000" / "verify"
    assert f"glue replay {folder}" in message
    result = replayed(folder)
    assert result.returncode == 1, result.stderr
    assert "output 0: differs" in result.stdout
    assert "gradient of input 0: differs" in result.stdout


def test_a_wrong_rewrite_of_the_backward_graph(tmp_path):
    message = failure(cosine, DropNegations, dump=str(tmp_path))
    assert re.search(r"graph 0: gradient of input L_(x|weight)_ differs", message)
    folder = tmp_path / "graph_000" / "verify" / "partitioned"
    result = replayed(folder)
    assert result.returncode == 1, result.stderr
    assert "output 1: differs" in result.stdout


class DropNegationsLoosely(DropNegations):
    name, numerics = "drop_negations_loosely", Numerics.CLOSE


def test_a_wrong_gradient_is_no_rounding():
    """The fp64 reference gets the same random directions as the graphs that it judges."""
    assert "against fp64 is" in failure(cosine, DropNegationsLoosely)


def test_without_a_dump_the_files_go_to_a_temporary_folder():
    message = failure(model, RenameFunctions)
    folder = Path(re.search(r"glue replay (\S+)\.", message)[1])
    assert (folder / "inputs.pt").exists()
    assert replayed(folder).returncode == 1


def test_right_rewrites_of_the_same_passes_pass(checks):
    compiled(lambda x, w: (x @ w).tanh().tanh(), extra_passes=[RenameFunctions])(*inputs()).sum().backward()
    compiled(lambda x, w: x * w, extra_passes=[DropNegations])(*inputs()).sum().backward()
    assert len(checks) == 2


def test_a_wrong_output_of_a_call_without_gradients():
    with torch.no_grad():
        assert "output 0" in failure(model, RenameFunctions)


class ForgetWrites(GraphPass):
    """Wrong: writes to a copy of an input in place of the input."""

    name, numerics = "forget_writes", Numerics.BITWISE

    def run(self, graph, context):
        for node in find(graph, "add_"):
            node.target = "add"
        graph.recompile()
        return PassResult(changed=True)


def test_an_input_that_is_left_as_it_was():
    assert "input L_x_ after the call" in failure(lambda x, w: x.detach().add_(1) * 0, ForgetWrites)


@pytest.mark.slow
def test_under_inductor():
    x, weight = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    right = compiled(lambda x, w: torch.nn.functional.dropout((x @ w).softmax(-1), 0.5), compiler="inductor")
    right(x, weight).sum().backward()
    assert "output 0 differs" in failure(model, RenameFunctions, compiler="inductor")
    assert "gradient" in failure(cosine, DropNegations, compiler="inductor")


# -- off


def test_off_it_is_not_in_a_call(monkeypatch):
    """What the backend returns is what the hand-off returned, and no Python function of glue's runs in a call."""
    from glue_compiler.backend import GlueBackend

    handed = []

    def keep(gm, *_):
        handed.append(gm.forward)
        return gm.forward

    returned = []

    class Look(GlueBackend):
        def __call__(self, *args, **kwargs):
            returned.append(super().__call__(*args, **kwargs))
            return returned[-1]

    for verify in (False, True):
        torch._dynamo.reset()
        call = torch.compile(lambda x: x.sin(), backend=Look(keep), options={"verify": verify})
        call(torch.ones(3))
    assert returned[0] == handed[0]
    assert returned[1] != handed[1]


def test_a_mismatch_names_its_graph_without_a_dump_and_where_nothing_can_be_written(tmp_path, monkeypatch):
    call = compiled(model, extra_passes=[RenameFunctions])
    torch.compile(cosine, backend="glue", options={"compiler": "aot_eager"})(*inputs())  # a graph before it
    numbers = []
    for folder in (tmp_path, tmp_path / "missing"):
        torch.compiler.reset()
        monkeypatch.setattr("tempfile.tempdir", str(folder))
        with pytest.raises(GlueVerifyError, match=r"graph \d+: ") as caught:
            call(*inputs())
        numbers.append(int(re.search(r"graph (\d+)", str(caught.value))[1]))
        assert ("could not be written" in str(caught.value)) == (folder.name == "missing")
    assert numbers[1] == numbers[0] + 1 > 1
