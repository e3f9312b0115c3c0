"""Copies to the host and back that a graph holds already become starts and waits with compute between them."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from glue_compiler.fx.effects import EffectAnalysis
from glue_compiler.fx.training_pair import TrainingPair, check_pair
from glue_compiler.options import GlueOptions
from glue_compiler.passes.overlap_offload import OverlapOffload
from glue_compiler.passes.overlap_offload.copies import find_round_trips, may_copy
from glue_compiler.pipeline.graph_pass import PassContext
from tests import versions
from tests.captured import compile_with_glue
from tests.passes.overlap_offload.models import Blocks, step

aten, glue, prims = torch.ops.aten, torch.ops.glue, torch.ops.prims


def pair_of(forward, backward, num_outputs=1, device="cuda"):
    """Two graphs on a device that need not exist, joined as AOTAutograd joins them.

    ``forward(x, w)`` returns its outputs and then what it saves; ``backward`` takes that and a tangent.
    """
    with FakeTensorMode():
        x, w = torch.empty(4, 8, device=device), torch.empty(8, 8, device=device)
        ahead = make_fx(forward)(x, w)
        returned = ahead.graph.output_node().args[0]
        saved = returned[num_outputs:]
        back = make_fx(backward)(*[node.meta["val"] for node in saved], torch.empty(4, 8, device=device))
    for other in back.graph.nodes:
        if other.name in {node.name for node in saved}:
            other._rename(f"{other.name}_of_backward")
    for node, placeholder in zip(saved, back.graph.find_nodes(op="placeholder"), strict=False):
        placeholder.name = node.name
        placeholder.target = node.name
    return TrainingPair(ahead, back, num_outputs)


def to(tensor, device, **kwargs):
    return aten._to_copy.default(tensor, device=torch.device(device), **kwargs)


def forward(x, w, out=to):
    a = torch.mm(x, w)
    b = torch.mm(a.sin(), w)
    c = torch.mm(b.sin(), w)
    return c.sin(), out(a, "cpu"), out(b, "cpu"), out(c, "cpu"), w


def backward(a, b, c, w, tangent, back=to):
    for host in (c, b, a):
        tangent = torch.mm(tangent * back(host, "cuda").cos(), w.t())
    return (tangent,)


def run_pass(pair, **options):
    context = PassContext(GlueOptions(**options), EffectAnalysis.for_graph(pair.forward))
    return OverlapOffload().run_pair(pair, context)


def targets(gm: fx.GraphModule):
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


def device_put(tensor, device, **kwargs):
    return prims.device_put.default(tensor, torch.device(device))


@pytest.mark.parametrize("copy", [to, device_put])
def test_copies_of_a_whole_step_become_starts_and_waits(copy):
    pair = pair_of(lambda x, w: forward(x, w, copy), lambda *values: backward(*values, back=copy))
    result = run_pass(pair)
    assert result.counts == {"regions": 3, "moved": 3, "bytes": 3 * 4 * 8 * 4}
    check_pair(pair)
    ahead, back = targets(pair.forward), targets(pair.backward)
    for found in (ahead, back):
        assert aten._to_copy.default not in found
        assert prims.device_put.default not in found
    # Each copy starts behind the last use of its tensor, and two products hide those that are not the last.
    assert [t for t in ahead if t in (glue.offload_start.default, glue.offload_wait.default)] == [
        glue.offload_start.default,
        glue.offload_start.default,
        glue.offload_wait.default,
        glue.offload_start.default,
        glue.offload_wait.default,
        glue.offload_wait.default,
    ]
    # c is needed at once; b and a come back while products run.
    starts = [place for place, target in enumerate(back) if target is glue.reload_start.default]
    waits = [place for place, target in enumerate(back) if target is glue.reload_wait.default]
    assert [aten.mm.default in back[start:wait] for start, wait in zip(starts, waits, strict=True)] == [
        False,
        True,
        True,
    ]


def test_torchs_own_operators_of_two_parts_are_taken_apart():
    versions.AO_OPERATORS.skip()
    import torch._functorch._activation_offloading.offload_ops

    ao = torch.ops.ao

    def out(tensor, device):
        return ao.wait_tensor.default(ao.offload.default(tensor), tensor)

    def back(tensor, device):
        return ao.wait_tensor.default(ao.reload.default(tensor, torch.device(device)), tensor)

    pair = pair_of(lambda x, w: forward(x, w, out), lambda *values: backward(*values, back=back))
    assert run_pass(pair).counts["moved"] == 3
    check_pair(pair)
    for found in (targets(pair.forward), targets(pair.backward)):
        assert not any("ao::" in str(getattr(target, "_schema", "")) for target in found)


def find(forward, backward, **kwargs):
    return find_round_trips(pair_of(forward, backward, **kwargs))


def one(x, w):
    a = torch.mm(x, w)
    return torch.mm(a.sin(), w), to(a, "cpu")


def one_back(a, tangent):
    return (tangent * to(a, "cuda"),)


def test_one_round_trip_is_found():
    found, skips = find(one, one_back)
    assert ([trip.source.target for trip in found], skips) == ([aten.mm.default], [])


def test_a_copy_that_comes_back_in_another_dtype_stays():
    assert find(one, lambda a, tangent: (tangent * to(a, "cuda", dtype=torch.float64),)) == ([], [])
    narrowed = lambda x, w: (x, to(torch.mm(x, w), "cpu", dtype=torch.bfloat16))  # noqa: E731
    assert find(narrowed, one_back) == ([], [])
    assert find(narrowed, lambda a, tangent: (tangent * to(a, "cuda", dtype=torch.float32),)) == ([], [])


def test_a_copy_of_what_is_saved_beside_it_stays():
    def both(x, w):
        a = torch.mm(x, w)
        return x.sin(), to(a, "cpu"), a

    assert find(both, lambda host, a, tangent: (to(host, "cuda") * a,)) == ([], [])


def test_a_host_tensor_that_compute_on_the_host_reads_stays():
    assert find(one, lambda a, tangent: (tangent * to(a, "cuda"), a.sin())) == ([], [])


def test_a_host_tensor_that_forward_reads_or_returns_stays():
    def reads(x, w):
        host = to(torch.mm(x, w), "cpu")
        return host.sin(), host

    def returns(x, w):
        host = to(torch.mm(x, w), "cpu")
        return host, host

    for ahead in (reads, returns):
        assert find(ahead, one_back) == ([], [])


def test_a_copy_of_what_the_caller_keeps_stays_with_a_skip():
    def of_input(x, w):
        return torch.mm(x, w), to(x, "cpu")

    def of_output(x, w):
        a = torch.mm(x, w)
        return a, to(a, "cpu")

    for ahead, reason in ((of_input, "which the caller keeps"), (of_output, "returned to the caller")):
        pair = pair_of(ahead, one_back)
        before = targets(pair.forward), targets(pair.backward)
        result = run_pass(pair)
        assert not result.changed
        assert reason in result.skips[0].reason
        assert (targets(pair.forward), targets(pair.backward)) == before


def test_a_copy_of_what_could_not_be_copied_stays_with_a_skip():
    def shared(x, w):
        a = torch.mm(x, w)
        return a.sin(), to(a, "cpu"), a.view(32)

    def with_gaps(x, w):
        return x.sin(), to(aten.slice(torch.mm(x, w), 1, 0, 8, 2), "cpu")

    def behind_an_offset(x, w):
        return x.sin(), to(aten.slice(torch.mm(x, w), 0, 1), "cpu")

    def by_offsets(a, tangent):
        return (torch.as_strided(to(a, "cuda"), (3, 8), (8, 1), 0).sin(),)

    for ahead, back, reason in (
        (shared, lambda a, flat, tangent: (tangent * to(a, "cuda"), flat.sin()), "shares its memory"),
        (with_gaps, lambda a, tangent: (to(a, "cuda").sin(),), "do not lie in the order of its sizes"),
        (behind_an_offset, by_offsets, "by absolute offsets"),
    ):
        result = run_pass(pair_of(ahead, back))
        assert not result.changed
        assert reason in result.skips[0].reason
    # The near misses: an offset that nobody reads by, and offsets from the start of the memory.
    assert run_pass(pair_of(behind_an_offset, lambda a, tangent: (to(a, "cuda").sin(),))).changed
    assert run_pass(pair_of(one, lambda a, tangent: (torch.as_strided(to(a, "cuda"), (4, 8), (8, 1), 0),))).changed


def test_of_two_copies_of_one_memory_one_moves():
    def twice(x, w):
        a = torch.mm(x, w)
        return x.sin(), to(a, "cpu"), to(a.t(), "cpu")

    pair = pair_of(twice, lambda a, b, tangent: (to(a, "cuda").sin(), to(b, "cuda").cos()))
    result = run_pass(pair)
    check_pair(pair)
    assert result.counts["moved"] == 1
    assert "another copy of the same memory" in result.skips[0].reason


@pytest.mark.skipif(torch.cuda.is_available(), reason="beside CUDA, fake tensors want their own device to be there")
def test_devices_without_streams_of_ours_are_left_alone():
    def back(a, tangent):
        return (tangent * to(a, "xpu"),)

    result = run_pass(pair_of(one, back, device="xpu"))
    assert not result.changed
    assert "not for 'xpu'" in result.skips[0].reason


def test_tensors_that_must_move_and_are_needed_together_are_all_there_at_once():
    def ahead(x, w):
        a, b, c = torch.mm(x, w), torch.mm(x.sin(), w), torch.mm(x.cos(), w)
        # All three are read for the last time at one place.
        return torch.cat((a, b, c)), to(a, "cpu"), to(b, "cpu"), to(c, "cpu")

    def together(a, b, c, tangent):
        a, b, c = (to(t, "cuda") for t in (a, b, c))
        first = torch.mm(a, b.t())
        return (torch.mm(first, c) * tangent, torch.mm(first, a), torch.mm(first, b), torch.mm(first, c))

    pair = pair_of(ahead, together)
    assert run_pass(pair).counts["moved"] == 3
    check_pair(pair)


def test_captured_graphs_with_copies_to_the_host_are_told_from_others():
    with FakeTensorMode():
        x = torch.empty(4, device="cuda")
        assert may_copy(make_fx(lambda x: x.sin().cpu())(x))
        assert not may_copy(make_fx(lambda x: x.sin())(x))
        assert not may_copy(make_fx(lambda x: x.sum().cpu())(x))  # a number, for a log
        assert not may_copy(make_fx(lambda x: x.sin())(torch.empty(4)))


@pytest.mark.slow
@pytest.mark.parametrize("separate_stream", [False, True])
def test_what_torch_itself_offloads_is_overlapped(separate_stream):
    if separate_stream:
        versions.AO_OPERATORS.skip()
        if not torch.cuda.is_available():
            pytest.skip("torch's own streams need a device")
    model, x = Blocks(4), torch.randn(4, 8)
    expected = step(compile_with_glue(model).call, model, x)

    def mark(gm, joint_inputs):
        """Marks what regions start from: nothing in torch does."""
        for node in gm.graph.nodes:
            readers = {user.meta.get("ac_graph_id") for user in node.users} - {None, node.meta.get("ac_graph_id")}
            node.meta["should_offload"] = node.op == "call_function" and bool(readers)
        return gm

    torch._dynamo.reset()
    with torch._functorch.config.patch(
        enable_activation_offloading=True,
        activation_offload_separate_stream=separate_stream,
        joint_custom_pass=mark,
    ):
        run = compile_with_glue(model, compiler="inductor", fx_graph_cache=False)
        got = step(run.call, model, x)
    report = run.report.passes[-1]
    assert report.counts["moved"] == 4
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(a, b)
