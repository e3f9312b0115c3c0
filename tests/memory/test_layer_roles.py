"""Which layers keep, where, and when what lies on the host comes back."""

from __future__ import annotations

import random

import pytest

from glue_compiler.memory.layer_roles import Choice, LayerInput, Role, roles_of


def asked(kinds, room, copies, extra=None, inputs=()):
    """Kinds: a letter for each layer; layer 100 is the first. Of 4 bytes where ``extra`` says nothing."""
    layers = {100 + at: kind for at, kind in enumerate(kinds)}
    inputs = {100 + at: each for at, each in enumerate(inputs)}
    return layers, roles_of(layers, extra or dict.fromkeys(kinds, 4), room, copies, inputs)


def letters(kinds, *given, **named):
    """What each layer does: K keeps, M moves, a dot computes again."""
    layers, roles = asked(kinds, *given, **named)
    signs = {Choice.KEEP: "K", Choice.MOVE: "M", Choice.AGAIN: "."}
    return "".join(signs[roles.get(layer, Role()).choice] for layer in layers)


@pytest.mark.parametrize(
    ("forwards", "keep", "expected"),
    [
        (3, 0, "........"),
        (3, 1, "M......K"),  # the second one's copy would not end in forward
        (2.5, 2, "M.M...KK"),
        (2, 3, "M.M.MKKK"),
        (2, 4, "M.MKMKKK"),
        (3, 6, "MKKMKKKK"),  # no more move than have to
        (3, 7, "MKKKKKKK"),
        (3, 8, "KKKKKKKK"),
        (0.5, 2, "MMMMMMKK"),
        (0.5, 1, "M.M.M..K"),  # with neighbours, two would be there at once
        (6, 1, "M......K"),
        (7, 1, ".......K"),
    ],
)
def test_the_last_layers_keep_and_others_move_as_far_apart_as_copies_take(forwards, keep, expected):
    """``forwards``: how many of them one copy takes. ``keep``: how many layers there is room for."""
    assert letters("a" * 8, 4 * keep + 1, {"a": forwards}) == expected


@pytest.mark.parametrize(
    ("kinds", "room", "copies", "extra", "expected"),
    [
        ("abab", 16, {}, {"a": 10, "b": 3}, ".KKK"),
        ("abab", 12, {}, {"a": 10, "b": 3}, "...K"),
        ("abab", 100, {}, {"b": 3}, ".K.K"),
        ("abab", -1, {}, {"a": 1, "b": 1}, "...."),
        ("aabbaabb", 5, {"a": 1.5, "b": 2.5}, {"a": 4, "b": 4}, "M..M...K"),
        ("aabbaabb", 5, {"b": 1.5}, {"a": 4, "b": 4}, "..M....K"),
        ("aabbaabb", 5, {"a": 1.5}, {"a": 4}, "M....K.."),
        ("aaab", 1, {"a": 1, "b": 1}, {"a": 4, "b": 1}, "...K"),  # what comes back is larger than what b frees
    ],
)
def test_kinds_take_bytes_and_time_of_their_own(kinds, room, copies, extra, expected):
    assert letters(kinds, room, copies, extra=extra) == expected


def test_what_is_moved_comes_back_as_soon_as_there_is_memory_for_it():
    layers, roles = asked("a" * 8, 17, {"a": 2})
    assert letters("a" * 8, 17, {"a": 2}) == "M.MKMKKK"
    returns = {layer - 100: back - 100 for layer, role in roles.items() for back in role.returns}
    assert returns == {1: 0, 3: 2, 6: 4}, "behind the one that is back before, and a kept one"
    assert [layer - 100 for layer, role in roles.items() if role.leaves is not None] == [3, 5, 7]
    assert set(roles) <= set(layers)


def test_neighbours_come_back_one_after_the_other():
    _, roles = asked("a" * 6, 9, {"a": 1})
    assert letters("a" * 6, 9, {"a": 1}) == "MMMMKK"
    returns = {layer - 100: back - 100 for layer, role in roles.items() for back in role.returns}
    assert returns == {1: 0, 2: 1, 3: 2, 4: 3}


def test_no_layer_finds_more_than_there_is_room_for():
    """And no copy has less time than it takes, whatever layers take."""
    generator, moving = random.Random(0), 0
    for _ in range(500):
        kinds = [generator.choice("abc") for _ in range(generator.randint(1, 14))]
        extra = {kind: generator.randint(1, 5) for kind in generator.sample("abc", generator.randint(1, 3))}
        copies = {kind: generator.uniform(0.2, 5) for kind in generator.sample(sorted(extra), len(extra))}
        layers, roles = asked(kinds, room := generator.uniform(0, 30), copies, extra)
        order, there, ends, least = list(layers), {}, {}, 0.0
        for at, (layer, kind) in enumerate(layers.items()):
            role = roles.get(layer, Role())
            if role.leaves is not None:
                assert ends[role.leaves] <= at
                for each in [each for each in ends if each <= role.leaves]:
                    there.pop(each, None)
            if role.choice is not Choice.AGAIN:
                there[layer] = extra[kind]
            least = max(least, sum(there.values()))
            if role.choice is Choice.MOVE:
                ends[layer], moving = max(at + 1, *ends.values(), 0) + copies[kind], moving + 1
        moved = {layer for layer, role in roles.items() if role.choice is Choice.MOVE}
        assert not moved & set(there)
        for layer in reversed(order):
            role = roles.get(layer, Role())
            for back in role.returns:
                assert back in moved
                there[back] = extra[layers[back]]
            assert (layer in there) == (role.choice is not Choice.AGAIN)
            least = max(least, sum(there.values()))
            there.pop(layer, None)
        assert not there
        assert least <= room or not roles
    assert moving > 200


def inputs_that_move(*given, **named):
    _, roles = asked(*given, **named)
    return {layer - 100 for layer, role in roles.items() if role.moves_input}


@pytest.mark.parametrize(
    ("room", "span", "inputs", "expected", "moved"),
    [
        (4.6, 2, [LayerInput()] * 16, "................", set()),
        (4.6, 2, [LayerInput(1.25, 0.2)] * 16, "M..M..M..M..M..K", {1, 2, 4, 5, 7, 8, 10, 11}),
        (4.6, 1.8, [LayerInput(1.25, 0.2)] * 16, "M..M..M..M..M..K", {*range(13)}),  # beside values
        (4.6, 6, [LayerInput(1.25, 0.2)] * 16, "M......M.......K", {*range(1, 11)}),
        (4.6, 20, [LayerInput(1.25, 0.2)] * 16, "...............K", {*range(14)}),
        (4.6, 20, [LayerInput(1.25, 3)] * 16, "................", set()),  # there is time for four of them
        (4.6, 20, [LayerInput(0.5, 0.1)] * 16, "................", set()),  # 14 of them free too little
        (4.6, 20, [LayerInput()] + [LayerInput(1.25, 0.2)] * 15, "...............K", {*range(1, 14)}),  # a leaf
        (14, 20, [LayerInput(0.01, 0.2)] * 16, "...............K", set()),  # none is needed
        (14, 20, [LayerInput(1.25, 0.2)] * 16, "..............KK", {*range(14)}),
        (4.6, 6, [LayerInput(1.25, 0.2, 1.25)] * 16, "...............K", {*range(14)}),  # gradients take their place
    ],
)
def test_inputs_leave_where_more_layers_keep_by_that(room, span, inputs, expected, moved):
    """Of 13 bytes that a layer keeps."""
    how = {"extra": {"a": 13}, "inputs": inputs}
    assert letters("a" * 16, room, {"a": span}, **how) == expected
    assert inputs_that_move("a" * 16, room, {"a": span}, **how) == moved


def test_an_input_returns_one_layer_before_its_own_and_in_front_of_values():
    _, roles = asked("a" * 16, 4.6, {"a": 2}, extra={"a": 13}, inputs=[LayerInput(1.25, 0.2)] * 16)
    returns = {layer - 100: [back - 100 for back in role.returns] for layer, role in roles.items() if role.returns}
    assert returns == {2: [1, 0], 3: [2], 5: [4, 3], 6: [5], 8: [7, 6], 9: [8], 11: [10, 9], 12: [11], 14: [12]}


class World:
    """What a step takes, counted by hand: what layers' calls and their backwards take while they run, and the head."""

    def __init__(self, layers, generator, inputs):
        self.layers, self.order, self.inputs = layers, list(layers), inputs
        self.call, self.back = ({kind: generator.uniform(0, 9) for kind in "abc"} for _ in range(2))
        self.head, self.accumulates = generator.uniform(0, 9), generator.random() < 0.3

    def forward(self, at, held):
        return held + self.call[self.layers[self.order[at]]]

    def backward(self, at, held):
        """With the gradients of the layers that it has been in, unless they are there before."""
        made = 0 if self.accumulates else sum(self.inputs[layer].gradients for layer in self.order[at:])
        return held + made + self.back[self.layers[self.order[at]]]

    def least(self):
        """All compute again, and no input moves."""
        held = [sum(self.inputs[layer].size for layer in self.order[: at + 1]) for at in range(len(self.order))]
        calls = [each(at, now) for at, now in enumerate(held) for each in (self.forward, self.backward)]
        return max(*calls, held[-1] + self.head)


def drawn(generator):
    kinds = [generator.choice("abc"[: generator.randint(1, 3)]) for _ in range(generator.randint(1, 14))]
    extra = {kind: generator.randint(1, 5) for kind in generator.sample("abc", generator.randint(1, 3))}
    copies = {kind: generator.uniform(0.2, 5) for kind in generator.sample(sorted(extra), len(extra))}
    size, span, most = generator.choice([0, 0.5, 1, 3]), generator.uniform(0.05, 1), generator.choice([0, 0.3, 2])
    gradients = {kind: generator.uniform(0, most) for kind in "abc"}
    moving = [generator.random() < 0.9 for _ in kinds]
    inputs = [
        LayerInput(size * moves, span * moves, gradients[kind]) for kind, moves in zip(kinds, moving, strict=True)
    ]
    return kinds, generator.uniform(0, 30 if generator.random() < 0.5 else 6), copies, extra, inputs


def test_no_step_with_inputs_on_the_host_takes_more_than_there_is_room_for():
    """Of all that a step takes, wherever it takes the most."""
    generator, moving, inputs_moving = random.Random(0), 0, 0
    for _ in range(1000):
        kinds, room, copies, extra, inputs = drawn(generator)
        layers, roles = asked(kinds, room, copies, extra, inputs)
        sizes = dict(zip(layers, inputs, strict=True))
        world = World(layers, generator, sizes)
        order, there, left, ends, link, most = list(layers), {}, {}, {}, 0.0, 0.0
        for at, (layer, kind) in enumerate(layers.items()):
            role = roles.get(layer, Role())
            if role.leaves is not None:
                assert ends[role.leaves] <= at
                for each in [each for each in ends if each <= role.leaves and each not in left]:
                    values = roles[each].choice is Choice.MOVE
                    left[each] = {key for key in ("values" * values, "input" * roles[each].moves_input) if key}
                    for key in left[each]:
                        del there[each, key]
            there[layer, "input"] = sizes[layer].size
            if role.choice is not Choice.AGAIN:
                there[layer, "values"] = extra[kind]
            most = max(most, world.forward(at, sum(there.values())))
            time = copies[kind] if role.choice is Choice.MOVE else 0
            time += sizes[layer].span if role.moves_input else 0
            if time:
                link = ends[layer] = max(at + 1, link) + time
            moving, inputs_moving = moving + (role.choice is Choice.MOVE), inputs_moving + role.moves_input
        assert left.keys() == ends.keys()
        most = max(most, world.head + sum(there.values()))
        for at, layer in reversed([*enumerate(order)]):
            role = roles.get(layer, Role())
            for back in role.returns:
                assert back < layer
                for key in left.pop(back):
                    there[back, key] = extra[layers[back]] if key == "values" else sizes[back].size
            assert (layer, "input") in there
            assert ((layer, "values") in there) == (role.choice is not Choice.AGAIN)
            most = max(most, world.backward(at, sum(there.values())))
            there = {(other, key): nbytes for (other, key), nbytes in there.items() if other != layer}
        assert not there
        assert not left
        assert most <= world.least() + room + 1e-9 or not roles
    assert moving > 400
    assert inputs_moving > 400
