"""What is drawn into the measured timeline: analysis/tracks.py."""

import json

import pytest
from gpu_traces import gpu_trace
from test_verb_analyze import job

from lagom_overlap.analysis.findings import analyse
from lagom_overlap.analysis.tracks import rank_timeline
from lagom_overlap.timeline import Timeline
from lagom_overlap.trace.gpu_trace import EventRole
from lagom_overlap.verbs.analyze import AnalyzeRequest, run_analyze


def track(timeline: Timeline, stream: str) -> list[tuple[str, float, float]]:
    return [(s.name, s.start_s, s.end_s) for s in timeline.spans if s.stream == stream]


def contended():
    """A kernel of 100 ns alone four times, then 150 ns during a long and a short collective."""
    rows = [(EventRole.COMPUTE, 1000 * n, 1000 * n + 100) for n in range(4)]
    rows += [(EventRole.COMPUTE, 5000, 5150), (EventRole.COMM, 5000, 5040), (EventRole.COMM, 5040, 5400)]
    calls = [{"num_channels": 2}, {"num_channels": 24, "communicator": "tp", "num_bytes": 4 << 20}]
    return analyse([gpu_trace(rows, names=["gemm"] * 5 + ["nccl", "nccl"], calls=calls)])


def test_a_stretched_kernel_carries_the_collective_longest_beside_it():
    ((name, start, end),) = track(rank_timeline(contended(), 0), "~ stretched by communication")
    assert name == "x1.50 by all_reduce of 4 MiB on tp (24 channels): gemm"
    assert (start, end) == (pytest.approx(5e-6), pytest.approx(5.15e-6))


def test_overlap_groups_are_a_track_of_their_rank_only():
    groups = (("group 1", 5000, 5400, 0), ("group 2", 0, 10, 1))
    timeline = rank_timeline(contended(), 0, groups=groups)
    assert track(timeline, "~ overlap groups") == [("group 1", pytest.approx(5e-6), pytest.approx(5.4e-6))]
    assert track(rank_timeline(contended(), 0), "~ overlap groups") == []


def test_the_written_timeline_holds_the_groups_that_were_found(tmp_path):
    file = job()
    found = run_analyze(AnalyzeRequest(traces=(file.write(tmp_path / "t.json"),), out=tmp_path / "o"))
    events = json.loads((tmp_path / "o" / "timeline.json").read_bytes())["traceEvents"]
    threads = {event["tid"] for event in events if event["name"] == "thread_name"
               and event["args"]["name"].startswith("~ overlap groups")}  # fmt: skip
    drawn = [event for event in events if event["ph"] == "X" and event["tid"] in threads]
    assert len(drawn) == sum(group.num_occurrences for group in found.groups) > 0
    assert all("-bound)" in event["name"] for event in drawn)
