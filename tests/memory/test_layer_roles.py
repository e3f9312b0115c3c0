"""Which layers keep, where, and when what lies on the host comes back."""

from __future__ import annotations

import random

import pytest

from glue_compiler.memory.layer_roles import Choice, Role, roles_of


def asked(kinds, room, copies, extra=None):
    """Kinds: a letter for each layer; layer 100 is the first. Of 4 bytes where ``extra`` says nothing."""
    layers = {100 + at: kind for at, kind in enumerate(kinds)}
    return layers, roles_of(layers, extra or dict.fromkeys(kinds, 4), room, copies)


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
    returns = {layer - 100: role.returns - 100 for layer, role in roles.items() if role.returns is not None}
    assert returns == {1: 0, 3: 2, 6: 4}, "behind the one that is back before, and a kept one"
    assert [layer - 100 for layer, role in roles.items() if role.leaves is not None] == [3, 5, 7]
    assert set(roles) <= set(layers)


def test_neighbours_come_back_one_after_the_other():
    _, roles = asked("a" * 6, 9, {"a": 1})
    assert letters("a" * 6, 9, {"a": 1}) == "MMMMKK"
    returns = {layer - 100: role.returns - 100 for layer, role in roles.items() if role.returns is not None}
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
            if role.returns is not None:
                assert role.returns in moved
                there[role.returns] = extra[layers[role.returns]]
            assert (layer in there) == (role.choice is not Choice.AGAIN)
            least = max(least, sum(there.values()))
            there.pop(layer, None)
        assert not there
        assert least <= room or not roles
    assert moving > 200
