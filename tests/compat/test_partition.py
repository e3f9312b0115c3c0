"""Traces in which several graphs are compiled."""

from torch._guards import TracingContext, tracing

from glue_compiler.compat.partition import trace_of_its_own


def test_each_compile_keeps_its_own_notes_and_the_last_ones_are_the_traces():
    found = []
    with tracing(TracingContext(None)) as outer:
        for note in ("of one graph", "of another"):
            with trace_of_its_own():
                found.append(TracingContext.get())
                found[-1].fw_metadata = note
                assert found[-1].guards_context is outer.guards_context
            assert TracingContext.get() is outer
            assert outer.fw_metadata == note
    assert [each.fw_metadata for each in found] == ["of one graph", "of another"]


def test_what_ddp_cuts_has_one_trace():
    with tracing(TracingContext(None)) as outer:
        outer.fakify_first_call = True
        with trace_of_its_own():
            assert TracingContext.get() is outer


def test_without_a_trace_there_is_none():
    with trace_of_its_own():
        assert TracingContext.try_get() is None
