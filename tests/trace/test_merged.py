"""Traces of several processes in one file, as merging tools write them: each is read as its own file would be."""

import json

import pytest
from kineto_traces import KinetoFile

from lagom_overlap.errors import TraceError
from lagom_overlap.trace.reader import read_traces


def of_rank(rank: int, device: int = 0) -> KinetoFile:
    """A step of three products and collectives, which launches count alike on all ranks."""
    file = KinetoFile(distributedInfo={"backend": "nccl", "rank": rank, "world_size": 2})
    file.step(1, 990 + 7 * rank, 990)
    for n in range(3):
        at = 1000 + 7 * rank + 330 * n
        file.kernel("gemm", at, 300 - 20 * rank, device=device)
        file.nccl("AllReduce_Sum_f32_RING_LL", at + 30, 150, op="allreduce", nelems=1 << 20, device=device)
    return file


def merged(renamed, *, device: int = 0) -> bytes:
    """Two ranks in one file, what they call a process renamed by (rank, old name, whether it is of the GPU)."""
    events = []
    for rank in (0, 1):
        for event in json.loads(of_rank(rank, device * rank).to_json())["traceEvents"]:
            events.append(event | {"pid": renamed(rank, event["pid"], event["cat"] == "kernel")})
    return json.dumps({"traceEvents": events}).encode()


def measured(trace) -> list[object]:
    events = trace.events
    waits = (events.start_ns - events.launch_ns).tolist()
    return [events.start_ns.tolist(), events.end_ns.tolist(), waits, len(trace.calls), trace.steps]


@pytest.mark.parametrize(
    ("renamed", "ranks"),
    [
        (lambda rank, pid, is_gpu: f"rank{rank} {pid}", [0, 1]),
        (lambda rank, pid, is_gpu: f"[Rank 1{rank}] {pid}", [10, 11]),
        (lambda rank, pid, is_gpu: pid + 100 * rank, [None, None]),
        (lambda rank, pid, is_gpu: rank if is_gpu else 4000 + rank, [None, None]),
    ],
)
def test_each_process_of_a_merged_file_is_read_as_its_own_file_would_be(tmp_path, renamed, ranks):
    alone = []
    for rank in (0, 1):
        alone += read_traces([of_rank(rank).write(tmp_path / f"{rank}.json")])
    path = tmp_path / "merged.json"
    path.write_bytes(merged(renamed))
    found = read_traces([path])
    assert [trace.rank for trace in found] == ranks
    assert [measured(trace) for trace in found] == [measured(trace) for trace in alone]
    assert all("several processes were merged" in trace.warnings[0] for trace in found)


def test_gpu_events_that_do_not_say_whose_they_are_are_refused_in_one_line(tmp_path):
    path = tmp_path / "merged.json"
    path.write_bytes(merged(lambda rank, pid, is_gpu: 0 if is_gpu else 4000 + rank))
    with pytest.raises(TraceError, match="launches of 2 processes and GPU events that do not say whose they are"):
        read_traces([path])


def test_several_gpus_of_one_process_are_not_taken_for_several_processes(tmp_path):
    file = of_rank(0)
    for n in range(3):
        file.kernel("gemm", 1000 + 330 * n, 300, device=1, stream=8)
        file.events[-1]["pid"] = 1
    found = read_traces([file.write(tmp_path / "t.json")])
    assert [trace.file for trace in found] == ["t.json (gpu 0)", "t.json (gpu 1)"]
