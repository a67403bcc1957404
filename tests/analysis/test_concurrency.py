import pytest
from gpu_traces import gpu_trace
from hypothesis import given
from hypothesis import strategies as st

from lagom_overlap.analysis import concurrency as module
from lagom_overlap.analysis.concurrency import MAX_OVERLAPS, overlaps_of
from lagom_overlap.trace.gpu_trace import EventRole

SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30)), max_size=12)


def trace_of(kernels, comms):
    rows = [(EventRole.COMPUTE, at, at + length) for at, length in kernels]
    return gpu_trace(rows + [(EventRole.COMM, at, at + length) for at, length in comms])


def pairs_by_hand(trace):
    """(run, call, shared) by looking at every pair, each run's longest first."""
    events, rows = trace.events, trace.events.rows(EventRole.COMPUTE)
    found = []
    for run, row in enumerate(rows.tolist()):
        mine = []
        for index, call in enumerate(trace.calls):
            start = max(events.start_ns[row], events.start_ns[call.event])
            shared = int(min(events.end_ns[row], events.end_ns[call.event]) - start)
            if shared > 0:
                mine.append((-shared, index))
        found += [(run, index, -shared) for shared, index in sorted(mine)]
    return found


@pytest.mark.parametrize("most_pairs", [1, 5, 1 << 18])
@given(SPANS, SPANS)
def test_every_pair_is_found_whatever_fits_in_memory(most_pairs, kernels, comms):
    trace = trace_of(kernels, comms)
    before, module._MAX_PAIRS = module._MAX_PAIRS, most_pairs
    try:
        found = overlaps_of(trace, trace.events.rows(EventRole.COMPUTE))
    finally:
        module._MAX_PAIRS = before
    assert list(zip(found.run.tolist(), found.call.tolist(), found.shared_ns.tolist(), strict=True)) == pairs_by_hand(
        trace
    )
    firsts = [
        at for at, pair in enumerate(pairs_by_hand(trace)) if not at or pairs_by_hand(trace)[at - 1][0] != pair[0]
    ]
    assert found.longest.tolist() == firsts


def test_of_thousands_beside_one_run_the_longest_are_told():
    trace = trace_of([(0, 10_000)], [(0, length) for length in range(1, 1001)])
    found = overlaps_of(trace, trace.events.rows(EventRole.COMPUTE))
    assert sorted(found.shared_ns.tolist()) == list(range(1001 - MAX_OVERLAPS, 1001))
