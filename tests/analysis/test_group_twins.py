import pytest

from lagom_overlap.analysis.group_twins import comp_alone_from_twins
from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.timeline import Span, SpanKind, Timeline
from lagom_overlap.workload import CommOp, CompOp, Gemm, MemoryBound, OverlapGroup

BIG, SMALL = Gemm(8, 8, 8), MemoryBound(64)
GROUP = OverlapGroup(
    name="g",
    computations=tuple(CompOp(name=f"{n}{i}", work=w) for i in range(3) for n, w in (("big", BIG), ("small", SMALL))),
    comms=(CommOp(name="c", collective=Collective(CollectiveKind.ALL_GATHER, 64, 2)),),
)


def timeline(comm_end):
    """Six computations: 3 s and 1 s alone, twice as long while the collective runs."""
    spans, now = [Span(name="c", kind=SpanKind.COMM, stream="comm", start_s=0.0, end_s=comm_end)], 0.0
    for op in GROUP.computations:
        length = (3.0 if op.work is BIG else 1.0) * (2 if now < comm_end else 1)
        spans.append(Span(name=op.name, kind=SpanKind.COMP, stream="compute", start_s=now, end_s=now + length))
        now += length
    return Timeline(tuple(spans))


def test_twins_that_ran_alone_stand_for_those_that_did_not():
    assert comp_alone_from_twins(GROUP, timeline(7.0)) == pytest.approx(3 * (3.0 + 1.0))


def test_without_a_twin_of_some_work_it_says_nothing():
    assert comp_alone_from_twins(GROUP, timeline(1000.0)) is None
