"""What comes behind the loop over layers, in the same function, is a graph again."""

import dis

import pytest
import torch
from torch import nn

from glue_compiler.capture import bytecode
from tests.capture.test_layer_regions import Checkpointed, Decoder, Layer, Run, ids, layers


class Model(Decoder):
    """Loop, head and loss in one function: Dynamo converts none of what it calls behind the loop by itself."""

    def __init__(self, count=4, kind=Layer):
        super().__init__(layers(count, kind))
        self.more = nn.ModuleList(Checkpointed(i) for i in range(4))
        self.head = nn.Linear(16, 50, bias=False)


class Plain(Model):
    def forward(self, ids, scale=1.0):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x * scale).flatten(0, 1), ids.flatten())


class Arguments(Model):
    def forward(self, ids, *rest, scale=0.5, **named):
        x, states = self.embedding(ids), []
        for i, layer in enumerate(self.layers):
            x = layer(x) * (i + 1)
            states.append(x)
        for more in rest:
            x = x + more
        return nn.functional.cross_entropy(
            self.head(x * scale + sum(states) * named["factor"]).flatten(0, 1), ids.flatten()
        )


class TwoLoops(Model):
    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        x = x.relu()
        for layer in self.more:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class Nested(Model):
    def forward(self, ids):
        x = self.embedding(ids)
        for stage in (self.layers, self.more):
            for layer in stage:
                x = layer(x)
            x = x.relu()
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class Leaves(Model):
    """By a break at the third layer, or by a return."""

    def forward(self, ids, early=None, returns=False):
        x = self.embedding(ids)
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i == early:
                if returns:
                    return x.sum()
                break
        else:
            x = x.relu()
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def losses(run):
    """In how many graphs was a loss found?"""
    return [p.counts.get("losses", 0) for g in run.session.graphs for p in g.passes if p.name == "chunk_loss"].count(1)


@pytest.mark.parametrize("kind", [Layer, Checkpointed])
def test_head_and_loss_behind_the_loop_are_one_graph(kind):
    run = Run(Plain(kind=kind)).step(ids())
    assert [graph.region for graph in run.session.graphs] == [None, f"{kind.__name__} x4", None]
    assert losses(run) == 1


@pytest.mark.slow
def test_lengths_that_vary_compile_it_twice():
    run = Run(Plain())
    for length in (12, 17, 9, 23):
        run.step(ids(length))
    assert losses(run) == 2
    run.look(ids(12)).look(ids(17)).look(ids(9))
    assert losses(run) <= 4


@pytest.mark.slow
def test_numbers_of_the_function_are_guarded():
    run = Run(Plain())
    for scale in (1.0, 2.0, 3.0, 1.0):
        run.step(ids(), scale)


def test_all_kinds_of_arguments_reach_it():
    rest = [torch.randn(2, 12, 16).double() for _ in range(2)]
    run = Run(Arguments()).step(ids(), *rest, factor=2.0).step(ids(), rest[0], factor=2.0, scale=0.25, unused=1)
    assert losses(run) >= 1


def test_a_second_loop_comes_behind_the_first():
    run = Run(TwoLoops()).step(ids())
    assert [graph.region for graph in run.session.graphs] == [None, "Layer x4", None, "Checkpointed x4", None]
    assert losses(run) == 1


def test_loops_in_loops():
    run = Run(Nested()).step(ids())
    assert set(run.regions) == {"Layer x4", "Checkpointed x4"}
    assert losses(run) == 1


@pytest.mark.parametrize("how", [{}, {"early": 2}, {"early": 2, "returns": True}])
def test_ways_out_of_the_loop(how):
    Run(Leaves()).step(ids()).step(ids(), **how).step(ids())


class LastState(Model):
    """Reads what has no value if there are no layers."""

    def forward(self, ids, layers=None):
        x = self.embedding(ids)
        for layer in self.layers[:layers]:
            x = last = layer(x)
        x = self.head(self.norm(last if layers != 0 else x))
        return nn.functional.cross_entropy(x.flatten(0, 1), ids.flatten())


class Deletes(Model):
    def forward(self, ids):
        x = self.embedding(ids)
        unused = x * 2
        for layer in self.layers:
            x = layer(x)
        del unused
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class Closure(Model):
    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        head = lambda: self.head(x)  # noqa: E731
        return nn.functional.cross_entropy(head().flatten(0, 1), ids.flatten())


class Locals(Model):
    """Counts the names of the function, of which code behind the loop reads some."""

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x * len(locals())).flatten(0, 1), ids.flatten())


class InContext(Model):
    def forward(self, ids):
        x = self.embedding(ids)
        with torch.enable_grad():
            for layer in self.layers:
                x = layer(x)
            return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class InTry(Model):
    def forward(self, ids):
        x = self.embedding(ids)
        try:
            for layer in self.layers:
                x = layer(x)
            return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())
        finally:
            del ids


class InWhile(Model):
    def forward(self, ids):
        x, turns = self.embedding(ids), 0
        while turns < 2:
            for layer in self.layers:
                x = layer(x)
            x, turns = x.relu(), turns + 1
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


@pytest.mark.parametrize("model", [LastState, Deletes, Closure, InContext, InTry, InWhile])
def test_what_is_not_proved_to_be_the_same_is_pythons(model):
    run = Run(model()).step(ids()).step(ids(9))
    assert run.regions
    assert losses(run) == 0
    if model is LastState:
        run.step(ids(), layers=0)


def test_code_that_looks_at_local_names_stays_in_its_function():
    """Torch itself gives it a few more behind a break of the graph."""
    run = Run(Locals())
    run.compiled(ids())
    assert run.regions
    assert losses(run) == 0


class Returns(Model):
    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_return_alone_is_no_function_of_its_own():
    run = Run(Returns()).step(ids())
    assert [graph.region for graph in run.session.graphs] == [None, "Layer x4"]


class Instruction:
    exn_tab_entry = None

    def __init__(self, opname, target=None, arg=0):
        self.opname, self.target, self.arg = opname, target, arg
        self.opcode = dis.opmap.get(opname, dis.opmap["NOP"])


@pytest.mark.parametrize("ends", [(), ("END_FOR",), ("END_FOR", "POP_TOP"), ("END_FOR", "POP_ITER")])
def test_what_pops_the_iterator_is_part_of_the_loop(ends, monkeypatch):
    """As Python 3.11, 3.12, 3.13 and 3.14 write loops."""
    monkeypatch.setattr(bytecode, "_stack_depth", lambda *_: 0)
    behind = [*map(Instruction, ends), Instruction("LOAD_FAST")]
    instructions = [Instruction("FOR_ITER", behind[0]), Instruction("JUMP_BACKWARD"), *behind]
    at = bytecode.statement_behind(instructions, bytecode.loop_at(instructions, 0))
    assert instructions[at].opname == "LOAD_FAST"
