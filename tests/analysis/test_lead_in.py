"""A GPU that is steps behind when the profiler begins: what it then does is no part of the steps that were marked."""

import pytest
from gpu_traces import gpu_trace

from lagom_overlap.analysis.findings import analyse
from lagom_overlap.trace.gpu_trace import EventRole

STEP = 1000


def trace_behind(num_behind: int, num_marked: int = 3):
    """Steps of 1,000 ns, of which 600 compute and 600 communicate; the host marks one every 10 ns."""
    rows, launches = [], []
    for step in range(num_behind + num_marked):
        begun, marked = STEP * step, step - num_behind
        rows += [(EventRole.COMPUTE, begun, begun + 600), (EventRole.COMM, begun + 400, begun + STEP)]
        launches += [10 * marked + 1, 10 * marked + 2] if marked >= 0 else [None, None]
    steps = [(7 + step, 10 * step, 10 * step + 10) for step in range(num_marked)]
    return gpu_trace(rows, launches=launches, steps=steps)


@pytest.mark.parametrize("num_behind", [0, 1, 2, 5])
def test_a_step_is_as_long_however_far_the_gpu_is_behind(num_behind):
    found = analyse([trace_behind(num_behind)])
    (rank,) = found.ranks
    assert [step.measures.span_ns for step in rank.steps] == [STEP] * 3
    assert rank.measures.span_ns / found.num_windows == STEP
    assert rank.measures.exposed_comm_ns / found.num_windows == 400
    assert [row.count for row in found.rows] == [3]
    assert any("behind the CPU" in warning for warning in found.warnings) is (num_behind > 0)


def test_a_little_that_comes_before_is_kept():
    trace = trace_behind(0)
    early = gpu_trace(
        [(EventRole.COMPUTE, 0, 300), (EventRole.COMPUTE, 400, 1400)], launches=[None, 1], steps=[(1, 0, 10)]
    )
    assert analyse([early]).ranks[0].measures.span_ns == 1400
    assert len(analyse([trace]).ranks[0].trace.events) == 6
