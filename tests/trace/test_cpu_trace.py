"""Traces of jobs on gloo: hand-made threads, and a run of ours."""

import json
from pathlib import Path

from lagom_overlap.analysis.findings import analyse
from lagom_overlap.trace.reader import read_traces

OURS = Path(__file__).parents[1] / "data" / "zero_step_gloo_trace.json.gz"


def event(name, start, length, *, cat="cpu_op", tid=1, **args):
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": start, "dur": length, "args": args}


FLOATS = {"Input Dims": [[1024]], "Input type": ["float"]}
STEP = [
    event("ProfilerStep#3", 0, 1000, cat="user_annotation"),
    event("aten::linear", 10, 100),
    event("aten::addmm", 20, 80),
    event("autograd::engine::evaluate_function: AddmmBackward0", 200, 600),  # holds a hook that waits
    event("AddmmBackward0", 205, 150),
    event("aten::mm", 210, 140),
    event("c10d::allreduce_", 360, 30, **{"Input Dims": [[[1024]]], "Input type": ["TensorList"]}),
    event("aten::mm", 400, 100),
    event("aten::add_", 850, 50),
    event("gloo:all_reduce", 380, 400, cat="user_annotation", tid=7, **FLOATS),
]
INFO = {"backend": "gloo", "rank": 1, "world_size": 2, "pg_config": [{"pg_desc": "default_pg", "pg_size": 2}]}


def written(path, events, info=INFO):
    path.write_text(json.dumps({"schemaVersion": 1, "distributedInfo": info, "traceEvents": events}))
    return path


def test_operators_that_compute_hide_what_gloos_threads_run(tmp_path):
    (trace,) = read_traces([written(tmp_path / "t.json", STEP)])
    found = analyse([trace])
    measures = found.ranks[0].measures
    assert measures.compute_ns == (100 + 140 + 100 + 50) * 1000  # neither autograd's nodes nor the call itself
    assert (measures.comm_ns, measures.overlap_ns) == (400_000, 100_000)
    (call,) = trace.calls
    assert (call.op, call.communicator, call.num_ranks, call.num_bytes) == ("all_reduce", "default_pg", 2, 4096)
    assert (trace.rank, trace.world_size, trace.is_cpu) == (1, 2, True)
    assert [step.number for step in trace.steps] == [3]
    assert sorted(trace.events.streams) == ["thread 1", "thread 7"]


def test_a_run_of_ours_on_gloo_overlaps_nothing():
    """ZeRO by hand, every collective awaited at once: all of it is exposed."""
    (trace,) = read_traces([OURS])
    measures = analyse([trace]).ranks[0].measures
    assert measures.overlap_ns == 0
    assert measures.comm_ns + measures.compute_ns + measures.idle_ns == measures.span_ns
    assert {call.op for call in trace.calls} == {"all_gather", "reduce_scatter", "barrier"}
    assert len(trace.steps) == 3


def test_next_to_ranks_with_a_gpu_one_of_the_cpu_is_left_out(tmp_path):
    kernel = event("k", 5, 5, cat="kernel", tid=7, device=0, stream=7, correlation=1)
    written(tmp_path / "rank0.json", [kernel], {"rank": 0, "world_size": 2})
    written(tmp_path / "rank1.json", STEP)
    unread: list[str] = []
    (trace,) = read_traces([tmp_path], unread=unread)
    assert trace.rank == 0
    assert unread == ["rank1.json: no GPU event, unlike the others; this file is left out"]
