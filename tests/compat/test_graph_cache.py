"""Which graphs come from AOTAutograd's cache in a later process that torch would trace again."""

import itertools

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import glue_compiler  # noqa: F401
from glue_compiler.compat.graph_cache import cacheable_patch
from glue_compiler.fx.bodies import graph_modules
from glue_compiler.testing import capture

FUNCTION = "torch.ops.higher_order.autograd_function_apply"
SWITCHES = {"torch.amp.autocast_mode._enter_autocast", "torch.amp.autocast_mode._exit_autocast"}
scale = [2.0]


@torch._dynamo.allow_in_graph
def opaque(x):
    """Does what no key tells."""
    return x * scale[0]


def function(forward, backward):
    class Made(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return forward(x)

        @staticmethod
        def backward(ctx, grad):
            return backward(grad)

    return Made


def marked(f):
    (graph,) = capture(f, torch.randn(4, 4, requires_grad=True))
    (found,) = cacheable_patch(list(graph_modules(graph)), {}).values() or [{}]
    return set(found)


def double(x: Tensor) -> Tensor:
    return x * 2


def under_autocast(x):
    with torch.autocast("cpu", torch.bfloat16):
        return x @ x


Doubled = function(double, double)
HalfOpaque = function(opaque, double)


def test_an_autograd_function_is_told_by_its_bodies():
    assert marked(Doubled.apply) == {FUNCTION}
    assert marked(lambda x: checkpoint(Doubled.apply, x, use_reentrant=False)) == {FUNCTION}


@pytest.mark.parametrize("bodies", [(opaque, double), (double, opaque)])
def test_not_where_one_calls_what_no_key_tells(bodies):
    assert marked(function(*bodies).apply) == set()


def test_switches_of_autocast_are_told_by_their_arguments():
    assert marked(under_autocast) == SWITCHES
    assert marked(lambda x: Doubled.apply(under_autocast(x))) == {*SWITCHES, FUNCTION}
    assert marked(lambda x: HalfOpaque.apply(under_autocast(x))) == set()


@torch.library.custom_op("glue_test_graph_cache::scaled", mutates_args=())
def scaled(x: Tensor) -> Tensor:
    return x * scale[0]


scaled.register_fake(torch.empty_like)
Foreign = function(scaled, double)


def test_operators_of_others_do_what_python_has_registered():
    assert marked(Foreign.apply) == set()
    assert marked(lambda x: Doubled.apply(scaled(x))) == set()
    assert marked(lambda x: scaled(under_autocast(x))) == set()


def test_what_nothing_refuses_is_left_to_torch():
    assert marked(double) == marked(scaled) == set()


def test_what_the_user_marks_stays_marked():
    (graph,) = capture(Doubled.apply, torch.randn(4, 4, requires_grad=True))
    (found,) = cacheable_patch(
        list(graph_modules(graph)), {"unsafe_marked_cacheable_functions": {"a.function": "1"}}
    ).values()
    assert set(found) == {"a.function", FUNCTION}
    assert found["a.function"] == "1"


def test_modes_that_operators_look_at_are_in_the_key():
    (graph,) = capture(under_autocast, torch.randn(4, 4, requires_grad=True))
    keys, dtype = [cacheable_patch(list(graph_modules(graph)), {})], torch.get_autocast_dtype("cpu")
    with torch.autocast("cpu", torch.float16):
        keys.append(cacheable_patch(list(graph_modules(graph)), {}))
    try:
        torch.set_autocast_dtype("cpu", torch.float16)
        keys.append(cacheable_patch(list(graph_modules(graph)), {}))
    finally:
        torch.set_autocast_dtype("cpu", dtype)
    torch.set_default_dtype(torch.float64)
    try:
        keys.append(cacheable_patch(list(graph_modules(graph)), {}))
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(keys)
    assert all(a != b for a, b in itertools.combinations(keys, 2))
    assert cacheable_patch(list(graph_modules(graph)), {}) == keys[0]


@pytest.mark.slow
def test_a_second_compile_is_a_hit_and_another_backward_is_none(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def run(backward):
        torch._dynamo.reset()
        counters.clear()
        x = torch.ones(4, 4, requires_grad=True)
        torch.compile(function(double, backward).apply, backend="glue")(x).sum().backward()
        found = counters["aot_autograd"]
        assert not found["autograd_cache_bypass"]
        return found["autograd_cache_hit"], x.grad[0, 0].item()

    assert run(lambda grad: grad * 2) == (0, 2.0)
    assert run(lambda grad: grad * 2) == (1, 2.0)
    assert run(lambda grad: grad * 3) == (0, 3.0)


@pytest.mark.slow
def test_a_model_whose_forward_is_under_autocast(tmp_path, monkeypatch):
    """As accelerate has it; its attention gets casts that glue writes."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 64, "head_dim": 16}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=2, num_key_value_heads=1, use_cache=False))
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    ids = torch.randint(0, 64, (1, 16))
    for expected in ({"autograd_cache_miss": 1, "autograd_cache_saved": 1}, {"autograd_cache_hit": 1}):
        torch._dynamo.reset()
        counters.clear()
        torch.compile(model, backend="glue")(input_ids=ids, labels=ids).loss.backward()
        found = counters["aot_autograd"]
        assert {name: count for name, count in found.items() if name.startswith("autograd_cache")} == expected
