"""A torch whose private parts have moved: the feature that needs them is off, with one warning, and models train."""

import warnings

import pytest
import torch
import torch.nn.functional as F

import glue_compiler
from glue_compiler.compat import (
    bisector,
    branch_guards,
    dynamo,
    dynamo_tracing,
    features,
    inductor,
    layer_calls,
    python_checkpoints,
    tracing,
)
from glue_compiler.compat.parts import ANY, Feature, Uses
from glue_compiler.errors import GlueWarning
from glue_compiler.handoff import hand_off
from glue_compiler.options import parse_options
from tests.slow import one_in

USED = (
    features.REWRITES,
    *features.PASSES.values(),
    branch_guards.BRANCHES,
    bisector.BISECTOR,
    dynamo_tracing.TRACING,
    tracing.OBSERVER,
    tracing.TRACE,
)
TOOLS = (
    features.OFFLOAD_CONTEXT,
    features.LOOKS,
    inductor.OPTIONS,
    inductor.HAND_OFF,
    layer_calls.REGIONS,
    python_checkpoints.CHECKPOINTS,
)
ALL = (*USED, *TOOLS, dynamo.FRAMES)
RENAMED = [(feature, path) for feature in ALL for path in feature.parts]


class Routed(torch.nn.Module):
    """A loop over hit experts, a branch on an integer input, and bookkeeping of a packed batch."""

    def __init__(self):
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, selected, positions):
        mask = F.one_hot(selected, num_classes=3).permute(2, 1, 0)
        out = torch.zeros_like(x)
        for expert in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            _, token = torch.where(mask[expert[0]])
            out.index_add_(0, token, self.experts[expert](x[token]))
        if (positions.diff() != 1).any():
            starts = torch.nonzero(positions == 0).flatten()
            out = out * starts.diff().sum()
        return out


def batch():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 4, generator=generator)
    return x, torch.tensor([[0], [0], [2], [0], [2], [2]]), torch.tensor([0, 1, 2, 0, 1, 2])


def gradients(model, call):
    model.zero_grad()
    (call(*batch()) * torch.arange(4.0)).sum().backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.fixture
def asked_again(monkeypatch):
    """What was found before, and is found in a test, does not outlive it."""
    for feature in ALL:
        monkeypatch.setattr(feature, "_is_available", None)


def names(warned):
    return [str(each.message) for each in warned if issubclass(each.category, GlueWarning)]


def test_this_torch_has_all_parts(asked_again):
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert all(feature.is_available() for feature in ALL)
    assert names(warned) == []


@pytest.mark.parametrize(("feature", "path"), RENAMED, ids=lambda value: str(getattr(value, "name", value)))
def test_a_part_that_was_renamed_turns_its_feature_off(feature, path, asked_again, monkeypatch):
    """Each part, under a name that this torch does not have."""
    rename(feature, path, monkeypatch)
    with pytest.warns(GlueWarning, match=feature.name) as warned:
        assert not feature.is_available()
    assert path in names(warned)[0]  # the first import of a part may warn of its own


def rename(feature, path, monkeypatch):
    moved = {f"{each}_moved" if each == path else each: uses for each, uses in feature.parts.items()}
    monkeypatch.setattr(feature, "parts", moved)


@pytest.mark.parametrize("feature", one_in(4, USED), ids=lambda feature: feature.name)
def test_models_train_without_a_feature(feature, asked_again, monkeypatch):
    path = next(iter(feature.parts))
    rename(feature, path, monkeypatch)
    torch.manual_seed(0)
    model = Routed()
    expected = gradients(model, model)
    before = torch._dynamo.symbolic_convert.InstructionTranslatorBase.step
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        compiled = torch.compile(model, backend="glue", options={"compiler": "aot_eager"})
        actual = gradients(model, compiled)
        gradients(model, compiled)
    for want, got in zip(expected, actual, strict=True):
        # A loop over all experts gives those without rows zeros.
        torch.testing.assert_close(got, want if want is not None or got is None else torch.zeros_like(got))
    (message,) = names(warned)
    assert path in message
    assert feature.name in message
    assert torch._dynamo.symbolic_convert.InstructionTranslatorBase.step is before


@pytest.fixture
def without(asked_again, monkeypatch):
    return lambda feature: rename(feature, next(iter(feature.parts)), monkeypatch)


def test_checkpoints_stay_on_the_device_without_what_tells_who_saves(without):
    without(features.OFFLOAD_CONTEXT)
    x = torch.ones(3, requires_grad=True)
    with pytest.warns(GlueWarning, match="offload_checkpoints is off"), glue_compiler.offload_checkpoints():
        out = torch.utils.checkpoint.checkpoint(lambda x: x.sin().cos(), x.exp(), use_reentrant=False)
    out.sum().backward()
    assert x.grad is not None


def test_a_look_at_a_model_counts_as_a_compile_without_the_way_to_forget_it(without):
    without(features.LOOKS)
    with pytest.warns(GlueWarning, match="forget a compile is off"):
        explained = glue_compiler.explain(torch.nn.Linear(2, 2), torch.ones(1, 2))
    assert len(explained.graphs) == 1


def test_options_go_to_inductor_unchecked_without_its_list_of_them(without):
    without(inductor.OPTIONS)
    with pytest.warns(GlueWarning, match="Inductor's options is off"):
        options = parse_options({"an_option": 3}, "max-autotune", [], environment={})
    assert options.inductor == {"an_option": 3}


def test_the_graph_goes_where_torch_sends_one_without_the_way_to_inductor(without, monkeypatch):
    without(inductor.HAND_OFF)
    asked = []
    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: lambda gm, inputs: asked.append(name) or gm)
    gm = torch.fx.symbolic_trace(torch.nn.ReLU())
    with pytest.warns(GlueWarning, match="way to Inductor"):
        assert hand_off.hand_off(gm, [torch.ones(1)], parse_options({}, None, [], environment={}), None) is gm
    assert asked == ["inductor"]


@pytest.mark.parametrize("path", dynamo.FRAMES.parts)
def test_no_hook_is_installed_without_its_parts(path, asked_again, monkeypatch):
    monkeypatch.setattr(dynamo.FRAMES, "parts", {f"{path}_moved": ANY})
    convert = torch._dynamo.convert_frame.ConvertFrameAssert
    monkeypatch.delattr(convert.__call__, "glue_hook")
    before = convert.__call__
    with pytest.warns(GlueWarning, match="capture of data-dependent values is off"):
        dynamo.install_frame_hook(lambda backend: True, lambda *_: pytest.fail("hooked"))
    assert convert.__call__ is before


class Moved:
    def step(self, first):
        def inner():
            return self.other, "a key"

        return inner, self.other

    kind = 3
    kinds = ("first", "second")


@pytest.mark.parametrize(
    ("part", "uses", "says"),
    [
        ("Moved.stop", ANY, "is it 'step' now"),
        ("Moved.step", Uses(("self", "second")), r"takes \(self, first\)"),
        ("Moved.step", Uses(names=("third",)), "does not use 'third'"),
        ("Moved.kind", Uses(("self",)), "has no signature"),
        ("Moved.step", Uses(texts=("another key",)), "does not use 'another key'"),
        ("Moved.kinds", Uses(texts=("third",)), "does not use 'third'"),
        ("Moved.step", Uses(texts=("a key",)), None),
        ("Moved.kinds", Uses(texts=("second",)), None),
        ("Moved().missing", ANY, "is gone"),
        ("Moved.step", Uses(("self", "first"), ("other",)), None),
        ("Moved().kind", ANY, None),
    ],
)
def test_what_is_said_of_a_part(part, uses, says):
    feature = Feature("test", {f"{__name__}:{part}": uses})
    if says is None:
        assert feature.is_available()
        return
    with pytest.warns(GlueWarning, match=says):
        assert not feature.is_available()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not feature.is_available()


def test_hooks_are_installed_all_or_none(monkeypatch):
    """Something that is found out late: nothing of it stays."""
    step = torch._dynamo.symbolic_convert.InstructionTranslatorBase.step
    monkeypatch.setattr(dynamo_tracing, "_create", lambda original: 1 / 0)
    with pytest.raises(ZeroDivisionError), dynamo_tracing.traced(dynamo_tracing.TracingObserver()):
        pass
    assert torch._dynamo.symbolic_convert.InstructionTranslatorBase.step is step
    monkeypatch.undo()
    with dynamo_tracing.traced(dynamo_tracing.TracingObserver()):
        assert torch._dynamo.symbolic_convert.InstructionTranslatorBase.step is not step
    assert torch._dynamo.symbolic_convert.InstructionTranslatorBase.step is step
