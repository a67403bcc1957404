import json

import pytest
from chrome_timelines import timelines_from_chrome
from hypothesis import given, settings
from hypothesis import strategies as st

from lagom_overlap.timeline import Span, SpanKind, Timeline
from lagom_overlap.trace.chrome_writer import chrome_trace


def span(name: str, stream: str, start_s: float, end_s: float, rank: int = 0) -> Span:
    kind = SpanKind.COMM if stream == "comm" else SpanKind.COMP
    return Span(name=name, kind=kind, stream=stream, start_s=start_s, end_s=end_s, rank=rank)


TWO_RANKS = Timeline(
    (
        span("ffn", "compute", 0.0, 1.5e-3),
        span("attn", "compute", 1.5e-3, 2.25e-3),
        span("ag", "comm", 1e-4, 1.7e-3),
        span("ffn", "compute", 2e-5, 1.6e-3, rank=1),
        span("ag", "comm", 1e-4, 1.7e-3, rank=1),
    )
)
ONE_RANK = Timeline((span("ffn", "compute", 0.0, 1e-3), span("ag", "comm", 0.0, 2e-3)))


def events_of(data: bytes, phase: str) -> list[dict]:
    return [event for event in json.loads(data)["traceEvents"] if event["ph"] == phase]


def test_every_event_has_the_fields_that_the_trace_event_format_asks_for():
    file = json.loads(chrome_trace({"default": TWO_RANKS, "tuned": ONE_RANK}))
    assert file["displayTimeUnit"] in ("ms", "ns")
    for event in file["traceEvents"]:
        assert event["ph"] in ("X", "M")
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert isinstance(event["ts"], float)
            assert event["cat"] in ("comp", "comm")
        else:
            assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
            key = "sort_index" if event["name"].endswith("sort_index") else "name"
            assert key in event["args"]


def test_a_span_of_1_5_ms_is_written_as_1500_microseconds():
    first = next(event for event in events_of(chrome_trace({"a": TWO_RANKS}), "X") if event["name"] == "attn")
    assert (first["ts"], first["dur"]) == (1500.0, 750.0)


def test_each_timeline_and_rank_is_a_process_and_each_stream_a_thread():
    data = chrome_trace({"default": TWO_RANKS, "tuned": ONE_RANK})
    metadata = events_of(data, "M")
    names = [event["args"]["name"] for event in metadata if event["name"] == "process_name"]
    assert names == ["default, rank 0", "default, rank 1", "tuned"]
    threads = [event for event in metadata if event["name"] == "thread_name"]
    assert sorted(event["args"]["name"] for event in threads) == ["comm"] * 3 + ["compute"] * 3
    pids = {event["pid"] for event in metadata}
    tids = [event["tid"] for event in threads]
    assert len(set(tids)) == len(tids)
    assert 0 not in pids
    assert not pids & set(tids)


def test_spans_that_run_at_once_on_one_stream_go_to_threads_of_their_own():
    slices = Timeline((span("a", "comm", 0, 2e-3), span("b", "comm", 1e-3, 3e-3), span("c", "comm", 2e-3, 4e-3)))
    data = chrome_trace({"t": slices})
    tid = {event["name"]: event["tid"] for event in events_of(data, "X")}
    assert tid["a"] == tid["c"] != tid["b"]
    names = [event["args"]["name"] for event in events_of(data, "M") if event["name"] == "thread_name"]
    assert names == ["comm", "comm (2)"]
    assert {s.stream for s in timelines_from_chrome(data)["t"].spans} == {"comm"}


def test_equal_timelines_give_equal_bytes_whatever_the_order_of_their_spans():
    backwards = Timeline(tuple(reversed(TWO_RANKS.spans)))
    assert chrome_trace({"t": TWO_RANKS}) == chrome_trace({"t": backwards})


spans = st.builds(
    lambda name, kind, stream, start, length, rank: Span(
        name=name, kind=kind, stream=stream, start_s=start, end_s=start + length, rank=rank
    ),
    st.text(max_size=8),
    st.sampled_from(SpanKind),
    st.sampled_from(["compute", "comm", "comm (2)"]),
    st.floats(0, 1000),
    st.floats(0, 10),
    st.integers(0, 3),
)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.dictionaries(st.text(max_size=5), st.lists(spans, max_size=6).map(lambda s: Timeline(tuple(s))), max_size=3))
def test_a_file_of_ours_reads_back_to_the_nanosecond(timelines):
    def whole_ns(timeline: Timeline) -> list[tuple]:
        rows = (
            (round(s.start_s * 1e9), round(s.end_s * 1e9), s.name, s.kind, s.stream, s.rank) for s in timeline.spans
        )
        return sorted(rows)

    back = timelines_from_chrome(chrome_trace(timelines))
    assert list(back) == list(timelines)
    for name, timeline in timelines.items():
        # A time that lies exactly between two nanoseconds may be written as either.
        for (start, end, *mine), (start_, end_, *theirs) in zip(whole_ns(timeline), whole_ns(back[name]), strict=True):
            assert abs(start - start_) <= 1
            assert abs(end - end_) <= 1
            assert mine == theirs


def test_spans_on_whole_nanoseconds_come_back_as_they_were():
    back = timelines_from_chrome(chrome_trace({"t": TWO_RANKS}))["t"]
    for mine, theirs in zip(TWO_RANKS.spans, back.spans, strict=True):
        assert theirs.start_s == pytest.approx(mine.start_s, abs=1e-15)
        assert theirs.end_s == pytest.approx(mine.end_s, abs=1e-15)
    assert chrome_trace({"t": back}) == chrome_trace({"t": TWO_RANKS})


def test_an_infinite_time_is_refused():
    with pytest.raises(ValueError, match="must be finite"):
        chrome_trace({"t": Timeline((span("a", "comm", 0.0, float("inf")),))})
