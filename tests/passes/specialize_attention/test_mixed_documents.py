"""What mixes a packed batch's documents beside attention that keeps them apart is named in a warning, once."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from glue_compiler.backend import GlueBackend
from glue_compiler.errors import GlueDocumentsWarning
from glue_compiler.report.session import Session
from tests.captured import compile_with_glue

LENGTH, WIDTH = 12, 8
POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 0, 1]])


class Model(nn.Module):
    """``mixes``: what is computed of ``[1, T, WIDTH]`` beside attention within documents."""

    def __init__(self, mixes, kernel=3):
        super().__init__()
        self.mixes = mixes
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False).double()
        self.conv = nn.Conv1d(WIDTH, WIDTH, kernel, groups=WIDTH, padding=kernel - 1).double()

    def forward(self, x, positions):
        documents = (positions.diff(prepend=positions[:, :1] - 1) != 1).cumsum(1)
        mask = (documents[:, :, None] == documents[:, None, :]) & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        x = x + self.mixes(self, self.inner(x), documents)
        return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], attn_mask=mask[:, None])


def convolution(model, x, documents):
    return model.conv(x.mT)[..., :LENGTH].mT


def convolution_of_padded(model, x, documents):
    return F.conv1d(F.pad(x.mT, (2, 0)), model.conv.weight, groups=WIDTH).mT


def running_sum(model, x, documents):
    return x.cumsum(1)


def running_sum_of_gates(model, x, documents):
    return torch.cumsum(F.logsigmoid(x).mT, -1).mT.exp()


def loop_over_tokens(model, x, documents):
    state, out = torch.zeros_like(x[:, 0]), torch.zeros_like(x)
    for i in range(LENGTH):
        state = state * 0.5 + x[:, i, :]
        out[:, i, :] = state
    return out


def loop_over_chunks(model, x, documents):
    chunks = x.reshape(1, 1, -1, 1, WIDTH).repeat(1, 1, 1, 1, 1)
    state, out = torch.zeros_like(chunks[:, :, 0]), torch.zeros_like(chunks)
    for i in range(LENGTH):
        state = state * 0.5 + chunks[:, :, i]
        out[:, :, i] = state
    return out.reshape(1, LENGTH, WIDTH)


MIXES = {
    convolution: "conv .a convolution over 3 tokens",
    convolution_of_padded: "a convolution over 3 tokens",
    running_sum: "a running sum",
    running_sum_of_gates: "a running sum",
    loop_over_tokens: "a loop of steps",
    loop_over_chunks: "a loop of steps",
}


def convolution_of_one_token(model, x, documents):
    return F.conv1d(x.mT, model.conv.weight[..., :1], groups=WIDTH).mT


def sum_over_features(model, x, documents):
    return x.cumsum(2)


def sum_of_whole_numbers(model, x, documents):
    return (x > 0).long().cumsum(1).double() * 0 + x


def convolution_of_masked(model, x, documents):
    """What does not belong to the document of the last token is hidden, so that documents do not meet."""
    last = documents == documents[:, -1:]
    return model.conv((x * last[..., None]).mT)[..., :LENGTH].mT


def running_sum_from_borders(model, x, documents):
    starts = documents.diff(prepend=documents[:, :1] - 1) != 0
    return F.logsigmoid(x).masked_fill(starts[..., None], -1e4).cumsum(1).exp()


def convolution_over_features(model, x, documents):
    return F.conv1d(x, torch.ones(LENGTH, LENGTH, 3, dtype=x.dtype), padding=1)


KEEPS_APART = [
    convolution_of_one_token,
    sum_over_features,
    sum_of_whole_numbers,
    convolution_of_masked,
    running_sum_from_borders,
    convolution_over_features,
]


def run(mixes, **options):
    """The texts of the warnings."""
    model = Model(mixes)
    passes = {"specialize_attention": True, "roll_loops": True}
    compiled = compile_with_glue(model, passes=passes, eager=True, **options)
    x = torch.randn(1, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled.call(x, POSITIONS)
    passed = next(p for p in compiled.report.passes if p.name == "specialize_attention")
    assert passed.counts["packed"] == 1
    return [str(each.message) for each in caught if issubclass(each.category, GlueDocumentsWarning)]


@pytest.mark.parametrize("mixes", MIXES, ids=lambda fn: fn.__name__)
def test_it_is_named(mixes):
    (text,) = run(mixes)

    assert re.search(MIXES[mixes], text)


@pytest.mark.parametrize("mixes", KEEPS_APART, ids=lambda fn: fn.__name__)
def test_what_keeps_documents_apart_is_not(mixes):
    assert run(mixes) == []


def test_the_option_is_silent():
    assert run(convolution, mixed_documents="ignore") == []


class AnyLength(Model):
    def forward(self, x, positions):
        documents = (positions.diff(prepend=positions[:, :1] - 1) != 1).cumsum(1)
        mask = (documents[:, :, None] == documents[:, None, :]) & torch.ones(x.shape[1], x.shape[1]).bool().tril()
        x = x + self.inner(x).cumsum(1)
        return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], attn_mask=mask[:, None])


def test_lengths_that_vary():
    run = compile_with_glue(AnyLength(None), passes={"specialize_attention": True}, dynamic=True)
    with pytest.warns(GlueDocumentsWarning, match="a running sum"):
        run.call(torch.randn(1, LENGTH, WIDTH).double(), POSITIONS)


class Recurrent(nn.Module):
    """A layer without attention; ``borders``: what it is given of the documents."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = (nn.Linear(WIDTH, WIDTH).double() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH).double()

    def forward(self, x, mask, borders):
        gate = F.logsigmoid(self.inner(self.norm(x)))
        gate = gate if borders is None else gate.masked_fill(borders[..., None], -1e4)
        return x + self.outer(gate.cumsum(1).exp()) * torch.sigmoid(x)


class Attention(Recurrent):
    def forward(self, x, mask, borders):
        q, k = self.inner(self.norm(x))[:, None], self.outer(x)[:, None]
        return x + F.scaled_dot_product_attention(q, k, k, attn_mask=mask).flatten(0, 1) * torch.sigmoid(x)


class InRegions(nn.Module):
    def __init__(self, knows_borders=False, has_documents=True):
        super().__init__()
        self.layers = nn.ModuleList(kind() for kind in [Recurrent, Attention] * 4)
        self.knows_borders, self.has_documents = knows_borders, has_documents

    def forward(self, x, positions):
        documents = (positions.diff(prepend=positions[:, :1] - 1) != 1).cumsum(1)
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[None]
        if self.has_documents:
            mask = mask & (documents[:, :, None] == documents[:, None, :])
        borders = (positions == 0) if self.knows_borders else None
        for layer in self.layers:
            x = layer(x, mask[:, None] if isinstance(layer, Attention) else None, borders)
        return x


def warned_of_regions(**how):
    torch._dynamo.reset()
    session = Session()
    model = InRegions(**how)
    call = torch.compile(model, backend=GlueBackend(session=session), options={"compiler": "aot_eager"})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(torch.randn(1, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True), POSITIONS)
    assert {graph.region for graph in session.graphs} >= {"Recurrent x4", "Attention x4"}
    return [str(each.message) for each in caught if issubclass(each.category, GlueDocumentsWarning)]


def test_layers_without_attention_beside_others_that_have_it():
    (text,) = warned_of_regions()
    assert "a running sum" in text


@pytest.mark.parametrize("how", [{"knows_borders": True}, {"has_documents": False}], ids=str)
def test_layers_that_are_given_the_borders_or_meet_no_documents(how):
    assert warned_of_regions(**how) == []
