"""Traces in which several graphs are compiled."""

from torch._guards import TracingContext, tracing

from glue_compiler.compat.partition import trace_of_its_own


def test_notes_of_a_compile_stay_with_what_it_hands_on():
    with tracing(TracingContext(None)) as outer:
        with trace_of_its_own():
            own = TracingContext.get()
            own.fw_metadata = "of one graph"
            assert own.guards_context is outer.guards_context
        assert TracingContext.get() is outer
        assert outer.fw_metadata is None
    assert own.fw_metadata == "of one graph"


def test_without_a_trace_there_is_none():
    with trace_of_its_own():
        assert TracingContext.try_get() is None
