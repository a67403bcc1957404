import pytest
from hypothesis import given
from hypothesis import strategies as st

from lagom_overlap.timeline import Span, SpanKind, Timeline
from lagom_overlap.timeline.metrics import merge_intervals, overlap_metrics


def span(kind: SpanKind, start: float, end: float, rank: int = 0) -> Span:
    return Span(name=f"{kind}@{start}-{end}", kind=kind, stream=kind, start_s=start, end_s=end, rank=rank)


spans = st.lists(
    st.builds(
        lambda kind, start, length: span(kind, start, start + length),
        st.sampled_from(SpanKind),
        st.integers(0, 30),
        st.integers(0, 10),
    ),
    max_size=12,
)


def cells(some: list[Span], kind: SpanKind) -> set[int]:
    """The unit cells of the time axis that spans of that kind cover: the union by counting."""
    return {cell for s in some if s.kind is kind for cell in range(int(s.start_s), int(s.end_s))}


@given(spans)
def test_metrics_are_counts_of_covered_unit_cells(some: list[Span]) -> None:
    metrics = overlap_metrics(Timeline(tuple(some)))
    comp, comm = cells(some, SpanKind.COMP), cells(some, SpanKind.COMM)
    busy = comp | comm
    makespan = max(busy) + 1 - min(busy) if busy else 0
    assert metrics.comp_s == len(comp)
    assert metrics.comm_s == len(comm)
    assert metrics.exposed_comm_s == len(comm - comp)
    assert metrics.makespan_s == makespan
    assert metrics.overlap_ratio == pytest.approx(len(comp & comm) / len(comm) if comm else 1.0)


@given(spans)
def test_merged_intervals_are_disjoint_increasing_and_cover_the_same_cells(some: list[Span]) -> None:
    merged = merge_intervals(some)
    flat = [edge for interval in merged for edge in interval]
    assert flat == sorted(set(flat))
    covered = {cell for start, end in merged for cell in range(int(start), int(end))}
    assert covered == cells(some, SpanKind.COMP) | cells(some, SpanKind.COMM)


def test_a_worked_step() -> None:
    # Compute 0-4 and 5-9, communicate 1-3 (hidden) and 4-7 (4-5 exposed, 5-7 hidden).
    timeline = Timeline(
        (
            span(SpanKind.COMP, 0, 4),
            span(SpanKind.COMP, 5, 9),
            span(SpanKind.COMM, 1, 3),
            span(SpanKind.COMM, 4, 7),
        )
    )
    metrics = overlap_metrics(timeline)
    assert (metrics.makespan_s, metrics.exposed_comm_s) == (9, 1)
    assert metrics.overlap_ratio == pytest.approx(0.8)


def test_other_ranks_do_not_count() -> None:
    timeline = Timeline((span(SpanKind.COMP, 0, 4), span(SpanKind.COMM, 2, 6, rank=1)))
    assert overlap_metrics(timeline).comm_s == 0
    assert overlap_metrics(timeline, rank=1).exposed_comm_s == 4
    assert timeline.makespan_s == 6


def test_spans_are_ordered_by_start() -> None:
    timeline = Timeline((span(SpanKind.COMM, 2, 6), span(SpanKind.COMP, 0, 4)))
    assert [s.start_s for s in timeline.spans] == [0, 2]
    assert [s.start_s for s in timeline.of(SpanKind.COMM)] == [2]


def test_an_empty_timeline_has_length_zero() -> None:
    assert Timeline(()).makespan_s == 0
    assert overlap_metrics(Timeline(())).makespan_s == 0


def test_impossible_spans_are_refused() -> None:
    with pytest.raises(ValueError, match=r"ends at 1 before it starts at 2"):
        span(SpanKind.COMP, 2, 1)
    with pytest.raises(ValueError, match="before it starts"):
        span(SpanKind.COMP, 0, float("nan"))
