from itertools import pairwise

import numpy as np
import pytest
from gpu_traces import gpu_trace
from hypothesis import given
from hypothesis import strategies as st

from lagom_overlap.analysis.measures import Measures, occupation_of, step_measures, whole
from lagom_overlap.trace.gpu_trace import EventRole

LAST = 80
ROWS = st.lists(
    st.tuples(st.sampled_from(list(EventRole)), st.integers(0, LAST), st.integers(1, 20)).map(
        lambda r: (r[0], r[1], r[1] + r[2])
    ),
    min_size=1,
    max_size=20,
)


def brute_force(rows, launches, start, end) -> Measures:
    """Every nanosecond on its own: what runs, and if nothing, whether the next event's launch had begun."""
    counts = dict.fromkeys(("compute", "comm", "memory", "overlap", "exposed", "idle", "host"), 0)
    for ns in range(start, end):
        runs = {role for role, a, b in rows if a <= ns < b}
        counts["compute"] += EventRole.COMPUTE in runs
        counts["comm"] += EventRole.COMM in runs
        counts["memory"] += EventRole.MEMORY in runs
        counts["overlap"] += {EventRole.COMPUTE, EventRole.COMM} <= runs
        counts["exposed"] += EventRole.COMM in runs and EventRole.COMPUTE not in runs
        if not runs:
            counts["idle"] += 1
            busy_again = next(t for t in range(ns, LAST + 40) if any(a <= t < b for _, a, b in rows))
            ends_gap = [at for (_, a, b), at in zip(rows, launches, strict=True) if a == busy_again]
            counts["host"] += all(at is not None for at in ends_gap) and min(ends_gap) > ns
    return Measures(
        span_ns=end - start,
        compute_ns=counts["compute"],
        comm_ns=counts["comm"],
        memory_ns=counts["memory"],
        overlap_ns=counts["overlap"],
        exposed_comm_ns=counts["exposed"],
        idle_ns=counts["idle"],
        host_bound_ns=counts["host"],
    )


@given(ROWS, st.data())
def test_every_measure_equals_a_count_of_nanoseconds(rows, data):
    launches = [data.draw(st.none() | st.integers(0, row[1])) for row in rows]
    events = gpu_trace(rows, launches=launches).events
    found = whole(events, occupation_of(events))
    start, end = min(row[1] for row in rows), max(row[2] for row in rows)
    assert found == brute_force(rows, launches, start, end)


@given(ROWS, st.integers(0, LAST), st.integers(0, LAST))
def test_a_window_counts_only_what_lies_inside(rows, a, b):
    events = gpu_trace(rows).events
    occupation = occupation_of(events)
    start, end = int(events.start_ns[0]), int(events.end_ns.max())
    cut = sorted({start, end, *(t for t in (a, b) if start < t < end)})
    parts = [occupation.measures(x, y) for x, y in pairwise(cut)]
    if parts:
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        assert total == whole(events, occupation)
        assert parts[0] == brute_force(rows, [None] * len(rows), cut[0], cut[1])


def test_steps_share_nothing_and_leave_nothing_out():
    # CPU steps at 0 and 100; the GPU lags: step 2's first kernel starts at 130, launched at 105.
    rows = [
        (EventRole.COMPUTE, 10, 60),
        (EventRole.COMM, 50, 125),
        (EventRole.COMPUTE, 130, 180),
        (EventRole.COMM, 150, 200),
    ]
    trace = gpu_trace(rows, launches=[5, 40, 105, 110], steps=[(1, 0, 100), (2, 100, 200)])
    occupation = occupation_of(trace.events)
    first, second = step_measures(trace, occupation)
    assert (first.number, first.start_ns, first.end_ns) == (1, 10, 130)
    assert (second.number, second.start_ns, second.end_ns) == (2, 130, 200)
    assert first.measures == Measures(
        span_ns=120,
        compute_ns=50,
        comm_ns=75,
        memory_ns=0,
        overlap_ns=10,
        exposed_comm_ns=65,
        idle_ns=5,
        host_bound_ns=0,
    )
    assert first.measures + second.measures == whole(trace.events, occupation)


def test_a_copy_does_not_open_a_step():
    rows = [(EventRole.COMPUTE, 10, 20), (EventRole.MEMORY, 30, 35), (EventRole.COMPUTE, 50, 60)]
    trace = gpu_trace(rows, launches=[5, 26, 40], steps=[(1, 0, 25), (2, 25, 50)])
    assert [s.start_ns for s in step_measures(trace, occupation_of(trace.events))] == [10, 50]


def test_a_trace_without_steps_is_one_window():
    trace = gpu_trace([(EventRole.COMPUTE, 3, 9)])
    (only,) = step_measures(trace, occupation_of(trace.events))
    assert (only.start_ns, only.end_ns) == (3, 9)


def test_no_communication_has_no_overlap_percentage():
    events = gpu_trace([(EventRole.COMPUTE, 0, 5)]).events
    assert whole(events, occupation_of(events)).overlap_pct is None


def test_large_times_stay_exact():
    base = 1_700_000_000_000_000_000
    events = gpu_trace([(EventRole.COMPUTE, base, base + 3), (EventRole.COMM, base + 1, base + 8)]).events
    found = whole(events, occupation_of(events))
    assert (found.overlap_ns, found.exposed_comm_ns, found.span_ns) == (2, 5, 8)
    assert np.int64(base + 8) == events.end_ns.max()


@pytest.mark.parametrize("role", list(EventRole))
def test_empty_events_measure_nothing(role):
    events = gpu_trace([(role, 5, 5)]).events
    assert whole(events, occupation_of(events)).span_ns == 0
