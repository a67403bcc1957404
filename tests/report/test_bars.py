from lagom_overlap.report.bars import longest_spans, time_ticks
from lagom_overlap.timeline import Span, SpanKind


def test_an_axis_of_time_has_round_marks_within_it() -> None:
    assert [(tick.place, tick.text) for tick in time_ticks(0.5)] == [
        (0.0, "0 ms"),
        (20.0, "100 ms"),
        (40.0, "200 ms"),
        (60.0, "300 ms"),
        (80.0, "400 ms"),
        (100.0, "500 ms"),
    ]
    assert [tick.text for tick in time_ticks(13.57)] == ["0 s", "5 s", "10 s"]


def test_of_too_many_spans_the_shortest_are_left_out_and_the_order_stays() -> None:
    spans = [
        Span(name=str(number), kind=SpanKind.COMP, rank=0, stream="s", start_s=number, end_s=number + length)
        for number, length in enumerate((0.5, 0.1, 0.9, 0.2))
    ]
    assert [span.name for span in longest_spans(spans, 2)] == ["0", "2"]
    assert longest_spans(spans, 9) == tuple(spans)
