"""What glue reads in bytecode: spans that a branch skips, and how a list is used."""

import pytest
from torch._dynamo.bytecode_transformation import cleaned_instructions

from glue_compiler.capture import bytecode
from glue_compiler.capture.list_growth import growth_of


def instructions_of(function):
    return cleaned_instructions(function.__code__)


def spans_of(function, condition):
    """What each conditional jump of the first loop skips when its condition has this value."""
    instructions = instructions_of(function)
    head = next(i for i, each in enumerate(instructions) if each.opname == "FOR_ITER")
    loop = bytecode.loop_at(instructions, head)
    jumps = [i for i in range(head, loop.end) if instructions[i].opname.startswith("POP_JUMP")]
    return instructions, loop, [bytecode.skipped_by(instructions, at, condition, loop) for at in jumps]


def goes_on(items, use):
    for n in items:
        if n == 0:
            continue
        use(n)


def uses_if(items, use):
    for n in items:
        if n > 0:
            use(n)
        use(items)


def chooses_a_value(items, use):
    for n in items:
        use(1, n if n > 0 else 2)


def goes_on_in_the_middle(items, use):
    for n in items:
        if n > 0:
            continue
        use(n)


def test_a_continue_skips_the_rest_of_the_iteration():
    instructions, loop, (span,) = spans_of(goes_on, True)
    assert (span.end, span.exit) == (loop.end, loop.head)
    assert bytecode.left_behind(instructions, loop, span) == frozenset()


def test_an_if_skips_a_statement():
    instructions, loop, (span,) = spans_of(uses_if, False)
    assert loop.head < span.start < span.end == span.exit < loop.end
    assert bytecode.left_behind(instructions, loop, span) == frozenset()


def test_a_value_is_no_statement():
    """The branch leaves something on the stack."""
    assert spans_of(chooses_a_value, False)[2] == [None]


def test_a_continue_that_is_itself_skipped_hides_the_rest():
    instructions, loop, (span,) = spans_of(goes_on_in_the_middle, False)
    assert span is None or bytecode.left_behind(instructions, loop, span) is None


def carries(items, use):
    start = 0
    for n in items:
        if n == 0:
            continue
        use(start)
        start = n


def carries_out(items, use):
    start = 0
    for n in items:
        if n == 0:
            continue
        use(start)
        start = n
    return start


def stores_twice(items, use):
    start = 0
    for n in items:
        start = use(start)
        if n == 0:
            continue
        start = n


@pytest.mark.parametrize(("function", "within"), [(carries, True), (carries_out, False), (stores_twice, False)])
def test_names_that_later_iterations_read(function, within):
    instructions, loop, (span,) = spans_of(function, True)
    assert bytecode.left_behind(instructions, loop, span) == {"start"}
    assert bytecode.is_carried_within(instructions, loop, span, "start") == within


def joined(items, join):
    found = []
    for n in items:
        found.append(n + 1)  # noqa: PERF401
    return join(found) if found else join(len(items))


def measured(items, join):
    found = []
    for n in items:
        found.append(n + 1)  # noqa: PERF401
    return join(found) * len(found)


def named_twice(items, join):
    found = kept = []
    for n in items:
        found.append(n + 1)  # noqa: PERF401
    return join(found), kept


def given(items, found):
    for n in items:
        found.append(n + 1)
    return found


def asked_in_the_loop(items, join):
    found = []
    for n in items:
        if found:
            break
        found.append(n + 1)
    return join(found)


def in_a_closure(items, join):
    found = []
    for n in items:
        found.append(n + 1)  # noqa: PERF401
    return join(lambda: found)


@pytest.mark.parametrize(
    ("function", "calls"),
    [
        (joined, 1),
        (measured, 2),
        (named_twice, None),
        (given, None),
        (asked_in_the_loop, None),
        (in_a_closure, None),
    ],
)
def test_lists_that_only_calls_take(function, calls):
    """Each of the calls must turn out to be a ``cat`` when it is traced, which ``len`` is not."""
    instructions = instructions_of(function)
    head = next(i for i, each in enumerate(instructions) if each.opname == "FOR_ITER")
    loop = bytecode.loop_at(instructions, head)
    span = bytecode.Span(head + 1, loop.end, head)
    found = [growth for at in range(span.start, span.end) if (growth := growth_of(instructions, loop, span, at))]
    assert [(growth.name, len(growth.calls)) for growth in found] == ([] if calls is None else [("found", calls)])
