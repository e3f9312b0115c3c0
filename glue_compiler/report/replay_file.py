"""Two graphs in one Python file that runs both and compares them: what a wrong rewrite comes down to."""

from __future__ import annotations

import textwrap

from glue_compiler.pipeline.results import Numerics
from glue_compiler.report.dump_template import HELPERS

INPUTS_FILE = "inputs.pt"
_QUOTES = '"""'

_FILE = '''"""{title}

Runs alone: `python {{this file}}` calls both graphs, forward and backward, on the inputs in {inputs_file} beside it, or
on random inputs of the recorded shapes. It exits with 1 if their results differ.
"""

import contextlib
import sys
from pathlib import Path

import torch

NUMERICS = "{numerics}"
RAISES = "the graph after raises"
# What "close" allows, relative to the norm of a result.
ALLOWED = {{torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}}

{helpers}
def before():
{before}
    return make_graph()


def after():
{after}
    return make_graph()


{make_inputs}


def inputs():
    saved = Path(__file__).parent / "{inputs_file}"
    if saved.exists():
        return torch.load(saved, map_location=None if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    return make_inputs()


def run(graph, given):
    """Outputs, inputs after the call, and gradients for random directions, by name."""
    torch.manual_seed(0)
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) if torch.is_tensor(x) else x for x in given]
    # An operator that works in place takes no leaf.
    arguments = [x.clone() if torch.is_tensor(x) and x.requires_grad else x for x in leaves]
    with inside(make_modes()):
        outputs = graph(*arguments)
    outputs = outputs if isinstance(outputs, (tuple, list)) else [outputs]
    results = {{f"output {{i}}": x for i, x in enumerate(outputs)}}
    results |= {{f"input {{i}} after the call": x for i, x in enumerate(arguments)}}
    ends = [x for x in outputs if torch.is_tensor(x) and x.requires_grad]
    needed = {{i: x for i, x in enumerate(leaves) if torch.is_tensor(x) and x.requires_grad}}
    if ends and needed:
        generator = torch.Generator().manual_seed(0)
        directions = [torch.randn(x.shape, generator=generator).to(x.device, x.dtype) for x in ends]
        gradients = torch.autograd.grad(ends, list(needed.values()), directions, allow_unused=True)
        results |= {{f"gradient of input {{i}}": g for i, g in zip(needed, gradients)}}
    return results


def differs(old, new):
    """How a result differs, or None."""
    if not torch.is_tensor(old) or not torch.is_tensor(new):
        equal = torch.is_tensor(old) == torch.is_tensor(new) and (old == new or old != old)
        return None if equal else f"{{old}} before, {{new}} after"
    if old.shape != new.shape or old.dtype != new.dtype:
        return f"{{old.dtype}}{{list(old.shape)}} before, {{new.dtype}}{{list(new.shape)}} after"
    old, new = old.detach(), new.detach()
    if torch.allclose(old, new, rtol=0, atol=0, equal_nan=True):
        return None
    error = (new.double() - old.double()).abs().max().item()
    allowed = ALLOWED.get(old.dtype, 0.0) if NUMERICS == "close" else 0.0
    if (new.double() - old.double()).norm() <= allowed * old.double().norm():
        return None
    return f"differs by up to {{error:.3g}}, where values are up to {{old.double().abs().max().item():.3g}}"


def compare():
    """The results that differ, by name, and how."""
    given = inputs()
    old = run(before(), given)
    try:
        new = run(after(), given)
    except Exception as error:
        return {{RAISES: f"{{type(error).__name__}}: {{error}}"}}
    if old.keys() != new.keys():
        return {{"results": f"{{list(old)}} before, {{list(new)}} after"}}
    found = {{name: differs(old[name], new[name]) for name in old}}
    return {{name: how for name, how in found.items() if how}}


if __name__ == "__main__":
    wrong = compare()
    for name, how in wrong.items():
        print(f"{{name}}: {{how}}")
    print("before and after differ" if wrong else "before and after agree")
    sys.exit(bool(wrong))
'''


def compose_replay(before: str, after: str, numerics: Numerics, title: str) -> str:
    """One file from two that ``report/dump.py`` wrote; inputs and modes are those of ``before``."""
    make_inputs = before[before.index("def make_inputs") : before.index("if __name__")].rstrip()
    return _FILE.format(
        title=title,
        inputs_file=INPUTS_FILE,
        numerics=numerics.value,
        helpers=HELPERS.lstrip("\n"),
        before=_inside_a_function(before),
        after=_inside_a_function(after),
        make_inputs=make_inputs,
    )


def _inside_a_function(text: str) -> str:
    """The imports and classes of a dumped file, indented."""
    without_title = text.split(_QUOTES, 2)[2]
    graphs = without_title[: without_title.index("def make_inputs")].replace(HELPERS, "\n").strip()
    return textwrap.indent(graphs, "    ")
