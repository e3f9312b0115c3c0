"""A graph that returns a mask, and one that attends with it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from glue_compiler.backend import GlueBackend
from glue_compiler.report.session import Session

LENGTHS = (5, 1, 6)


def positions(lengths=LENGTHS, rows=1):
    return torch.cat([torch.arange(length) for length in lengths]).expand(rows, -1).clone()


def documents(positions):
    return (positions.diff(dim=1, prepend=positions[:, :1] - 1) != 1).cumsum(1)


def distances(positions):
    token = torch.arange(positions.shape[1])
    return token[:, None] - token


def same_document(positions):
    ids = documents(positions)
    return (ids[:, :, None] == ids[:, None])[:, None]


def packed(positions):
    return same_document(positions) & (distances(positions) >= 0)


def causal(positions):
    return (distances(positions) >= 0)[None, None]


def packed_window(positions):
    return packed(positions) & (distances(positions) < 3)


def bidirectional_window(positions):
    return same_document(positions) & (distances(positions).abs() < 3)


def attention(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, mask)


def operands(length=12, rows=1, heads=2, key_heads=None):
    torch.manual_seed(length)
    shapes = [(rows, number, length, 16) for number in (heads, key_heads or heads, key_heads or heads)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


class Between:
    """``make`` and ``attend`` compiled apart; ``change`` is eager, on the mask between them."""

    def __init__(self, make=packed, attend=attention, **options):
        self.functions, self.session = (make, attend), Session()
        backend = GlueBackend(session=self.session)
        options = {"compiler": "aot_eager", "passes": {"memoize_metadata": True}, **options}
        self.compiled = [torch.compile(f, backend=backend, options=options) for f in self.functions]

    def run(self, given=None, tensors=None, change=lambda mask: mask, calls=1):
        """Results and gradients are eager's; what the graphs that were compiled for this made of attentions."""
        given = positions() if given is None else given
        tensors = operands(given.shape[1]) if tensors is None else tensors
        before = len(self.session.graphs)
        found = [self._step(functions, given, tensors, change, calls) for functions in (self.functions, self.compiled)]
        for want, got in zip(*found, strict=True):
            assert (want is None) == (got is None)
            if want is not None:
                torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
        reports = [p for graph in self.session.graphs[before:] for p in graph.passes]
        assert not any(p.error for p in reports)
        forms = [dict(p.counts) for p in reports if p.name == "specialize_attention" and p.changed]
        return [next(iter(form)) for form in forms]

    def _step(self, functions, given, tensors, change, calls):
        make, attend = functions
        mask = change(make(given))
        out = [attend(*tensors, mask) for _ in range(calls)][-1]
        if not out.requires_grad:
            return [out]
        for tensor in tensors:
            tensor.grad = None
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        return [out, *(None if tensor.grad is None else tensor.grad.clone() for tensor in tensors)]

    def reports(self, name="specialize_attention"):
        return [p for graph in self.session.graphs for p in graph.passes if p.name == name]
