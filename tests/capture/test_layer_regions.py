"""Regions: layers that are alike are compiled once, whatever loop calls them; what is no layer stays in its graph."""

import copy
from functools import partial
from types import FunctionType

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import glue_compiler
from glue_compiler.backend import GlueBackend
from glue_compiler.compat import layer_calls
from glue_compiler.compat.parts import ANY
from glue_compiler.compat.versions import torch_version
from glue_compiler.errors import GlueWarning
from glue_compiler.report.session import Session


class Layer(nn.Module):
    """Twelve operators and more."""

    def __init__(self, index=0, width=16):
        super().__init__()
        self.index, self.width = index, width
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x, mask=None, cache=None):
        h = self.norm(x)
        q, k, v = (p(h).unflatten(-1, (2, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        if cache is not None:
            k, v = cache.update(k, v, self.index)
        x = x + self.o(nn.functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm(x))


class Checkpointed(Layer):
    def __call__(self, *args, **kwargs):
        call = partial(super().__call__, **kwargs)
        return checkpoint(call, *args, use_reentrant=False) if self.training else call(*args)


class Decoder(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(16)

    def forward(self, ids, **kwargs):
        x = self.embedding(ids)
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=x.device).tril()
        for layer in self.layers:
            x = layer(x, mask=mask, **kwargs)
        return self.norm(x)


class WithHead(nn.Module):
    def __init__(self, layers, decoder=Decoder):
        super().__init__()
        self.decoder = decoder(layers)
        self.head = nn.Linear(16, 50, bias=False)

    def forward(self, ids, **kwargs):
        logits = self.head(self.decoder(ids, **kwargs))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def layers(count, kind=Layer):
    return [kind(i) for i in range(count)]


def ids(length=12, batch=2):
    return torch.randint(0, 50, (batch, length), generator=torch.Generator().manual_seed(length))


class Run:
    """A model in regions beside a copy that stays eager."""

    def __init__(self, model, options=(), **how):
        torch.manual_seed(0)
        self.model, self.session = model.double(), Session()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
        self.eager = copy.deepcopy(model)
        options = {"compiler": "aot_eager", **dict(options)}
        self.compiled = torch.compile(self.model, backend=GlueBackend(session=self.session), options=options, **how)

    def step(self, *args, **kwargs):
        """Loss and every gradient are eager's."""
        actual, expected = self._step(self.model, self.compiled, *args, **kwargs), None
        expected = self._step(self.eager, self.eager, *args, **kwargs)
        assert actual.keys() == expected.keys()
        for name, want in expected.items():
            assert (actual[name] is None) == (want is None), name
            if want is not None:
                torch.testing.assert_close(actual[name], want, rtol=1e-10, atol=1e-12, msg=name)
        return self

    def look(self, *args, **kwargs):
        with torch.no_grad():
            actual, expected = (model.eval()(*args, **kwargs) for model in (self.compiled, self.eager))
        self.compiled.train(), self.eager.train()
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
        return self

    def _step(self, model, call, *args, **kwargs):
        model.zero_grad(set_to_none=True)
        out = call(*args, **kwargs)
        loss = out if out.dim() == 0 else (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum()
        loss.backward()
        gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        return {"": loss.detach(), **gradients}

    @property
    def regions(self):
        return [graph.region for graph in self.session.graphs if graph.region]

    @property
    def reasons(self):
        return [event.reason for event in self.session.capture_events if event.whole]


@pytest.mark.parametrize("kind", [Layer, Checkpointed])
@pytest.mark.parametrize("count", [4, 7])
def test_layers_are_compiled_once_whatever_their_number(kind, count):
    run = Run(WithHead(layers(count, kind))).step(ids())
    assert [graph.region for graph in run.session.graphs] == [None, f"{kind.__name__} x{count}", None, None]


@pytest.mark.slow
def test_whole_is_one_graph_and_so_is_fullgraph():
    assert Run(WithHead(layers(4)), {"regions": "whole"}).step(ids()).regions == []
    assert Run(WithHead(layers(4)), fullgraph=True).step(ids()).regions == []


def test_three_layers_are_part_of_one_graph():
    assert Run(WithHead(layers(3))).step(ids()).regions == []


class Numbered(Decoder):
    """Layers are called with one of ``numbers`` numbers."""

    numbers = 3

    def forward(self, ids):
        states = self.embedding(ids)
        for place, layer in enumerate(self.layers):
            states = layer(states, 0.1 + 0.5 * (place % self.numbers))
        return self.norm(states)


class WithNumber(Checkpointed):
    def forward(self, x, number):
        return super().forward(nn.functional.layer_norm(x, (16,), eps=number)) * number


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_numbers_of_layers_are_their_own(compiler):
    """Inductor takes the first of a number that varies for all of them, in a checkpoint of any length."""
    run = Run(WithHead(layers(4, WithNumber), Numbered), {"compiler": compiler})
    for length in (12, 9, 17):
        run.step(ids(length))
    assert run.regions.count("WithNumber x4") == 2 * 3


class WithNumbers(Numbered):
    numbers = 9


def test_layers_with_a_number_each_are_part_of_one_graph_from_the_second_step_on():
    run = Run(WithHead(layers(6, WithNumber), WithNumbers)).step(ids())
    assert run.regions == ["WithNumber x6"] * 3
    compiled = len(run.session.graphs)
    run.step(ids()).step(ids(9)).step(ids(17))
    assert [graph.region for graph in run.session.graphs[compiled:]] == [None, None]
    assert any("a number of its own" in reason for reason in run.reasons)


def test_other_models_go_on_sharing():
    first = Run(WithHead(layers(6, WithNumber), WithNumbers)).step(ids()).step(ids())
    second = Run(WithHead(layers(5))).step(ids()).step(ids(9))
    assert first.reasons
    assert second.regions == ["Layer x5"] * 2


class Expert(Layer):
    """With weights of its own that the graph meets in its call: inputs lie in front of all that is computed."""

    def __init__(self, index=0):
        super().__init__(index)
        self.more = nn.ParameterList(nn.Parameter(torch.ones(16)) for _ in range(9))

    def forward(self, x, mask=None):
        for weight in self.more:
            x = x * weight
        return super().forward(x, mask)


class Routed(Decoder):
    """Each expert takes the same states, and a share of them that is computed in front of all."""

    def forward(self, ids):
        x = self.embedding(ids)
        shares = torch.softmax(x.mean(-1, keepdim=True) * torch.arange(len(self.layers)), -1)
        result = torch.zeros_like(x)
        for place, layer in enumerate(self.layers):
            result = result + layer(x * shares[..., place, None])
        return self.norm(result)


def test_experts_are_no_layers():
    assert Run(WithHead(layers(5, Expert), Routed)).step(ids()).regions == []


def test_lengths_that_vary_take_at_most_two_compiles_in_training_and_two_in_evaluation():
    run = Run(WithHead(layers(5, Checkpointed)))
    for length in (12, 17, 9, 23, 12):
        run.step(ids(length)).look(ids(length + 1))
    assert run.regions.count("Checkpointed x5") <= 4


@pytest.mark.slow
def test_a_layer_of_another_shape_is_compiled_for_itself():
    first = Layer()
    first.mlp = nn.Sequential(nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 16))
    run = Run(WithHead([first, *layers(4)])).step(ids())
    assert run.regions == ["Layer x4"]


def test_what_comes_behind_a_layer_can_be_a_loop_of_other_layers():
    class Both(Decoder):
        def __init__(self, layers):
            super().__init__(layers)
            self.more = nn.ModuleList(Checkpointed(i) for i in range(4))

        def forward(self, ids):
            x = super().forward(ids)
            for layer in self.more:
                x = layer(x)
            return x

    assert {"Layer x4", "Checkpointed x4"} <= set(Run(WithHead(layers(4), Both)).step(ids()).regions)


class SideBySide(nn.Module):
    """Four experts that take the same input: no chain."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(layers(4))

    def forward(self, x):
        return sum(expert(x) for expert in self.experts)


def test_modules_side_by_side_are_no_layers():
    assert Run(SideBySide()).step(torch.randn(2, 5, 16).double()).regions == []


@pytest.mark.slow
def test_a_layer_is_not_divided_again():
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(*layers(4))

        def forward(self, x, mask=None):
            return self.inner(x)

    assert Run(WithHead([Deep() for _ in range(4)])).step(ids()).regions == ["Deep x4"]


def test_small_modules_are_no_layers():
    steps = [nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(8)]
    assert Run(nn.Sequential(*steps)).step(torch.randn(3, 16).double()).regions == []


def test_layers_in_a_sequential_are_regions():
    assert set(Run(nn.Sequential(*layers(5))).step(torch.randn(2, 5, 16).double()).regions) == {"Layer x5"}


class OneCheckpointAroundAll(Decoder):
    def forward(self, ids):
        return self.norm(checkpoint(lambda x: nn.Sequential(*self.layers)(x), self.embedding(ids), use_reentrant=False))


class CheckpointInTheLoop(Decoder):
    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.norm(x)


@pytest.mark.parametrize("decoder", [OneCheckpointAroundAll, CheckpointInTheLoop])
def test_layers_in_a_checkpoint_from_outside_are_part_of_the_whole_graph(decoder):
    """A checkpoint that Python runs switches Dynamo off for all that it calls."""
    run = Run(WithHead(layers(4), decoder)).step(ids())
    assert run.regions == []
    assert any("body of a checkpoint" in reason for reason in run.reasons)


@pytest.mark.slow
def test_layers_in_wrappers_whose_functions_have_inner_functions():
    """The function's ``self`` is a cell, and an attribute of what is wrapped comes through ``__getattr__``."""
    run = Run(WithHead([checkpoint_wrapper(layer) for layer in layers(5)])).step(ids()).step(ids(20))
    assert run.regions == ["CheckpointWrapper x5"] * 2


class Scaled(Layer):
    def forward(self, x, scale):
        return super().forward(scale[0](x))


def test_layers_may_be_handed_a_module():
    class HandsOver(Decoder):
        def forward(self, ids):
            x = self.embedding(ids)
            for layer in self.layers:
                x = layer(x, scale=[self.norm])
            return x

    assert Run(WithHead(layers(4, Scaled), HandsOver)).step(ids()).regions == ["Scaled x4"]


class Cache:
    def __init__(self):
        self.kept = {}

    def update(self, k, v, index):
        old = self.kept.get(index)
        self.kept[index] = k, v
        return (k, v) if old is None else (old[0] + k, old[1] + v)


@pytest.mark.slow
def test_layers_with_a_cache_are_whole_between_steps_in_regions():
    run = Run(WithHead(layers(4))).step(ids())
    with torch.no_grad():
        actual, expected = (model(ids(), cache=Cache()) for model in (run.compiled, run.eager))
    torch.testing.assert_close(actual, expected)
    assert any("handed a Cache" in reason for reason in run.reasons)
    run.step(ids())
    assert run.regions.count("Layer x4") == 1


@pytest.mark.parametrize("kind", [Layer, Checkpointed])
@pytest.mark.parametrize("inside", [False, True])
def test_hooks_of_one_layer_are_its_own(kind, inside):
    """They are there before anything is compiled, where Dynamo would take those of the first layer for those of all."""
    model = WithHead(layers(4, kind))
    run = Run(model)
    for each in (run.model, run.eager):
        hooked = each.decoder.layers[2]
        (hooked.q if inside else hooked).register_forward_hook(lambda module, given, made: made * 2)
    run.step(ids()).step(ids())
    assert run.regions


@pytest.mark.slow
def test_offload_of_all_layers_keeps_the_graph_whole():
    run = Run(WithHead(layers(4, Checkpointed)), {"offload": "checkpoints"}).step(ids())
    assert run.regions == []


def test_frozen_layers_layer_drop_and_early_exit():
    class Drops(Decoder):
        def forward(self, ids, keep=(True, True, True, True)):
            x = self.embedding(ids)
            for layer, is_kept in zip(self.layers, keep, strict=True):
                if is_kept:
                    x = layer(x)
            return self.norm(x)

    run = Run(WithHead(layers(4), Drops)).step(ids())
    for model in (run.model, run.eager):
        model.decoder.layers[1].requires_grad_(False)
    run.step(ids())
    for kept in ({0, 3}, {2}, set()):
        run.step(ids(), keep=tuple(i in kept for i in range(4)))
    # With gradients of weights and without; of torch 2.11 one serves both.
    assert run.regions.count("Layer x4") == (1 if torch_version() == (2, 11) else 2)


def test_a_loop_that_may_return_in_its_middle():
    class Exits(Decoder):
        def forward(self, ids, last=9):
            x = self.embedding(ids)
            for i, layer in enumerate(self.layers):
                x = layer(x)
                if i == last:
                    return x
            return self.norm(x)

    run = Run(WithHead(layers(5), Exits)).step(ids()).step(ids(), last=1)
    assert run.regions == ["Layer x5"]


class Alone(nn.Module):
    """Nothing comes before the loop."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(layers(5))

    def forward(self, x, cache=None):
        for layer in self.layers:
            x = layer(x, cache=cache)
            if x.shape[0] == 7:
                return x
        return x


def test_a_loop_with_nothing_before_it_and_calls_that_have_parts_of_their_own():
    x = torch.randn(2, 5, 16).double().requires_grad_()
    run = Run(Alone()).step(x)
    assert run.regions == ["Layer x5"]
    with torch.no_grad():  # Dynamo leaves the loop to Python for good
        for _ in range(3):
            torch.testing.assert_close(run.compiled(x, cache=Cache()), run.eager(x, cache=Cache()))
    assert [e.reason for e in run.session.capture_events if "handed a Cache" in e.reason] == [
        "layers are handed a Cache, of which each may have a part of its own"
    ]
    assert run.step(x).regions == ["Layer x5"]


def test_hooks_and_layers_that_are_called_twice():
    run = Run(WithHead(layers(4))).step(ids())
    seen = {"model": [], "eager": []}
    for name in seen:
        layer = getattr(run, name).decoder.layers[2]
        layer.register_forward_hook(lambda module, args, out, name=name: seen[name].append(out.detach()) or out * 2)
    run.step(ids())
    assert [len(found) for found in seen.values()] == [1, 1]
    torch.testing.assert_close(*(found[0] for found in seen.values()))
    for model in (run.model, run.eager):
        model.decoder.layers.append(model.decoder.layers[0])
        model.decoder.layers[3] = copy.deepcopy(model.decoder.layers[1])
    run.step(ids())
    assert sum(graph.region == "Layer x4" and graph.nodes_before > 5 for graph in run.session.graphs) == 1


def test_an_exception_in_the_middle_and_a_step_after_it():
    run = Run(WithHead(layers(4))).step(ids())

    def fail(module, args):
        raise ValueError("in the middle")

    handle = run.model.decoder.layers[2].register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="in the middle"):
        run.compiled(ids())
    handle.remove()
    assert run.step(ids()).regions.count("Layer x4") == 1


def with_code_of_its_own(cls):
    forward = cls.forward
    code = forward.__code__.replace(co_firstlineno=forward.__code__.co_firstlineno)
    return type(cls.__name__, (cls,), {"forward": FunctionType(code, forward.__globals__, "forward")})


@pytest.mark.slow
def test_models_share_the_code_of_a_layer_and_not_its_recompile_limit():
    with torch._dynamo.config.patch(recompile_limit=2):
        for width in (1, 2, 3, 4):
            decoder = layers(4)
            for layer in decoder:
                layer.mlp = nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, 16))
            model = with_code_of_its_own(WithHead)(decoder, with_code_of_its_own(Decoder))
            assert Run(model).step(ids()).regions == ["Layer x4"]


def test_graphs_are_whole_where_dynamo_has_changed(monkeypatch):
    monkeypatch.setattr(layer_calls.REGIONS, "_is_available", None)
    monkeypatch.setattr(layer_calls.REGIONS, "parts", {"torch._dynamo:moved": ANY})
    with pytest.warns(GlueWarning, match="compile of each kind of layer once is off"):
        assert Run(WithHead(layers(4))).step(ids()).regions == []


def test_explain_and_the_summary_name_regions():
    explanation = glue_compiler.explain(WithHead(layers(4)), ids(), options={"regions": "auto"})
    assert "graph 1 (Layer x4)" in str(explanation)
    assert [graph.as_json()["region"] for graph in explanation.graphs] == [None, "Layer x4", None, None]
    explanation = glue_compiler.explain(WithHead(layers(4), CheckpointInTheLoop), ids(), options={"regions": "auto"})
    assert "a frame was captured with its layers: layers are called in the body of a checkpoint" in str(explanation)
