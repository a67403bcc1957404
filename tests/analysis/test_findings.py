from dataclasses import replace

import pytest
from gpu_traces import gpu_trace

from lagom_overlap.analysis.findings import analyse
from lagom_overlap.analysis.tracks import rank_timeline
from lagom_overlap.trace.gpu_trace import EventRole, empty_events

COMM, COMP = EventRole.COMM, EventRole.COMPUTE


def warnings(*traces):
    return " | ".join(analyse(traces).warnings)


def test_a_jump_of_the_clock_is_told_and_an_ordinary_gap_is_not():
    jump = 60 * 10**9
    assert "clock may have jumped" in warnings(gpu_trace([(COMP, 0, 10**6), (COMP, jump, jump + 10**6)]))
    assert "clock" not in warnings(gpu_trace([(COMP, 0, 10**6), (COMP, 10**9, 10**9 + 10)]))


def test_missing_ranks_missing_steps_and_repeated_ranks_are_told():
    trace = gpu_trace([(COMP, 0, 10)], world_size=8)
    told = warnings(trace, trace)
    assert "1 of 8 ranks given" in told
    assert "no profiler steps" in told
    assert "rank 0 comes more than once" in told


def test_traces_that_do_not_look_like_one_job_are_told():
    def rank(number, gpu, world):
        return gpu_trace([(COMP, 0, 10)], rank=number, gpu_name=gpu, world_size=world)

    assert "different GPUs (A100, V100): they are added up" in warnings(rank(0, "V100", 2), rank(1, "A100", 2))
    assert "different numbers of ranks (2, 8)" in warnings(rank(0, "A100", 8), rank(1, "A100", 2))
    assert "different" not in warnings(rank(0, "A100", 2), rank(1, "A100", 2))


def test_communication_of_unknown_kind_is_told():
    assert "do not say which collective" in warnings(
        gpu_trace([(COMM, 0, 10)], calls=[{"op": "unknown", "kind": None}])
    )


def test_no_trace_is_a_bad_argument():
    with pytest.raises(ValueError, match="at least one"):
        analyse([])


def test_the_timeline_of_a_large_trace_keeps_the_longest_events():
    rows = [(COMP, n * 100, n * 100 + n + 1) for n in range(50)]
    findings = analyse([gpu_trace(rows)])
    spans = [s for s in rank_timeline(findings, 0, room=5).spans if s.stream == "stream 0"]
    assert sorted(round(s.duration_s * 1e9) for s in spans) == [46, 47, 48, 49, 50]


def test_the_skew_of_ranks_is_the_mean_wait_for_the_last_peer():
    def rank(number, *lengths):
        rows = [(EventRole.COMM, 1000 * i, 1000 * i + length) for i, length in enumerate(lengths)]
        return gpu_trace(rows, calls=[{"sequence": i, "num_ranks": 2} for i in range(len(lengths))], rank=number)

    found = analyse([rank(0, 100, 300), rank(1, 180, 240)])  # the shortest of a call waited for nobody
    assert found.rank_skew_ns == (0 + 60 + 80 + 0) / 4
    assert analyse([rank(0, 100)]).rank_skew_ns is None


def test_a_dump_without_a_timeline_next_to_a_trace_dilutes_no_figure():
    """Two steps of 1 ms with one call each; the recorder of the same rank kept both calls, too."""
    rows = [(COMM, 10**6 * n, 10**6 * n + 500) for n in range(2)]
    steps = [(n, 10**6 * n, 10**6 * (n + 1)) for n in range(2)]
    timed = gpu_trace(rows, steps=steps, launches=[10**6 * n for n in range(2)])
    recorder = replace(
        timed, file="dump", events=empty_events(), steps=(),
        calls=tuple(replace(call, event=-1) for call in timed.calls),
    )  # fmt: skip
    findings = analyse([timed, recorder])
    assert findings.num_windows == 2
    assert sum(row.count for row in findings.rows) == 2
    assert any(text.startswith("dump: without a timeline, next to files with one") for text in findings.warnings)
    assert not any("more than once" in text for text in findings.warnings)


def test_marked_steps_in_which_nothing_was_launched_are_no_steps():
    trace = gpu_trace([(COMP, 0, 10**6)], steps=[(n, 10**9 * n, 10**9 * n + 5) for n in (7, 8)], launches=[0])
    findings = analyse([trace])
    assert findings.ranks[0].steps[0].number == 0
    told = " | ".join(findings.warnings)
    assert "none of its 2 marked steps launched a kernel here" in told
    assert "no profiler steps; the whole trace counts as one step" in told
