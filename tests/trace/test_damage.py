"""What profilers get wrong in a GPU's timeline, as some profiler wrote it; names and numbers are invented."""

import pytest
from kineto_traces import NCCL, KinetoFile

from lagom_overlap.analysis.findings import analyse
from lagom_overlap.analysis.hta import hta_figures
from lagom_overlap.trace.files import open_streams
from lagom_overlap.trace.kineto_reader import read_kineto
from lagom_overlap.trace.reader import ReadOptions, read_traces

GEMM = "sm90_gemm"
ALL_REDUCE = NCCL.format("AllReduce_Sum_bf16_RING_LL")
FAR_US = 1_700_000_000_000_000


def spans(trace) -> list[tuple[int, int]]:
    return [(int(a) // 1000, int(b) // 1000) for a, b in zip(trace.events.start_ns, trace.events.end_ns, strict=True)]


@pytest.mark.parametrize(("start", "length"), [(0, 0), (0, 40), (FAR_US * 2, 5), (FAR_US - 10**12, 5)])
def test_an_event_with_a_time_that_is_none_is_dropped_and_counted(tmp_path, start, length):
    file = KinetoFile()
    for n in range(5):
        file.kernel(GEMM, FAR_US + 100 * n, 90)
    file.kernel(GEMM, start, length, launch=FAR_US + 200)
    (trace,) = read_traces([file.write(tmp_path / "t.json")])
    assert len(trace.events) == 5
    assert trace.events.span_ns == 490_000
    assert any("1 GPU event with a time of 0 or far from all others was dropped" in text for text in trace.warnings)


def test_a_clock_that_jumps_in_the_middle_drops_nothing(tmp_path):
    file = KinetoFile()
    for n in range(10):
        file.kernel(GEMM, (0 if n < 5 else FAR_US) + 10**9 + 100 * n, 90)
    (trace,) = read_traces([file.write(tmp_path / "t.json")])
    assert len(trace.events) == 10


def overrun(name: str, length: int, stream: int) -> KinetoFile:
    file = KinetoFile()
    for n in range(10):
        file.kernel(name, 100 + 100 * n, 1500 if n == 3 else length, stream=stream)
    for n in range(3):
        file.kernel(ALL_REDUCE if name == GEMM else GEMM, 1200 + 200 * n, 150, stream=30)
    return file


def test_a_duration_that_runs_over_later_kernels_of_its_stream_is_cut(tmp_path):
    path = overrun(GEMM, 90, 0).write(tmp_path / "t.json")
    found = analyse(read_traces([path]))
    measures = found.ranks[0].measures
    assert (measures.compute_ns, measures.overlap_ns, measures.exposed_comm_ns) == (900_000, 0, 450_000)
    (text,) = (text for text in found.warnings if "after later ones" in text)
    assert "1 kernel ends" in text
    assert GEMM in text
    (raw,) = read_traces([path], ReadOptions(as_recorded=True))
    assert hta_figures(raw).compute_us == 1500 + 300 - 30  # HTA mends nothing


def test_so_is_a_collectives(tmp_path):
    found = analyse(read_traces([overrun(ALL_REDUCE, 60, 20).write(tmp_path / "t.json")]))
    measures = found.ranks[0].measures
    assert (measures.comm_ns, measures.overlap_ns, measures.compute_ns) == (600_000, 0, 450_000)


def test_kernels_of_a_graph_and_dependent_launches_run_at_once(tmp_path):
    file = KinetoFile()
    for start, length in ((0, 500), (100, 50), (200, 50)):
        file.add(
            **{"ph": "X", "cat": "kernel", "name": GEMM, "pid": 0, "tid": 7, "ts": start, "dur": length},
            args={"device": 0, "stream": 7, "correlation": 5, "grid": [8, 1, 1], "block": [64, 1, 1]},
        )
    file.kernel(GEMM, 600, 100)
    file.kernel(GEMM, 690, 100)  # begun before the one before it has ended
    (trace,) = read_traces([file.write(tmp_path / "t.json")])
    assert spans(trace) == [(0, 500), (100, 150), (200, 250), (600, 700), (690, 790)]


def steps_of(file: KinetoFile, num: int, length: int) -> KinetoFile:
    for n in range(num):
        file.add(ph="X", cat="user_annotation", name=f"ProfilerStep#{n}", pid=10, tid=1, ts=n * length, dur=length)
    return file


def test_steps_whose_kernels_the_profiler_dropped_are_left_out_with_a_line(tmp_path):
    file = steps_of(KinetoFile(), 3, 1000)
    for n in range(30):
        file.kernel(GEMM, 10 + 100 * n, 75, launch=5 + 100 * n)
    kernels = [event for event in file.events if event["cat"] == "kernel"]
    file.events = [event for event in file.events if event not in kernels[:14]]
    found = analyse(read_traces([file.write(tmp_path / "t.json")]))
    assert [(step.number, step.measures.span_ns) for step in found.ranks[0].steps] == [(2, 975_000)]
    assert any("14 of 30 kernel launches have no GPU event, in steps 0, 1" in text for text in found.warnings)
    assert any("step 1 and what ran before are left out" in text for text in found.warnings)


def test_so_are_last_steps_whose_kernels_are_missing(tmp_path):
    # 16 kernels of 30: the second step has six of ten, the third none.
    file = steps_of(KinetoFile(), 3, 1000)
    for n in range(30):
        file.kernel(GEMM, 10 + 100 * n, 75, launch=5 + 100 * n)
    kernels = [event for event in file.events if event["cat"] == "kernel"]
    file.events = [event for event in file.events if event not in kernels[16:]]
    found = analyse(read_traces([file.write(tmp_path / "t.json")]))
    assert [(step.number, step.measures.span_ns) for step in found.ranks[0].steps] == [(0, 975_000)]
    assert any("14 of 30 kernel launches have no GPU event, in steps 1, 2" in text for text in found.warnings)
    assert any("step 1 and what ran after are left out" in text for text in found.warnings)


def test_a_kernel_without_a_time_is_dropped_where_times_count_from_the_profiler_s_start(tmp_path):
    file = KinetoFile()
    file.nccl("AllReduce_Sum_f32_RING_LL", 0, 0, op="allreduce", nelems=1024, launch=None)
    for n in range(2):
        file.nccl("AllReduce_Sum_f32_RING_LL", 1000 + 100 * n, 50, op="allreduce", nelems=1024)
    found = analyse(read_traces([file.write(tmp_path / "t.json")]))
    assert [(row.count, row.total_ns) for row in found.rows] == [(2, 100_000)]
    assert any("1 GPU event with a time of 0" in text for text in found.warnings)


def test_launches_after_the_last_kernel_and_other_calls_are_not_missed(tmp_path):
    file = KinetoFile()
    file.kernel(GEMM, 10, 75)
    for n, (name, at) in enumerate((("cudaLaunchKernel", 90), ("cudaEventRecord", 3), ("cudaLaunchHostFunc", 4))):
        args = {"correlation": 900 + n}
        file.add(ph="X", cat="cuda_runtime", name=name, pid=10, tid=1, ts=at, dur=1, args=args)
    (trace,) = read_traces([file.write(tmp_path / "t.json")])
    assert trace.warnings == ()


@pytest.mark.parametrize("category", ["xpu_runtime", "mtia_runtime", "privateuse1_runtime", "privateuse1_driver"])
def test_other_accelerators_launches_tell_what_waits_for_the_cpu(tmp_path, category):
    file = KinetoFile()
    for n in range(5):
        file.kernel(GEMM, 1000 * n + 20, 300, launch=1000 * n)
    for event in file.events:
        if event["cat"] == "cuda_runtime":
            event |= {"cat": category, "name": "urEnqueueKernelLaunch"}
    found = analyse(read_traces([file.write(tmp_path / "t.json")]))
    assert found.ranks[0].measures.host_bound_ns == 4 * (1000 - 320) * 1000


def test_hta_counts_a_step_that_is_marked_on_the_gpu_as_one_of_the_cpu(tmp_path):
    """HTA 0.5.0 on the same file: span 1850, idle 150, compute 1440, non-compute 260 us (run by others)."""
    file = steps_of(KinetoFile(), 2, 1000)
    for step in range(2):
        file.add(
            ph="X", cat="gpu_user_annotation", name=f"ProfilerStep#{step}", pid=0, tid=7, ts=800 + 1000 * step, dur=1
        )
        for n in range(4):
            at = 1000 * step + 200 * n
            file.kernel(GEMM, 800 + at, 180, launch=at + 100)
            file.kernel(ALL_REDUCE, 900 + at, 150, launch=at + 110, stream=20)
    (trace,) = read_traces([file.write(tmp_path / "t.json")], ReadOptions(as_recorded=True))
    found = hta_figures(trace)
    assert (found.span_us, found.idle_us, found.compute_us, found.non_compute_us) == (1850, 150, 1440, 260)


def test_a_kernel_that_a_side_stream_runs_at_once_begins_no_step_of_a_late_gpu(tmp_path):
    file = steps_of(KinetoFile(), 4, 1000)
    for n in range(7):
        file.kernel(GEMM, 10 + 100 * n, 95, launch=None)
    for step in range(4):
        at = 1000 * step
        file.kernel("embedding", at + 30, 8, launch=at + 15, stream=21, tid=2)
        for n in range(10):
            file.kernel(GEMM, at + 710 + 100 * n, 95, launch=at + 50 + 60 * n)
    found = analyse(read_traces([file.write(tmp_path / "t.json")]))
    assert [step.measures.span_ns for step in found.ranks[0].steps] == [1_000_000] * 3 + [995_000]


@pytest.mark.parametrize("block", [None, 512])
def test_entries_that_are_no_events_are_left_out_and_counted(tmp_path, block):
    file = KinetoFile()
    for n in range(5):
        file.kernel(GEMM, 100 + 100 * n, 90)
    whole = spans(read_traces([file.write(tmp_path / "whole.json")])[0])
    file.events[3:3] = [None, 5, "text"]
    path = file.write(tmp_path / "t.json")
    if block is None:
        (trace,) = read_traces([path])
    else:
        with open_streams(path) as streams:
            (trace,) = read_kineto(next(iter(streams)), b"", block_bytes=block)
    assert spans(trace) == whole
    assert [text for text in trace.warnings if "no events" in text] == [
        "3 entries of the list are no events, and left out"
    ]


def test_steps_of_one_number_that_follow_each_other_are_several(tmp_path):
    # Three steps of 1 ms, all called number 4; a second thread marks each of them, too.
    file = KinetoFile()
    for n in range(3):
        file.step(4, 1000 * n, 1000)
        file.step(4, 1000 * n + 1, 998)
        file.kernel(GEMM, 1000 * n + 100, 800)
    path = file.write(tmp_path / "t.json")
    (rank,) = analyse(read_traces([path])).ranks
    assert [(step.number, step.measures.span_ns) for step in rank.steps] == [(4, 10**6), (5, 10**6), (6, 8 * 10**5)]
    assert "3 steps have only 1 numbers: they are numbered in order of time" in rank.trace.warnings
    (recorded,) = read_traces([path], ReadOptions(as_recorded=True))  # as HTA counts them
    assert [step.number for step in recorded.steps] == [4]


def test_the_step_in_which_a_cut_file_ends_is_left_out(tmp_path):
    file = steps_of(KinetoFile(), 3, 1000)
    for n in range(30):
        file.kernel(GEMM, 10 + 100 * n, 75, launch=5 + 100 * n)
    data = file.to_json()
    path = tmp_path / "t.json"
    path.write_bytes(data[: len(data) * 3 // 4])  # after some 20 kernels
    found = analyse(read_traces([path]))
    assert [(step.number, step.measures.compute_ns) for step in found.ranks[0].steps] == [(0, 750_000), (1, 750_000)]
    assert any("step 2 and what ran after are left out: the file ends in it" in text for text in found.warnings)
    # A list may lack its bracket by the format: nothing is missing then.
    path.write_bytes(data[: data.rindex(b"]")])
    assert len(analyse(read_traces([path])).ranks[0].steps) == 3


def test_a_step_without_a_length_is_none(tmp_path):
    file = steps_of(KinetoFile(), 2, 1000)
    file.step(2, 1500, 0)
    for n in range(20):
        file.kernel(GEMM, 10 + 100 * n, 75, launch=5 + 100 * n)
    found = analyse(read_traces([file.write(tmp_path / "t.json")]))
    assert [step.measures.compute_ns for step in found.ranks[0].steps] == [750_000, 750_000]


def test_kernels_without_correlations_are_not_missing(tmp_path):
    file = steps_of(KinetoFile(), 2, 1000)
    for n in range(20):
        file.kernel(GEMM, 10 + 100 * n, 75, launch=5 + 100 * n)
    for event in file.events:
        if event["cat"] == "kernel":
            del event["args"]["correlation"]
    found = analyse(read_traces([file.write(tmp_path / "t.json")]))
    assert [step.measures.compute_ns for step in found.ranks[0].steps] == [750_000, 750_000]
    assert not any("no GPU event" in text for text in found.warnings)


def test_a_trace_of_copies_alone_says_that_kernels_are_missing(tmp_path):
    file = KinetoFile()
    file.kernel("Memcpy DtoH (Device -> Pageable)", 10, 100, cat="gpu_memcpy", bytes=4)
    found = analyse(read_traces([file.write(tmp_path / "t.json")]))
    assert any("only copies in it, no kernel" in text for text in found.warnings)
