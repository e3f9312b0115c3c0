"""The drawn timeline of checkpoint offload: estimates, trace reader and SVG."""

from xml.etree import ElementTree

import pytest
import torch

from benchmarks.checkpoint_decoder import Shape
from benchmarks.offload_timeline import main, measured_panel, record_step, regions_of, training_step
from benchmarks.profiler_trace import MeasuredSpan, read_step
from benchmarks.timeline_svg import LEFT, Panel, Span, draw

SVG = "{http://www.w3.org/2000/svg}"
MIB = 2**20


def work(cat, name, start, duration, nbytes=None):
    """A trace event; times in microseconds."""
    args = {} if nbytes is None else {"bytes": nbytes}
    return {"ph": "X", "cat": cat, "name": name, "ts": 1000.0 + start, "dur": float(duration), "args": args}


def out(start, duration, nbytes=MIB):
    return work("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", start, duration, nbytes)


def back(start, duration, nbytes=MIB):
    return work("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", start, duration, nbytes)


def microseconds(spans, engine):
    return [(round(s.start * 1e6, 3), round(s.end * 1e6, 3), s.copy) for s in spans if s.engine == engine]


def test_a_trace_gives_compute_spans_and_numbered_copies():
    step = read_step(
        [
            work("kernel", "gemm", 0, 100),
            work("kernel", "add", 110, 90),  # 10 us later: the same span
            out(100, 50),
            out(150, 60),
            work("gpu_memset", "Memset", 300, 100),  # 100 us later: another span
            back(210, 150),
            work("kernel", "gemm", 400, 100),
        ]
    )
    assert microseconds(step.spans, "compute") == [(0, 200, None), (300, 500, None)]
    assert microseconds(step.spans, "device_to_host") == [(100, 150, 0), (150, 210, 1)]
    assert microseconds(step.spans, "host_to_device") == [(210, 360, 0)]
    assert step.step_seconds == pytest.approx(500e-6)
    # Hidden: 40 of 50 us (a gap of 10 us counts as a gap here), 50 of 60, and 60 of 150.
    assert step.overlap == pytest.approx((40 + 50 + 60) / 260)


def test_small_copies_and_host_events_are_left_out():
    step = read_step(
        [
            work("kernel", "gemm", 0, 10),
            out(20, 5, nbytes=4),
            work("cpu_op", "aten::mm", 0, 1000),
            {"ph": "M", "name": "process_name"},
        ]
    )
    assert step.spans == (MeasuredSpan("compute", 0.0, pytest.approx(10e-6)),)
    assert step.overlap == 1.0


def test_a_short_kernel_beside_a_long_one_ends_nothing():
    step = read_step([work("kernel", "gemm", 0, 100), work("kernel", "add", 10, 20), out(50, 50)])
    assert microseconds(step.spans, "compute") == [(0, 100, None)]
    assert step.overlap == pytest.approx(1.0)


def test_copies_inside_the_device_are_compute():
    step = read_step([work("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 0, 10, MIB)])
    assert [span.engine for span in step.spans] == ["compute"]


def test_a_trace_without_a_device_is_refused():
    with pytest.raises(ValueError, match="no kernels"):
        read_step([work("cpu_op", "aten::mm", 0, 10)])


def test_measured_copies_have_their_regions_colours_in_both_directions():
    panel = measured_panel("Measured", read_step([out(0, 10), out(10, 10), back(20, 10), back(30, 10)]), 2**30)
    lanes = dict(panel.lanes)
    assert [bar.region for bar in lanes["copy to host"]] == [0, 1]
    assert [bar.region for bar in lanes["copy from host"]] == [1, 0]
    assert panel.title == "Measured: step 0.0 ms, peak 1.00 GiB, 0% of copying under compute"


def test_a_decoder_is_counted_by_hand():
    shape = Shape(hidden=8, intermediate=16, layers=2, heads=2, kv_heads=1, head_size=4, batch=3, tokens=5)
    assert shape.layer_weights == 8 * 8 * 2 + 8 * 4 * 2 + 3 * 8 * 16
    products, attention = 2 * 576 * 15, 4 * 3 * (5 * 5 / 2) * 8
    first, second = regions_of(shape, flops=100.0)
    assert (first.index, second.index, first.nbytes) == (0, 1, 15 * 8 * 2)
    assert first.forward_seconds == pytest.approx((products + attention) / 100)
    assert first.backward_seconds == pytest.approx((2 * products + 3.5 * attention) / 100)


def test_bars_stand_at_their_times_on_one_scale():
    text = draw("T", "s", [Panel("one", (("compute", (Span(0, 5, 0, "F0"), Span(5, 10, None, "waits", True))),))])
    root = ElementTree.fromstring(text)
    bars = [bar for bar in root.iter(f"{SVG}rect") if bar.find(f"{SVG}title") is not None]
    first, second = ((float(bar.get("x")), float(bar.get("width"))) for bar in bars)
    assert first[0] == LEFT
    assert first[0] + first[1] == pytest.approx(second[0], abs=0.02)
    assert first[1] == pytest.approx(second[1], abs=0.02)
    assert bars[1].get("stroke-dasharray")
    assert {"T", "s", "one", "compute", "ms", "F0"} <= {text.text for text in root.iter(f"{SVG}text")}


def test_nothing_to_draw_is_refused():
    with pytest.raises(ValueError, match="needs a bar"):
        draw("T", "s", [Panel("one", ())])


def test_the_command_writes_all_schedules_and_says_what_it_predicts(tmp_path, capsys):
    path = tmp_path / "timeline.svg"
    main(["--layers", "4", "--base", "1", "--output", str(path)])
    said = capsys.readouterr().out
    titles = [text.text for text in ElementTree.parse(path).getroot().iter(f"{SVG}text")]
    for schedule in ("no offload", "serial copies", "overlapped with 2 buffers"):
        assert any(title.startswith(f"Predicted, {schedule}: step ") for title in titles)
        assert f"Predicted, {schedule}: step " in said


def test_a_recorded_trace_is_drawn_too(tmp_path, capsys):
    trace = tmp_path / "trace.json"
    trace.write_text('{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": 0, "dur": 2000}]}')
    main(["--layers", "2", "--trace", str(trace), "--output", str(tmp_path / "timeline.svg")])
    assert "Measured: step 2.0 ms" in capsys.readouterr().out


TINY = Shape(hidden=64, intermediate=128, layers=2, heads=2, kv_heads=1, head_size=32, batch=1, tokens=16)


def test_the_recorded_step_is_a_forward_and_backward_of_checkpointed_layers():
    step = training_step(TINY, {"compiler": "aot_eager"}, torch.device("cpu"))
    step()
    with torch.profiler.profile() as profile:
        step()
    counts = {event.key: event.count for event in profile.key_averages()}
    # A layer has seven products, and seven more for the gradients of their inputs; beyond that is recomputation.
    assert counts["aten::mm"] > 2 * 7 * TINY.layers


@pytest.mark.gpu
def test_a_compiled_step_is_recorded():
    trace, peak = record_step(training_step(TINY, {}, torch.device("cuda")))
    step = read_step(trace)
    assert {span.engine for span in step.spans} == {"compute"}
    assert step.step_seconds > 0
    assert peak > 0
